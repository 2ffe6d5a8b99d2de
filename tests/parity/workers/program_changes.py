"""Operations of random programs on settings, hooks, state and parameters of a model."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from program_operations import FEW, LAST, MANY, NO_YES, arm_failure, call_in_mode, operation
from program_world import NoOperand, World, choose, describe, tensors
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import share_comm_ctx
from torch.distributed.tensor import DTensor

# ---- units ----


@operation(1.2, model=LAST, unit=MANY, is_async=NO_YES)
def unshard(world: World, model: int, unit: int, is_async: bool) -> Any:
    """Unshards a unit. If ``is_async``, an operation ``wait`` may wait for the handle later."""
    handle = world.unit(model, unit).unshard(async_op=is_async)
    if handle is not None:
        world.handles.append(handle)
    return handle is None


@operation(0.8, index=LAST)
def wait(world: World, index: int) -> Any:
    return choose(world.handles, index).wait()


@operation(1.0, model=LAST, unit=MANY, all_units=NO_YES)
def reshard(world: World, model: int, unit: int, all_units: bool) -> None:
    for target in world.units(model) if all_units else [world.unit(model, unit)]:
        target.reshard()


FLAGS = (
    "set_requires_gradient_sync",
    "set_requires_all_reduce",
    "set_is_last_backward",
    "set_reshard_after_backward",
    "set_reshard_after_forward",
    "set_unshard_in_backward",
    "set_force_sum_reduction_for_comms",
    "set_reduce_scatter_unused_params",
    "set_allocate_memory_from_process_group_for_comm",
    "_set_unshard_async_op",
)
WITH_RECURSE = {
    "set_requires_gradient_sync", "set_requires_all_reduce", "set_reshard_after_backward",
    "set_reshard_after_forward", "set_reduce_scatter_unused_params",
}  # fmt: skip
"""Setters with an argument ``recurse``."""


@operation(
    2.5,
    name=(*FLAGS[:5], *FLAGS),
    model=LAST,
    unit=(0, *MANY),
    value=(False, True),
    recurse=(True, True, False),
)
def set_flag(world: World, name: str, model: int, unit: int, value: bool, recurse: bool) -> Any:
    kwargs = {} if recurse or name not in WITH_RECURSE else {"recurse": False}
    return getattr(world.unit(model, unit), name)(value, **kwargs)


@operation(
    0.5,
    name=("set_gradient_divide_factor", "set_reduce_scatter_divide_factor"),
    model=LAST,
    unit=MANY,
    value=(2.0, 1.0, 0.5, 3.0),
)
def set_divide_factor(world: World, name: str, model: int, unit: int, value: float) -> Any:
    return getattr(world.unit(model, unit), name)(value)


@operation(0.2, model=LAST, unit=MANY, value=(2, 1, 0, True))
def set_input_buffers(world: World, model: int, unit: int, value: int) -> Any:
    return world.unit(model, unit).set_reduce_scatter_max_input_buffers(value)


@operation(
    0.6,
    direction=("forward", "backward"),
    model=LAST,
    unit=MANY,
    first=MANY,
    count=(1, 2, 0),
    unsharded_last=NO_YES,
)
def prefetch(
    world: World,
    direction: str,
    model: int,
    unit: int,
    first: int,
    count: int,
    unsharded_last: bool,
) -> None:
    units = world.units(model)
    if not units:
        raise NoOperand
    targets = [choose(units, first + index) for index in range(count)]
    targets += [nn.Linear(2, 2)] if unsharded_last and count == 2 else []
    getattr(world.unit(model, unit), f"set_modules_to_{direction}_prefetch")(targets)


@operation(0.3, model=LAST, unit=MANY)
def set_reduce_hook(world: World, model: int, unit: int) -> None:
    def double(row: torch.Tensor) -> None:
        row.mul_(2)

    world.unit(model, unit).set_all_reduce_hook(double)


@operation(0.6, model=LAST, unit=(0, 0, 0, 1, 2))
def reset_iter_state(world: World, model: int, unit: int) -> None:
    world.unit(model, unit).reset_iter_state()


@operation(0.1, model=LAST, other=LAST)
def share_context(world: World, model: int, other: int) -> None:
    share_comm_ctx([world.model(model), world.model(other)])


# ---- hooks ----


def recording_hook(world: World, name: str) -> Callable[..., None]:
    def hook(*args: Any) -> None:
        world.record_event(name, *(arg for arg in args if not isinstance(arg, nn.Module)))

    return hook


MODULE_HOOKS = (
    "register_forward_hook",
    "register_forward_pre_hook",
    "register_full_backward_hook",
    "register_full_backward_pre_hook",
)
PARAMETER_HOOKS = ("register_hook", "register_post_accumulate_grad_hook")


@operation(0.5, model=LAST, module=range(20), name=MODULE_HOOKS, prepend=NO_YES, raising=(0, 0, 1))
def hook_module(
    world: World, model: int, module: int, name: str, prepend: bool, raising: bool
) -> None:
    target = world.module(model, module)
    if raising:
        hook: Any = raise_once(name)
    else:
        hook = recording_hook(world, f"{name} of {module}")
    world.hooks.append(getattr(target, name)(hook, prepend=prepend))


def raise_once(name: str) -> Callable[..., None]:
    remaining = [name]

    def hook(*args: Any) -> None:
        if remaining:
            raise RuntimeError(f"a hook of {remaining.pop()} raises")

    return hook


@operation(0.5, model=LAST, parameter=MANY, name=PARAMETER_HOOKS, raising=(0, 0, 1))
def hook_parameter(world: World, model: int, parameter: int, name: str, raising: bool) -> None:
    target = world.parameter(model, parameter)
    if raising:
        hook: Any = raise_once(name)
    else:
        hook = recording_hook(world, f"{name} of {parameter}")
    world.hooks.append(getattr(target, name)(hook))


@operation(0.3, index=LAST, raising=(0, 0, 1))
def hook_output(world: World, index: int, raising: bool) -> None:
    for tensor in tensors(choose(world.outputs, index))[:1]:
        if tensor.requires_grad:
            hook = raise_once("an output") if raising else recording_hook(world, "an output")
            world.hooks.append(tensor.register_hook(hook))


@operation(0.3, index=LAST)
def remove_hook(world: World, index: int) -> None:
    choose(world.hooks, index).remove()


# ---- parameters, gradients, modules ----


@operation(1.0, model=LAST, parameter=MANY, value=(False, True), all_of_module=(0, 0, 0, 1))
def train_parameter(
    world: World, model: int, parameter: int, value: bool, all_of_module: bool
) -> Any:
    target = (world.module if all_of_module else world.parameter)(model, parameter)
    target.requires_grad_(value)
    return sharding_kind(target)


def sharding_kind(target: Any) -> str:
    """Returns "shards" or "unsharded" for the rules of ``program_known.py``."""
    params = target.parameters() if isinstance(target, nn.Module) else [target]
    return "shards" if all(isinstance(param, DTensor) for param in params) else "unsharded"


@operation(0.6, model=LAST, parameter=MANY, change=("none", "ones", "double", "detach", "bad"))
def change_grad(world: World, model: int, parameter: int, change: str) -> None:
    target = world.parameter(model, parameter)
    if change == "none":
        target.grad = None
    elif change == "ones":
        target.grad = torch.ones_like(target)
    elif change == "bad":
        target.grad = torch.ones(3, 3)
    elif target.grad is None:
        raise NoOperand
    elif change == "double":
        target.grad.mul_(2)
    else:
        target.grad = target.grad.detach().clone()


@operation(0.6, model=LAST, parameter=MANY, method=("no_grad", "data", "new data", "local", "bare"))
def write_parameter(world: World, model: int, parameter: int, method: str) -> str:
    """Writes into a parameter as user code does."""
    target = world.parameter(model, parameter)
    if method == "no_grad":
        with torch.no_grad():
            target.mul_(0.5)
    elif method == "data":
        target.data.add_(0.25)
    elif method == "new data":
        target.data = target.data * 0.75
    elif method == "bare":
        target.mul_(2)
    else:
        local = target._local_tensor if isinstance(target, DTensor) else target
        local.detach().fill_(0.125)
    return sharding_kind(target)


@operation(
    0.25, model=LAST, module=range(20), member=("parameter", "extra", "none", "module", "new")
)
def replace_member(world: World, model: int, module: int, member: str) -> None:
    """Replaces or adds a parameter or a module."""
    target = world.module(model, module)
    params = dict(target.named_parameters(recurse=False))
    children = dict(target.named_children())
    if member == "extra":
        target.extra = nn.Parameter(torch.ones(3))
    elif member == "new":
        target.added = nn.Linear(4, 4)
    elif member == "module":
        name = choose(sorted(n for n, c in children.items() if isinstance(c, nn.Linear)), 0)
        setattr(target, name, nn.Linear(4, children[name].out_features))
    else:
        name = choose(sorted(params), 0)
        if member == "none":
            setattr(target, name, None)
        else:
            setattr(target, name, nn.Parameter(params[name].detach().clone()))


CASTS: dict[str, Callable[[Any], Any]] = {
    "bfloat16": lambda module: module.bfloat16(),
    "float": lambda module: module.float(),
    "double": lambda module: module.to(torch.float64),
    "cpu": lambda module: module.to("cpu"),
    "same": lambda module: module._apply(lambda tensor: tensor),
    "clone": lambda module: module._apply(lambda tensor: tensor.clone()),
    "empty": lambda module: module.to_empty(device="cpu").apply(refill),
    "meta": lambda module: module.to("meta"),
}


def refill(module: nn.Module) -> None:
    with torch.no_grad():
        for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False)):
            tensor.fill_(0.3)


@operation(0.4, model=LAST, module=(0, 0, 0, *range(20)), cast=tuple(CASTS))
def convert(world: World, model: int, module: int, cast: str) -> None:
    CASTS[cast](world.module(model, module))


@operation(0.4, model=LAST, module=(0, 0, *range(20)), value=(False, True))
def set_training_mode(world: World, model: int, module: int, value: bool) -> None:
    world.module(model, module).train(value)


# ---- state ----


@operation(
    0.6, model=LAST, kind=("dict", "full", "offloaded", "sharded", "trained"), keep_tensors=NO_YES
)
def save_state(world: World, model: int, kind: str, keep_tensors: bool) -> Any:
    """Saves a state dict. ``keep_tensors``: saves the tensors themselves instead of copies."""
    net = world.model(model)
    if kind == "dict":
        state = net.state_dict()
    else:
        options = StateDictOptions(
            full_state_dict=kind in ("full", "offloaded"),
            cpu_offload=kind == "offloaded",
            ignore_frozen_params=kind == "trained",
        )
        state = get_model_state_dict(net, options=options)
    if not keep_tensors:
        state = {name: value.detach().clone() for name, value in state.items()}
    world.saved.append(state)
    return state


@operation(0.6, model=LAST, index=LAST, strict=(True, False), assign=NO_YES, omit_first=NO_YES)
def load_state(
    world: World, model: int, index: int, strict: bool, assign: bool, omit_first: bool
) -> list[list[str]]:
    """Loads a state dict, without its first entry if ``omit_first``."""
    state = dict(list(choose(world.saved, index).items())[1 if omit_first else 0 :])
    keys = world.model(model).load_state_dict(state, strict=strict, assign=assign)
    return [list(keys.missing_keys), list(keys.unexpected_keys)]


@operation(0.4, model=LAST, index=LAST, full_state=NO_YES, strict=(True, False), from_rank_0=NO_YES)
def set_model_state(
    world: World, model: int, index: int, full_state: bool, strict: bool, from_rank_0: bool
) -> Any:
    """Loads a state dict by ``set_model_state_dict``."""
    options = StateDictOptions(
        full_state_dict=full_state, strict=strict, broadcast_from_rank0=from_rank_0 and full_state
    )
    keys = set_model_state_dict(world.model(model), choose(world.saved, index), options=options)
    return [list(keys.missing_keys), list(keys.unexpected_keys)]


@operation(0.3, model=LAST, optimizer=LAST, full_state=NO_YES, load_again=NO_YES)
def get_optimizer_state(
    world: World, model: int, optimizer: int, full_state: bool, load_again: bool
) -> Any:
    """Returns the state of an optimizer. ``load_again``: loads this state afterwards."""
    net, target = world.model(model), choose(world.optimizers, optimizer)
    options = StateDictOptions(full_state_dict=full_state)
    state = get_optimizer_state_dict(net, target, options=options)
    description = describe(state["state"])
    if load_again:
        set_optimizer_state_dict(net, target, state, options=options)
    return description


@operation(0.4, model=LAST, parameter=MANY)
def gather_parameter(world: World, model: int, parameter: int) -> Any:
    target = world.parameter(model, parameter)
    return target.full_tensor() if isinstance(target, DTensor) else target


@operation(0.3, model=LAST, module=(0, 0, *range(20)), method=("copy", "pickle", "save", "state"))
def duplicate(world: World, model: int, module: int, method: str) -> Any:
    """Copies or serializes a module. A copy of a whole model becomes a model of the program."""
    target = world.module(model, module)
    stream = io.BytesIO()
    if method == "copy":
        copied: Any = copy.deepcopy(target)
    elif method == "pickle":
        copied = pickle.loads(pickle.dumps(target))
    elif method == "save":
        torch.save(target, stream)
        copied = None
    else:
        torch.save(target.state_dict(), stream)
        stream.seek(0)
        return torch.load(stream, weights_only=False)
    if copied is not None and target is world.model(model) and len(world.models) < 3:
        world.models.append(copied)
    return [type(m).__name__ for m in copied.modules()] if copied is not None else None


@operation(0.3, kind=("outputs", "model", "optimizers", "handles", "hooks"))
def drop_objects(world: World, kind: str) -> None:
    """Drops objects and collects garbage."""
    if kind == "model" and len(world.models) > 1:
        world.models.pop()
    elif kind != "model":
        getattr(world, kind).clear()
    gc.collect()


@operation(0.3, model=LAST, number=FEW)
def evaluate_within_forward(world: World, model: int, number: int) -> Any:
    """Runs an evaluation from a hook within a training forward.

    ``number`` has no effect. It keeps the random draws of the programs' seeds.
    """
    net = world.model(model)
    handle = net.register_forward_pre_hook(lambda *unused: evaluate())

    def evaluate() -> None:
        handle.remove()
        world.record_event("inner", call_in_mode(world, net, "no_grad", 3))

    with arm_failure(""):
        out = call_in_mode(world, net, "", 3)
    world.outputs.append(out)
    return out
