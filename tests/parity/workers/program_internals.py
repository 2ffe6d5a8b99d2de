"""Operations of random programs that use FSDP2's private surface as libraries do.

They call methods of groups, states and parameters, remove FSDP2's forward hooks, and patch
functions of torch's modules. Each gets its objects from the sharded modules of a model, so both
implementations run the same calls.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn
from program_operations import LAST, MANY, NO_YES, ROWS, loss_of, operation
from program_world import NoOperand, World, choose, tensors
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group

GROUP_METHODS: dict[str, Callable[[Any], Any]] = {
    "unshard and wait": lambda group: [group.unshard(), group.wait_for_unshard()][0],
    "unshard": lambda group: group.unshard(),
    "unshard, asynchronous": lambda group: group.unshard(async_op=True),
    "wait_for_unshard": lambda group: group.wait_for_unshard(),
    "reshard": lambda group: group.reshard(),
    "_to_sharded": lambda group: group._to_sharded(),
    "pre_backward": lambda group: group.pre_backward(False),
    "pre_backward and prefetch": lambda group: group.pre_backward(True),
    "post_backward": lambda group: group.post_backward(),
    "finalize_backward": lambda group: group.finalize_backward(),
    "lazy_init": lambda group: group.lazy_init(),
}
STATE_METHODS: dict[str, Callable[[Any], Any]] = {
    "_root_post_backward_final_callback": lambda state: state._root_post_backward_final_callback(),
    "_lazy_init": lambda state: state._lazy_init(),
}
GROUP_PROPERTIES = ("is_sharded", "is_unsharded", "is_sharded_post_forward")
PARAM_ATTRIBUTES = (
    "sharded_param",
    "sharded_size",
    "orig_dtype",
    "param_dtype",
    "reduce_dtype",
    "_param_fqn",
)
PATCHED = (
    (_fsdp_param_group, "foreach_reduce"),
    (_fsdp_param_group, "foreach_all_gather"),
    (_fsdp_param_group, "foreach_all_gather_copy_out"),
    (_fsdp_collectives, "foreach_reduce"),
    (_fsdp_collectives, "foreach_all_gather"),
    (_fsdp_collectives, "foreach_all_gather_copy_out"),
    (_fsdp_collectives, "foreach_reduce_scatter_copy_in"),
    (_fsdp_param_group.FSDPParamGroup, "unshard"),
    (_fsdp_param_group.FSDPParamGroup, "post_backward"),
)
HOOKS = ("_forward_pre_hooks", "_forward_hooks")
FLAGS = ("set_is_last_backward", "set_reshard_after_backward", "set_requires_gradient_sync")


def groups_of_unit(unit: Any) -> list[Any]:
    groups = list(unit._get_fsdp_state()._fsdp_param_groups)
    if not groups:
        raise NoOperand
    return groups


def states_of(group: Any) -> list[Any]:
    """Returns the states of a group that libraries read."""
    results: list[Any] = [getattr(group, name) for name in GROUP_PROPERTIES]
    return [*results, group._training_state.name, group._sharded_state.name]


# ---- direct calls ----


@operation(
    0.8, model=LAST, microbatches=(2, 1, 3), rows=ROWS, callback=NO_YES, nested=(True, False)
)
def pipeline_stage(
    world: World, model: int, microbatches: int, rows: int, callback: bool, nested: bool
) -> Any:
    """Accumulates gradients of microbatches, then reduces by ``post_backward()`` of each group.

    ``callback``: also calls the root's final callback, as torch's pipeline stages do.
    ``nested``: sets the flags of all units instead of the root's.
    """
    net = world.model(model)
    units = world.units(model)
    if not isinstance(net, FSDPModule):
        raise NoOperand
    for unit in units if nested else units[:1]:
        for name in FLAGS:
            getattr(unit, name)(False)
    losses = []
    for _ in range(microbatches):
        losses.append(loss_of(net(world.rows(rows)), ""))
        losses[-1].backward()
    for unit in units if nested else units[:1]:
        for name in FLAGS:
            getattr(unit, name)(True)
    for unit in units:
        for group in unit._get_fsdp_state()._fsdp_param_groups:
            group.post_backward()
    if callback:
        net._get_fsdp_state()._root_post_backward_final_callback()
    world.record_event("gradients", [parameter.grad for parameter in net.parameters()])
    return losses


@operation(1.2, model=LAST, unit=MANY, name=tuple(GROUP_METHODS), all_units=NO_YES)
def call_group(world: World, model: int, unit: int, name: str, all_units: bool) -> Any:
    """Calls a method of the groups of one unit, or of all units in order."""
    units = world.units(model) if all_units else [world.unit(model, unit)]
    groups = [group for one in units for group in groups_of_unit(one)]
    if not groups:
        raise NoOperand
    results = [GROUP_METHODS[name](group) for group in groups]
    return [results, [states_of(group) for group in groups]]


@operation(0.4, model=LAST, unit=(0, 0, 0, *MANY), name=tuple(STATE_METHODS))
def call_state(world: World, model: int, unit: int, name: str) -> Any:
    """Calls a method of a state, usually of the root."""
    return STATE_METHODS[name](world.unit(model, unit)._get_fsdp_state())


@operation(0.5, model=LAST, unit=MANY, unsharded=(True, False))
def call_params(world: World, model: int, unit: int, unsharded: bool) -> Any:
    """Calls ``to_sharded()`` of each ``FSDPParam``, and ``_to_sharded()`` of the group.

    Both are needed, because torch's group has a state of its own. ``unsharded``: unshards before.
    """
    group = groups_of_unit(world.unit(model, unit))[0]
    if unsharded:
        group.unshard()
        group.wait_for_unshard()
    if not group.is_unsharded:
        raise NoOperand
    world.record_event(
        "unsharded", *(type(param.unsharded_param).__name__ for param in group.fsdp_params)
    )
    for param in group.fsdp_params:
        param.to_sharded()
    group._to_sharded()
    read = [[getattr(param, name) for name in PARAM_ATTRIBUTES] for param in group.fsdp_params]
    return [states_of(group), read, [param.sharded_state.name for param in group.fsdp_params]]


# ---- hooks ----


@contextlib.contextmanager
def without_hooks(net: nn.Module) -> Iterator[int]:
    """Removes FSDP2's forward hooks, found by their ``__module__``, in the context."""
    kept = []
    count = 0
    for module in net.modules():
        for name in HOOKS:
            hooks = getattr(module, name)
            kept.append((hooks, dict(hooks)))
            for key, hook in list(hooks.items()):
                if getattr(hook, "__module__", "").startswith("torch.distributed.fsdp"):
                    del hooks[key]
                    count += 1
    try:
        yield count
    finally:
        for hooks, before in kept:
            hooks.clear()
            hooks.update(before)


