"""The operations of random programs that change a model: settings, hooks, state, parameters."""

from __future__ import annotations

import copy
import gc
import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from program_operations import FEW, LAST, MANY, NO_YES, armed, called, operation
from program_world import Nothing, World, chosen, shown, tensors
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


@operation(1.2, model=LAST, unit=MANY, later=NO_YES)
def unshard(world: World, model: int, unit: int, later: bool) -> Any:
    """``later``: what comes back is waited for by another operation, or never."""
    handle = world.unit(model, unit).unshard(async_op=later)
    if handle is not None:
        world.handles.append(handle)
    return handle is None


@operation(0.8, which=LAST)
def wait(world: World, which: int) -> Any:
    return chosen(world.handles, which).wait()


@operation(1.0, model=LAST, unit=MANY, every=NO_YES)
def reshard(world: World, model: int, unit: int, every: bool) -> None:
    for found in world.units(model) if every else [world.unit(model, unit)]:
        found.reshard()


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
ONLY_THIS = {
    "set_requires_gradient_sync", "set_requires_all_reduce", "set_reshard_after_backward",
    "set_reshard_after_forward", "set_reduce_scatter_unused_params",
}  # fmt: skip
"""Those with ``recurse``."""


@operation(
    2.5,
    name=(*FLAGS[:5], *FLAGS),
    model=LAST,
    unit=(0, *MANY),
    value=(False, True),
    recurse=(True, True, False),
)
def flag(world: World, name: str, model: int, unit: int, value: bool, recurse: bool) -> Any:
    kwargs = {} if recurse or name not in ONLY_THIS else {"recurse": False}
    return getattr(world.unit(model, unit), name)(value, **kwargs)


@operation(
    0.5,
    name=("set_gradient_divide_factor", "set_reduce_scatter_divide_factor"),
    model=LAST,
    unit=MANY,
    value=(2.0, 1.0, 0.5, 3.0),
)
def factor(world: World, name: str, model: int, unit: int, value: float) -> Any:
    return getattr(world.unit(model, unit), name)(value)


@operation(0.2, model=LAST, unit=MANY, value=(2, 1, 0, True))
def input_buffers(world: World, model: int, unit: int, value: int) -> Any:
    return world.unit(model, unit).set_reduce_scatter_max_input_buffers(value)


@operation(
    0.6, way=("forward", "backward"), model=LAST, unit=MANY, first=MANY, count=(1, 2, 0), odd=NO_YES
)
def prefetch(
    world: World, way: str, model: int, unit: int, first: int, count: int, odd: bool
) -> None:
    units = world.units(model)
    if not units:
        raise Nothing
    named = [chosen(units, first + index) for index in range(count)]
    named += [nn.Linear(2, 2)] if odd and count == 2 else []
    getattr(world.unit(model, unit), f"set_modules_to_{way}_prefetch")(named)


@operation(0.3, model=LAST, unit=MANY)
def reduce_hook(world: World, model: int, unit: int) -> None:
    def double(row: torch.Tensor) -> None:
        row.mul_(2)

    world.unit(model, unit).set_all_reduce_hook(double)


@operation(0.6, model=LAST, unit=(0, 0, 0, 1, 2))
def reset_iter_state(world: World, model: int, unit: int) -> None:
    world.unit(model, unit).reset_iter_state()


@operation(0.1, model=LAST, other=LAST)
def share(world: World, model: int, other: int) -> None:
    share_comm_ctx([world.model(model), world.model(other)])


# ---- hooks ----


def noting(world: World, name: str) -> Callable[..., None]:
    def note(*args: Any) -> None:
        world.note(name, *(arg for arg in args if not isinstance(arg, nn.Module)))

    return note


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
    found = world.module(model, module)
    if raising:
        hook: Any = raise_once(world, name)
    else:
        hook = noting(world, f"{name} of {module}")
    world.hooks.append(getattr(found, name)(hook, prepend=prepend))


def raise_once(world: World, name: str) -> Callable[..., None]:
    left = [name]

    def hook(*args: Any) -> None:
        if left:
            raise RuntimeError(f"a hook of {left.pop()} raises")

    return hook


