"""Scenarios of FSDP2's private interface of parameter groups, as public libraries use it.

docs/private-surface.md has one row for each scenario, with the scenario's name. A scenario returns
only values that must be equal under torch and fsdp_c.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
from behavior import DIM, Api, batch, blocks_and_head, grads, scenario, shard, train
from extensions import Extended
from fsdp_units import param_groups_of, set_last_microbatch
from private_hooks import error_type
from releases import has
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    FSDPMeshInfo,
    HSDPMeshInfo,
    TrainingState,
)
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, ShardedState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup
from torch.distributed.tensor import DTensor
from toy_models import ResidualBlock

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def group_of(module: Any) -> Any:
    return module._get_fsdp_state()._fsdp_param_group


def param_types(model: nn.Module) -> list[str]:
    return [type(param).__name__ for param in model.parameters()]


# ---- groups: read ----


@scenario()
def group_lookups(api: Api) -> list[Any]:
    """Records groups of a module with parameters, and of a module without own parameters."""
    model: Any = nn.Sequential(ResidualBlock(), ResidualBlock())
    for block in model:
        api.fully_shard(block)
    api.fully_shard(model)
    state = model._get_fsdp_state()
    group = group_of(model[0])
    return [
        [state._fsdp_param_group, state._fsdp_param_groups],
        [
            isinstance(group, FSDPParamGroup),
            model[0]._get_fsdp_state()._fsdp_param_groups == [group],
        ],
        [all(isinstance(param, FSDPParam) for param in group.fsdp_params), len(group.fsdp_params)],
        [type(group.fsdp_params).__name__, group.modules == (model[0],)],
    ]


@scenario()
def group_sharded_states(api: Api) -> list[Any]:
    model: Any = shard(api, blocks_and_head(1))
    group = group_of(model[0])

    def read_state() -> list[Any]:
        flags = [group.is_sharded, group.is_unsharded, group.is_sharded_post_forward]
        return [*flags, group._sharded_state.name, group._sharded_state is ShardedState.SHARDED]

    observed = [read_state()]
    model[0].unshard()
    observed.append(read_state())
    model[0].reshard()
    observed.append(read_state())
    return observed


def closest_sharded(module: nn.Module) -> nn.Module:
    """Returns the smallest module that has a state and contains ``module``."""
    parents = [m for m in _module_state_mapping if module in m.modules()]
    return min(parents, key=lambda parent: len(list(parent.modules())))


class ReadsGroupInGather(Extended):
    """Reads its group in ``fsdp_pre_all_gather``."""

    observed: list[Any] = []

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> Any:
        group = group_of(closest_sharded(module))
        self.observed.append([group._reshard_after_forward, group._training_state.name])
        return (self.held,), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: Any = None
    ) -> Any:
        return None if out is not None else (outputs[0], outputs)


@scenario()
def group_read_while_gathered(api: Api) -> list[Any]:
    """A tensor subclass reads whether the gather is for forward or for backward."""
    ReadsGroupInGather.observed = []
    model = nn.Sequential(nn.Linear(DIM, 4, bias=False), nn.Linear(4, 3))
    model[0].weight = nn.Parameter(ReadsGroupInGather(model[0].weight.detach()))
    shard(api, model)
    model(batch(api.rank)).square().mean().backward()
    model[0].set_reshard_after_forward(False)  # type: ignore[operator]
    model(batch(api.rank)).square().mean().backward()
    return ReadsGroupInGather.observed


@scenario()
def group_meshes(api: Api) -> list[Any]:
    """Records meshes and process groups, with and without replicas."""
    observed: list[Any] = []
    hybrid = init_device_mesh("cpu", (api.world, 1), mesh_dim_names=("replicate", "shard"))
    for mesh in (None, hybrid):
        info = group_of(shard(api, blocks_and_head(1), mesh=mesh)[0]).mesh_info
        observed.append([isinstance(info, FSDPMeshInfo), isinstance(info, HSDPMeshInfo)])
        observed.append(
            [info.shard_mesh_size, info.shard_mesh_rank, info.shard_process_group.size()]
        )
        observed.append([info.mesh.size(), info.mesh.mesh_dim_names])
    return observed


@scenario()
def group_settings(api: Api) -> list[Any]:
    """Records policies, device, dtypes and flags of a group."""
    policy, offload = MixedPrecisionPolicy(param_dtype=torch.bfloat16), OffloadPolicy()
    model: Any = shard(api, blocks_and_head(1), mp_policy=policy, offload_policy=offload)
    group = group_of(model[0])
    model(batch(api.rank))
    names = (
        "reduce_grads",
        "all_reduce_grads",
        "reshard_after_backward",
        "gradient_divide_factor",
        "unshard_async_op",
        "unshard_in_backward",
        "_reshard_after_forward",
        "_use_post_forward_mesh",
        "_all_gather_result",
        "_reshard_after_forward_event",
        "_partial_reduce_output",
        "_all_reduce_hook",
        *(() if has("2.15") else ("_orig_dtype", "_reduce_dtype")),
    )
    return [
        [
            getattr(group, "mp_policy", None) is policy,
            group.offload_policy is offload,
            str(group.device),
        ],
        [(name, getattr(group, name, "none")) for name in names],
    ]


@scenario()
def group_contexts(api: Api) -> list[Any]:
    """Records the context that groups share for their collectives, between steps."""
    model: Any = shard(api, blocks_and_head())
    model(batch(api.rank)).square().mean().backward()
    contexts = [group.comm_ctx for group in param_groups_of(model)]
    context = contexts[0]
    streams = ("all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream")
    return [
        [isinstance(context, FSDPCommContext), all(other is context for other in contexts)],
        [context is model._get_fsdp_state()._comm_ctx, context.device_handle.__name__],
        [type(getattr(context, name)).__name__ for name in (*streams, "all_reduce_stream")],
        [context.all_gather_state, context.reduce_scatter_states, list(context.post_forward_order)],
    ]


@scenario()
def group_names(api: Api) -> list[Any]:
    """Records names of groups and parameters after the first forward. One name is set before it."""
    model: Any = shard(api, blocks_and_head(2))
    group_of(model[0])._module_fqn = "embedding"
    model(batch(api.rank))
    return [[g._module_fqn, [p._param_fqn for p in g.fsdp_params]] for g in param_groups_of(model)]


# ---- groups: written and called ----


@scenario()
def group_training_state_written(api: Api) -> list[Any]:
    """Sets training states to idle after a forward without backward, and reshards the model."""
    model: Any = shard(api, blocks_and_head(), reshard_after_forward=False)
    model(batch(api.rank))
    for group in param_groups_of(model):
        group._training_state = TrainingState.IDLE
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    return [param_types(model), train(model, api.rank, 2)]


@scenario()
def group_post_forward_mesh_removed(api: Api) -> list[Any]:
    """A group whose post_forward_mesh_info is None stays unsharded until the mesh is restored."""
    model: Any = shard(api, blocks_and_head(1))
    group = group_of(model[0])
    info, group.post_forward_mesh_info = group.post_forward_mesh_info, None
    with torch.no_grad():
        model(batch(api.rank))
    observed: list[Any] = [group._reshard_after_forward, param_types(model[0])]
    model[0].reshard()
    group.post_forward_mesh_info = info
    with torch.no_grad():
        model(batch(api.rank))
    return [*observed, param_types(model[0]), train(model, api.rank, 1)]


@scenario()
def group_reductions_switched_off(api: Api) -> list[Any]:
    model: Any = shard(api, blocks_and_head())
    group_of(model[1]).reduce_grads = False
    model(batch(api.rank)).square().mean().backward()
    observed: list[Any] = [grads(model)]
    group_of(model[1]).reduce_grads = True
    model(batch(api.rank, 1)).square().mean().backward()
    return [*observed, grads(model)]


def train_with_reduce_dtypes(api: Api, assign: Callable[[Any, torch.dtype], None]) -> list[Any]:
    """Calls ``assign`` for each group before a step, and before a step with accumulation."""
    model: Any = shard(api, blocks_and_head(), mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    observed = train(model, api.rank, 1)
    for dtype in (torch.float32, torch.bfloat16):
        for group in param_groups_of(model):
            assign(group, dtype)
        observed += train(model, api.rank, 1)
        accumulate(model, api.rank)
        params = [param for group in param_groups_of(model) for param in group.fsdp_params]
        observed.append([str(param.unsharded_accumulated_grad is None) for param in params])
        set_last_microbatch(model, True)
        observed += train(model, api.rank, 1)
    return observed


@scenario()
def group_reduce_dtype_assigned(api: Api) -> list[Any]:
    """Assigns the dtype of reductions."""

    def assign(group: Any, dtype: torch.dtype) -> None:
        group._reduce_dtype = dtype

    return train_with_reduce_dtypes(api, assign)


@scenario()
def group_param_reduce_dtypes_assigned(api: Api) -> list[Any]:
    """Assigns the dtype in which parameters accumulate gradients.

    Since torch 2.15 their gradients are also reduced in this dtype.
    """

    def assign(group: Any, dtype: torch.dtype) -> None:
        for param in group.fsdp_params:
            param.reduce_dtype = dtype

    return train_with_reduce_dtypes(api, assign)


@scenario()
def group_unsharded_asynchronously(api: Api) -> list[Any]:
    model: Any = shard(api, blocks_and_head())
    model._set_unshard_async_op(True)
    flags = [group.unshard_async_op for group in param_groups_of(model)]
    return [flags, train(model, api.rank, 2)]


@scenario()
def group_unsharded_directly(api: Api) -> list[Any]:
    model: Any = shard(api, blocks_and_head())
    group = group_of(model[0])
    model._get_fsdp_state()._lazy_init()
    observed: list[Any] = [group._all_gather_result is None]
    group.unshard()
    observed += [group._all_gather_result is None, param_types(model[0])]
    group.wait_for_unshard()
    observed += [group._all_gather_result is None, param_types(model[0])]
    group.reshard()
    return [*observed, param_types(model[0]), train(model, api.rank, 1)]


@scenario()
def group_prefetches_replaced(api: Api) -> list[Any]:
    """Replaces a method by one that records calls, and another by one without effect."""
    calls: list[str] = []
    original = FSDPParamGroup._prefetch_unshard

    def counting(group: Any, kind: str) -> None:
        calls.append(kind)
        original(group, kind)

    observed: list[Any] = []
    model: Any = shard(api, blocks_and_head())
    model[0].set_modules_to_forward_prefetch([model[1]])
    with mock.patch.object(FSDPParamGroup, "_prefetch_unshard", staticmethod(counting)):
        observed += [train(model, api.rank, 2), list(calls)]
    with mock.patch.object(FSDPParamGroup, "_backward_prefetch", lambda self: None):
        observed.append(train(model, api.rank, 2))
    return observed


@scenario()
def group_post_backward_replaced(api: Api) -> list[Any]:
    """Replaces ``FSDPParamGroup.post_backward`` by a wrapper that first reads gradients."""
    original = FSDPParamGroup.post_backward
    observed: list[Any] = []

    def wrapped(self: Any, *unused: Any) -> None:
        for param in self.fsdp_params:
            grad = param._unsharded_param.grad if hasattr(param, "_unsharded_param") else None
            observed.append(None if grad is None else grad.detach().clone())
        original(self, *unused)

    model: Any = shard(api, blocks_and_head(1))
    with mock.patch.object(FSDPParamGroup, "post_backward", wrapped):
        observed.append(train(model, api.rank, 2))
    return observed


def reduce_directly(model: Any, before_each: Callable[[Any], None] = lambda group: None) -> None:
    """Reduces all gradients, as torch's pipeline stages do after their last microbatch.

    Calls ``before_each(group)`` before each reduction.
    """
    set_last_microbatch(model, True)
    root = fully_shard.state(model)
    for state in root._state_ctx.all_states:
        if state._fsdp_param_group:
            before_each(state._fsdp_param_group)
            state._fsdp_param_group.post_backward()
    root._root_post_backward_final_callback()


def accumulate(model: Any, rank: int) -> None:
    """Runs two backwards that do not reduce."""
    set_last_microbatch(model, False)
    for step in range(2):
        model(batch(rank, step)).float().square().mean().backward()


@scenario()
def group_post_backward_called_directly(api: Api) -> list[Any]:
    model: Any = shard(api, blocks_and_head())
    observed: list[Any] = []
    for _ in range(2):
        accumulate(model, api.rank)
        reduce_directly(model)
        observed += [grads(model), param_types(model)]
    return observed


@scenario()
def group_gradients_accumulated_directly(api: Api) -> list[Any]:
    """Adds gradients to the accumulated gradients of another dtype, then reduces them.

    Since 2.15 torch has no such methods: autograd accumulates in the dtype of the reduction.
    """

    def accumulate_to_unsharded(group: Any) -> None:
        for param in group.fsdp_params:
            if hasattr(param, "_unsharded_param") and not has("2.15"):
                param.accumulate_unsharded_grad_if_needed()
                param.to_accumulated_grad_if_needed()

    model: Any = shard(api, blocks_and_head(), mp_policy=MIXED)
    observed: list[Any] = []
    for _ in range(2):
        accumulate(model, api.rank)
        waiting = [param.unsharded_accumulated_grad for param in group_of(model[0]).fsdp_params]
        observed.append([None if grad is None else grad.detach().clone() for grad in waiting])
        reduce_directly(model, accumulate_to_unsharded)
        observed += [grads(model), param_types(model)]
    return observed


@scenario()
def group_constructor_replaced(api: Api) -> list[Any]:
    """A library gives single parameters other dtypes, by attributes that the constructor sets.

    The replacement reads the unsharded parameters before it calls torch's constructor.
    """
    construct, set_dtypes = FSDPParamGroup.__init__, FSDPParam.init_dtype_attrs
    observed: list[Any] = []

    def replacement(group: Any, params: Any, modules: Any, *rest: Any) -> None:
        observed.append([type(param).__name__ for m in modules for param in m.parameters()])
        if len(params) == 1:
            raise ValueError("a group of one parameter")
        construct(group, params, modules, *rest)
        for param, original in zip(group.fsdp_params, params, strict=True):
            param._has_own_dtype = original.ndim == 1

    def set_own_dtypes(param: Any, policy: MixedPrecisionPolicy) -> None:
        dtype = torch.float64 if param._has_own_dtype else policy.param_dtype
        set_dtypes(param, replace(policy, param_dtype=dtype))

    with (
        mock.patch.object(FSDPParamGroup, "__init__", replacement),
        mock.patch.object(FSDPParam, "init_dtype_attrs", set_own_dtypes),
    ):
        single = nn.Linear(DIM, DIM, bias=False)
        observed.append([error_type(lambda: api.fully_shard(single)), type(single).__name__])
        model: Any = api.fully_shard(blocks_and_head(1)[0], mp_policy=MIXED)
        model._get_fsdp_state()._lazy_init()
    found = [(str(p.param_dtype), str(p.reduce_dtype)) for p in group_of(model).fsdp_params]
    return [*observed, found]


@scenario()
def group_parameters_replaced(api: Api) -> list[Any]:
    """Assigns a shorter list to ``fsdp_params`` before the first forward."""
    group = group_of(shard(api, blocks_and_head(1))[0])
    shorter = group.fsdp_params[:-1]
    assigned = error_type(lambda: setattr(group, "fsdp_params", shorter))
    return [type(group.fsdp_params).__name__, assigned, len(group.fsdp_params)]


@scenario()
def group_end_of_backward_prevented(api: Api) -> list[Any]:
    """Marks the end of backward as queued, so that backwards of microbatches do not end a step.

    Gradients that a backward has reduced can be read before the program calls the callback. Since
    2.15 the program must also set whether ``finalize_backward`` ends the step.
    """
    model: Any = shard(api, blocks_and_head())
    context = model._get_fsdp_state()._state_ctx
    observed: list[Any] = []

    def prevent_end() -> None:
        context.post_backward_final_callback_queued = True
        if has("2.15"):
            context.manual_backward_finalization_active = False

    for _ in range(2):
        prevent_end()
        accumulate(model, api.rank)
        observed += [context.post_backward_final_callback_queued, param_types(model)]
        reduce_directly(model)
        observed += [context.post_backward_final_callback_queued, grads(model), param_types(model)]
    prevent_end()
    model(batch(api.rank)).square().mean().backward()
    found = [param.grad for param in model.parameters()]
    observed.append([grad.to_local() if isinstance(grad, DTensor) else grad for grad in found])
    model._get_fsdp_state()._root_post_backward_final_callback()
    return [*observed, train(model, api.rank, 2)]