@operation(
    0.6, model=LAST, unsharded=(True, True, False), with_grad=NO_YES, reshard_after=(True, False)
)
def forward_without_hooks(
    world: World, model: int, unsharded: bool, with_grad: bool, reshard_after: bool
) -> Any:
    """Runs forward without FSDP2's hooks.

    ``unsharded``: unshards before forward. ``reshard_after``: reshards after forward.
    """
    net = world.model(model)
    units = world.units(model)
    if not units:
        raise NoOperand
    for unit in units if unsharded else []:
        unit.unshard()
    try:
        with without_hooks(net) as count, torch.set_grad_enabled(with_grad):
            world.record_event("hooks", count)
            out = net(world.rows(3))
            world.record_event(
                "weights", *(type(parameter).__name__ for parameter in net.parameters())
            )
    finally:
        for unit in units if reshard_after else []:
            unit.reshard()
    return [tensor.detach() for tensor in tensors(out)]


# ---- patches ----


@operation(0.5, index=range(len(PATCHED)))
def patch(world: World, index: int) -> None:
    """Replaces a function of torch by a wrapper that calls it."""
    owner, name = choose(list(PATCHED), index)
    function = getattr(owner, name)

    @functools.wraps(function)
    def call_original(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    setattr(owner, name, call_original)
    world.patches.append((owner, name, function))


@operation(0.4)
def unpatch(world: World) -> None:
    """Removes the latest patch."""
    if not world.patches:
        raise NoOperand
    owner, name, function = world.patches.pop()
    setattr(owner, name, function)