@operation(0.5, model=LAST, parameter=MANY, name=PARAMETER_HOOKS, raising=(0, 0, 1))
def hook_parameter(world: World, model: int, parameter: int, name: str, raising: bool) -> None:
    found = world.parameter(model, parameter)
    if raising:
        hook: Any = raise_once(world, name)
    else:
        hook = noting(world, f"{name} of {parameter}")
    world.hooks.append(getattr(found, name)(hook))


@operation(0.3, which=LAST, raising=(0, 0, 1))
def hook_output(world: World, which: int, raising: bool) -> None:
    for tensor in tensors(chosen(world.outputs, which))[:1]:
        if tensor.requires_grad:
            hook = raise_once(world, "an output") if raising else noting(world, "an output")
            world.hooks.append(tensor.register_hook(hook))


@operation(0.3, which=LAST)
def unhook(world: World, which: int) -> None:
    chosen(world.hooks, which).remove()


# ---- parameters, gradients, modules ----


@operation(1.0, model=LAST, parameter=MANY, value=(False, True), whole=(0, 0, 0, 1))
def train_parameter(world: World, model: int, parameter: int, value: bool, whole: bool) -> Any:
    found = (world.module if whole else world.parameter)(model, parameter)
    found.requires_grad_(value)
    return kinds_of(found)


def kinds_of(found: Any) -> str:
    """Whether parameters are sharded: ``program_known.py`` asks."""
    params = found.parameters() if isinstance(found, nn.Module) else [found]
    return "shards" if all(isinstance(param, DTensor) for param in params) else "whole"


@operation(0.6, model=LAST, parameter=MANY, how=("none", "ones", "double", "detach", "bad"))
def change_grad(world: World, model: int, parameter: int, how: str) -> None:
    found = world.parameter(model, parameter)
    if how == "none":
        found.grad = None
    elif how == "ones":
        found.grad = torch.ones_like(found)
    elif how == "bad":
        found.grad = torch.ones(3, 3)
    elif found.grad is None:
        raise Nothing
    elif how == "double":
        found.grad.mul_(2)
    else:
        found.grad = found.grad.detach().clone()


@operation(0.6, model=LAST, parameter=MANY, how=("no_grad", "data", "new data", "local", "bare"))
def write(world: World, model: int, parameter: int, how: str) -> str:
    """Into a parameter, in the ways that users do."""
    found = world.parameter(model, parameter)
    if how == "no_grad":
        with torch.no_grad():
            found.mul_(0.5)
    elif how == "data":
        found.data.add_(0.25)
    elif how == "new data":
        found.data = found.data * 0.75
    elif how == "bare":
        found.mul_(2)
    else:
        local = found._local_tensor if isinstance(found, DTensor) else found
        local.detach().fill_(0.125)
    return kinds_of(found)


@operation(0.25, model=LAST, module=range(20), how=("parameter", "extra", "none", "module", "new"))
def replace(world: World, model: int, module: int, how: str) -> None:
    """Another parameter or another module in the place of one, or in a new one."""
    found = world.module(model, module)
    params = dict(found.named_parameters(recurse=False))
    children = dict(found.named_children())
    if how == "extra":
        found.extra = nn.Parameter(torch.ones(3))
    elif how == "new":
        found.added = nn.Linear(4, 4)
    elif how == "module":
        name = chosen(sorted(n for n, c in children.items() if isinstance(c, nn.Linear)), 0)
        setattr(found, name, nn.Linear(4, children[name].out_features))
    else:
        name = chosen(sorted(params), 0)
        if how == "none":
            setattr(found, name, None)
        else:
            setattr(found, name, nn.Parameter(params[name].detach().clone()))


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


@operation(0.4, model=LAST, module=(0, 0, 0, *range(20)), how=tuple(CASTS))
def convert(world: World, model: int, module: int, how: str) -> None:
    CASTS[how](world.module(model, module))


@operation(0.4, model=LAST, module=(0, 0, *range(20)), value=(False, True))
def mode(world: World, model: int, module: int, value: bool) -> None:
    world.module(model, module).train(value)


# ---- state ----


