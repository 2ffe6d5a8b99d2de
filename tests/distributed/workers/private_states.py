"""Scenarios of FSDP2's module classes and private states, as public libraries read them.

docs/private-surface.md has one row for each scenario, with the scenario's name. A scenario returns
only values that must be equal under torch and fsdp_c.
"""

from __future__ import annotations

import copy
import types
from typing import Any

import torch
import torch.distributed.fsdp._fully_shard._fsdp_state as torch_state
import torch.nn as nn
from behavior import Api, batch, blocks_and_head, grads, scenario, shard, train
from private_hooks import error_type, modules_of_each_kind, sharded_list, state_of
from torch.distributed._composable.contract import _get_registry
from torch.distributed._composable_state import _get_module_state, _State
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState, _get_module_fsdp_state
from torch.distributed.fsdp._fully_shard._fully_shard import get_cls_to_fsdp_cls
from toy_models import ResidualBlock

# ---- classes of modules ----


@scenario()
def class_names(api: Api) -> list[Any]:
    return [
        [
            [c.__name__ for c in type(module).__mro__],
            type(module).__module__,
            type(module).__qualname__,
            isinstance(module, FSDPModule),
            issubclass(type(module), FSDPModule),
            module._orig_cls_mro_index if hasattr(module, "_orig_cls_mro_index") else None,
            repr(module).split("(")[0],
        ]
        for module in modules_of_each_kind(api)
    ]


@scenario()
def class_table(api: Api) -> list[Any]:
    module = api.fully_shard(ResidualBlock())
    table = get_cls_to_fsdp_cls()
    return [table[ResidualBlock] is type(module), error_type(lambda: copy.deepcopy(module))]


@scenario()
def class_of_a_slice(api: Api) -> list[Any]:
    model: Any = shard(api, blocks_and_head())
    return [type(model).__name__, type(model[:2]).__name__, len(model[:2])]


@scenario()
def marks_of_managed_modules(api: Api) -> list[Any]:
    """Records attributes that ``fully_shard`` adds to modules."""
    marks = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
    before = set(vars(blocks_and_head(1)[0]))
    observed: list[Any] = []
    for module in modules_of_each_kind(api):
        observed.append([getattr(module, mark, None) for mark in marks])
        observed.append([[getattr(m, mark, None) for mark in marks] for m in module.children()])
        observed.append(sorted(set(vars(module)) - before))
    return observed


@scenario()
def forward_methods(api: Api) -> list[Any]:
    """A registered forward method has torch's attributes and unshards its module."""
    block: Any = blocks_and_head(1)[0]
    block.encode = types.MethodType(ResidualBlock.forward, block)
    api.fully_shard(block)
    register_fsdp_forward_method(block, "encode")
    output = block.encode(batch(api.rank))
    output.square().mean().backward()
    return [block.encode.__name__, hasattr(block.encode, "__wrapped__"), grads(block)]


# ---- states ----


@scenario()
def state_lookups(api: Api) -> list[Any]:
    """Calls all functions of torch that return the state of a module."""
    observed: list[Any] = []
    for module in modules_of_each_kind(api):
        state = state_of(module)
        observed.append(
            [fully_shard.state(module) is state, _get_module_fsdp_state(module) is state]
        )
        observed.append([_get_module_state(module) is state, list(_get_registry(module) or {})])
    observed.append([_get_module_fsdp_state(nn.Linear(2, 2)), fully_shard.state(nn.Linear(2, 2))])
    return observed


@scenario()
def state_types(api: Api) -> list[Any]:
    return [
        [
            isinstance(state, FSDPState),
            isinstance(state, _State),
            [c for c in ("FSDPState", "_State") if c in [k.__name__ for k in type(state).__mro__]],
            torch_state.FSDPState is FSDPState,
            state._state_name,
        ]
        for state in map(state_of, modules_of_each_kind(api))
    ]


@scenario()
def state_contexts(api: Api) -> list[Any]:
    """Records the states of a root, their order, and the contexts that they share."""
    model: Any = sharded_list(api)
    root = state_of(model)
    before = [root._is_root, len(root._state_ctx.all_states)]
    model(batch(api.rank)).square().mean().backward()
    states = root._state_ctx.all_states
    return [
        before,
        [states.index(state_of(module)) for module in (model, model[0], model[1])],
        [state._is_root for state in states],
        [state._state_ctx is root._state_ctx for state in states],
        [state._comm_ctx is root._comm_ctx for state in states],
        root._state_ctx.iter_forward_root,
        root._state_ctx.post_backward_final_callback_queued,
        root._state_ctx.is_last_backward,
        root._state_ctx.post_optim_event,
    ]


@scenario()
def state_settings(api: Api) -> list[Any]:
    """Records policies, device and modules of a state."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model: Any = shard(api, blocks_and_head(1), mp_policy=policy)
    state = state_of(model[0])
    return [
        [state._mp_policy == policy, state._mp_policy.output_dtype],
        [state._modules == (model[0],), str(state._device), state._device_handle.__name__],
        state._auto_reshard_after_forward,
    ]


@scenario()
def state_training_states(api: Api) -> list[Any]:
    """Records ``_training_state`` of states and groups, in forward and backward."""
    model: Any = shard(api, blocks_and_head(1))
    observed: list[Any] = []

    def read_state(*unused: Any) -> None:
        for module in (model, model[0]):
            state = state_of(module)
            observed.append(
                [state._training_state.name, state._fsdp_param_group._training_state.name]
            )

    read_state()
    model[0].linear.register_forward_hook(read_state)
    model[0].linear.register_full_backward_hook(read_state)
    model(batch(api.rank)).square().mean().backward()
    read_state()
    return observed


@scenario()
def state_prefetch_lists(api: Api) -> list[Any]:
    """Assigns lists of states to prefetch."""
    model: Any = shard(api, blocks_and_head())
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state_of(module)._states_to_backward_prefetch = []
    state_of(model[0])._states_to_forward_prefetch = [state_of(model[1])]
    found = state_of(model[0])._states_to_forward_prefetch
    return [len(found), found[0] is state_of(model[1]), train(model, api.rank, 2)]


@scenario()
def lazy_init_called_directly(api: Api) -> list[Any]:
    """Runs lazy init before the first forward, then makes the root reshard after forward again."""
    model: Any = shard(api, blocks_and_head(1))
    state = state_of(model)
    info = state._fsdp_param_group.post_forward_mesh_info
    state._lazy_init()
    observed: list[Any] = [state._is_root, state._fsdp_param_group.post_forward_mesh_info is None]
    state._fsdp_param_group.post_forward_mesh_info = info
    model(batch(api.rank))
    observed.append([type(param).__name__ for param in model.parameters()])
    return [*observed, train(model, api.rank, 2)]