@operation(0.6, model=LAST, how=("dict", "full", "offloaded", "sharded", "trained"), keep=NO_YES)
def save(world: World, model: int, how: str, keep: bool) -> Any:
    """``keep``: as it is, and not a copy."""
    net = world.model(model)
    if how == "dict":
        state = net.state_dict()
    else:
        options = StateDictOptions(
            full_state_dict=how in ("full", "offloaded"),
            cpu_offload=how == "offloaded",
            ignore_frozen_params=how == "trained",
        )
        state = get_model_state_dict(net, options=options)
    if not keep:
        state = {name: value.detach().clone() for name, value in state.items()}
    world.saved.append(state)
    return state


@operation(0.6, model=LAST, which=LAST, strict=(True, False), assign=NO_YES, less=NO_YES)
def load(
    world: World, model: int, which: int, strict: bool, assign: bool, less: bool
) -> list[list[str]]:
    """``less``: without the first entry."""
    state = dict(list(chosen(world.saved, which).items())[1 if less else 0 :])
    found = world.model(model).load_state_dict(state, strict=strict, assign=assign)
    return [list(found.missing_keys), list(found.unexpected_keys)]


@operation(0.4, model=LAST, which=LAST, full=NO_YES, strict=(True, False), broadcast=NO_YES)
def load_for(
    world: World, model: int, which: int, full: bool, strict: bool, broadcast: bool
) -> Any:
    """``set_model_state_dict``."""
    options = StateDictOptions(
        full_state_dict=full, strict=strict, broadcast_from_rank0=broadcast and full
    )
    found = set_model_state_dict(world.model(model), chosen(world.saved, which), options=options)
    return [list(found.missing_keys), list(found.unexpected_keys)]


@operation(0.3, model=LAST, optimizer=LAST, full=NO_YES, back=NO_YES)
def optimizer_state(world: World, model: int, optimizer: int, full: bool, back: bool) -> Any:
    """The state of an optimizer, by name; ``back``: loaded again."""
    net, found = world.model(model), chosen(world.optimizers, optimizer)
    options = StateDictOptions(full_state_dict=full)
    state = get_optimizer_state_dict(net, found, options=options)
    line = shown(state["state"])
    if back:
        set_optimizer_state_dict(net, found, state, options=options)
    return line


@operation(0.4, model=LAST, parameter=MANY)
def gathered(world: World, model: int, parameter: int) -> Any:
    found = world.parameter(model, parameter)
    return found.full_tensor() if isinstance(found, DTensor) else found


@operation(0.3, model=LAST, module=(0, 0, *range(20)), how=("copy", "pickle", "save", "state"))
def duplicate(world: World, model: int, module: int, how: str) -> Any:
    """Copies of a model become models; those of a part are only looked at."""
    found = world.module(model, module)
    stream = io.BytesIO()
    if how == "copy":
        made: Any = copy.deepcopy(found)
    elif how == "pickle":
        made = pickle.loads(pickle.dumps(found))
    elif how == "save":
        torch.save(found, stream)
        made = None
    else:
        torch.save(found.state_dict(), stream)
        stream.seek(0)
        return torch.load(stream, weights_only=False)
    if made is not None and found is world.model(model) and len(world.models) < 3:
        world.models.append(made)
    return [type(m).__name__ for m in made.modules()] if made is not None else None


@operation(0.3, what=("outputs", "model", "optimizers", "handles", "hooks"))
def forget(world: World, what: str) -> None:
    """Objects go, and the collector comes."""
    if what == "model" and len(world.models) > 1:
        world.models.pop()
    elif what != "model":
        getattr(world, what).clear()
    gc.collect()


@operation(0.3, model=LAST, number=FEW)
def calls_within(world: World, model: int, number: int) -> Any:
    """An evaluation in the middle of a training forward, from a hook."""
    net = world.model(model)
    handle = net.register_forward_pre_hook(lambda *unused: evaluate())

    def evaluate() -> None:
        handle.remove()
        world.note("inner", called(world, net, "no_grad", 3))

    with armed(""):
        out = called(world, net, "", 3)
    world.outputs.append(out)
    return out
