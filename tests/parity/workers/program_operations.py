"""The operations of random programs: models, units, forwards, backwards and optimizers.

Each is a function of a world and of words and numbers, drawn from the choices that stand at its
registration: the first is the usual one, to which a program that fails is shortened. Numbers name
objects modulo how many there are. The settings and the state are in ``program_changes.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import program_models
import torch
import torch.nn as nn
from program_models import AGAIN, ARMED, KINDS, Net
from program_world import Nothing, World, chosen, tensors
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

Function = Callable[..., Any]


@dataclass
class Operation:
    """A function of ``World``, how often it is drawn, and what its arguments are drawn from."""

    function: Function
    weight: float
    choices: dict[str, Sequence[Any]]


OPERATIONS: dict[str, Operation] = {}
MANY = range(12)
FEW = range(3)
LAST = (-1, -2, 0, 1)
NO_YES = (False, True)
RARE = ("tied", "borrowed", "scalar")
BLOCKS = ("", *(kind for kind in (*AGAIN[1:], *KINDS) * 5 if kind not in RARE), *RARE)
"""With those last no model trains unless units are chosen for them."""


def operation(weight: float = 1.0, **choices: Sequence[Any]) -> Callable[[Function], Function]:
    """Registers a function. The arguments that most have by name: which model, which part of it."""

    def register(function: Function) -> Function:
        OPERATIONS[function.__name__] = Operation(function, weight, choices)
        return function

    return register


# ---- models and units ----


@operation(
    0.4,
    kinds=[BLOCKS] * 4,
    way=("tensor", "pair", "dict", "view"),
    dtype=(None, None, None, torch.bfloat16, torch.float64),
    alone=NO_YES,
)
def build(world: World, kinds: list[str], way: str, dtype: torch.dtype | None, alone: bool) -> None:
    """A model; ``alone``: its inputs are not converted, and no other has its blocks."""
    if len(world.models) >= 3:
        raise Nothing
    before = None if alone or not world.models else world.models[0]
    net = Net(kinds, way, before if isinstance(before, Net) else None)
    world.models.append(net if dtype is None else net.to(dtype))


POLICIES = {
    "": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
    "bf16, reduced in fp32": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "fp32, reduced in bf16": MixedPrecisionPolicy(reduce_dtype=torch.bfloat16),
    "fp16, given in fp32": MixedPrecisionPolicy(torch.float16, output_dtype=torch.float32),
    "bf16, inputs as they are": MixedPrecisionPolicy(torch.bfloat16, cast_forward_inputs=False),
    "fp64": MixedPrecisionPolicy(param_dtype=torch.float64),
}
SHARDING: dict[str, Sequence[Any]] = {
    "reshard": (None, *(True, False, 1) * 8, 2, 2, 3, "yes"),
    "mesh": ("", *("one", "replicas", "shards") * 8, "unnamed", "three"),
    "policy": ("", "", *POLICIES),
    "offload": (False, False, False, False, True),
    "placement": ("", *("", "", "", "last", "second") * 5, "wrong"),
    "ignored": (-1, -1, -1, 0, 1, 5),
}


def mesh_of(world: World, name: str) -> Any:
    """None where the default is wanted; made once."""
    count = world.api.world
    shapes = {
        "one": ((count,), None),
        "replicas": ((count, 1), ("replicas", "shards")),
        "shards": ((1, count), ("replicas", "shards")),
        "unnamed": ((1, count), None),
        "three": ((1, 1, count), ("a", "b", "c")),
    }
    if not name:
        return None
    if name not in world.meshes:
        shape, names = shapes[name]
        world.meshes[name] = init_device_mesh("cpu", shape, mesh_dim_names=names)
    return world.meshes[name]


def placement_of(name: str) -> Any:
    if name == "last":
        return lambda param: Shard(-1) if param.ndim > 1 else None
    if name == "second":
        return lambda param: Shard(1) if param.shape == (4, 4) else Shard(0)
    return lambda param: "rows"


def sharding(
    world: World,
    modules: Sequence[nn.Module],
    reshard: Any,
    mesh: str,
    policy: str,
    offload: bool,
    placement: str,
    ignored: int,
) -> dict[str, Any]:
    """The keywords of ``fully_shard``; those that are as ever are left out."""
    given: dict[str, Any] = {}
    if reshard is not None:
        given["reshard_after_forward"] = reshard
    if mesh:
        given["mesh"] = mesh_of(world, mesh)
    if policy:
        given["mp_policy"] = POLICIES[policy]
    if offload:
        given["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if placement:
        given["shard_placement_fn"] = placement_of(placement)
    if ignored >= 0:
        params = [param for module in modules for param in module.parameters()]
        given["ignored_params"] = {chosen(params, ignored)}
    return given


@operation(0.2, model=LAST, root=(True, True, True, False), pairs=NO_YES, **SHARDING)
def shard(world: World, model: int, root: bool, pairs: bool, **kind: Any) -> str:
    """The blocks of a model, each or by two, and then what is left."""
    net = world.model(model)
    given = sharding(world, [net], **kind)
    found = list(dict.fromkeys(net.blocks)) if isinstance(net, Net) else list(net.children())
    if pairs:
        for index in range(0, len(found), 2):
            world.api.fully_shard(found[index : index + 2], **given)
    else:
        for block in found:
            world.api.fully_shard(block, **given)
    return type(world.api.fully_shard(net, **given)).__name__ if root else ""


@operation(0.3, model=LAST, module=range(20), **SHARDING)
def shard_one(world: World, model: int, module: int, **kind: Any) -> str:
    """Any module, at any time."""
    found = world.module(model, module)
    return type(world.api.fully_shard(found, **sharding(world, [found], **kind))).__name__


@operation(0.15, model=LAST, module=range(20), other=range(1, 20), **SHARDING)
def shard_both(world: World, model: int, module: int, other: int, **kind: Any) -> list[str]:
    """Two modules as one unit."""
    found = [world.module(model, module), world.module(model, module + other)]
    given = world.api.fully_shard(found, **sharding(world, found, **kind))
    return [type(module).__name__ for module in given]


@operation(0.2, model=LAST, module=(0, 0, *range(20)), policy=("", *POLICIES), mesh=("", "one"))
def replicate(world: World, model: int, module: int, policy: str, mesh: str) -> str:
    given: dict[str, Any] = {"mp_policy": POLICIES[policy]} if policy else {}
    if mesh:
        given["mesh"] = init_device_mesh("cpu", (world.api.world,), mesh_dim_names=("replicate",))
    return type(world.api.replicate(world.module(model, module), **given)).__name__


# ---- forward and backward ----


def called(world: World, function: Any, mode: str, rows: int, **kwargs: Any) -> Any:
    x = world.rows(rows)
    if mode == "no_grad":
        with torch.no_grad():
            return function(x, **kwargs)
    if mode == "inference":
        with torch.inference_mode():
            return function(x, **kwargs)
    if mode == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            return function(x, **kwargs)
    if mode == "input":
        return function(x.requires_grad_(), **kwargs)
    return function(x, **kwargs)


MODES = ("", "", "", "", "no_grad", "inference", "autocast", "input")
TRAPS = ("", "", "", "", "forward", "early")
ROWS = (3, 4, 3, 3, 1)


@operation(6.0, model=LAST, mode=MODES, rows=ROWS, trap=TRAPS, skip=(0, 0, 0, 0, 1, 2))
def forward(world: World, model: int, mode: str, rows: int, trap: str, skip: int) -> Any:
    """``skip``: without the first blocks; ``trap``: what raises where the model has such a one."""
    with armed(trap):
        out = called(world, world.model(model), mode, rows, **({"skip": skip} if skip else {}))
    world.outputs.append(out)
    return out


@operation(0.7, model=LAST, module=range(20), mode=MODES, trap=TRAPS)
def forward_of_part(world: World, model: int, module: int, mode: str, trap: str) -> Any:
    """A module by itself."""
    with armed(trap):
        out = called(world, world.module(model, module), mode, 3)
    world.outputs.append(out)
    return out


@operation(0.6, model=LAST, module=range(20), register=(True, False), of=("encode", "both", "none"))
def other_forward(world: World, model: int, module: int, register: bool, of: str) -> Any:
    """Another method than forward, which may have been registered."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    found = [m for m in world.model(model).modules() if hasattr(m, of)]
    target = chosen(found or [world.model(model)], module)
    if register:
        register_fsdp_forward_method(target, of)
    x = world.rows(3)
    out = getattr(target, of)({"x": x, "n": [x]} if of == "both" else x)
    world.outputs.append(out)
    return out


class armed:
    """While it lasts, what has this name raises."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        if self.name:
            ARMED.add(self.name)

    def __exit__(self, *unused: object) -> None:
        program_models.ARMED.clear()


def loss_of(out: Any, part: str) -> torch.Tensor:
    found = [t for t in tensors(out) if t.is_floating_point() and t.requires_grad]
    if not found:
        raise Nothing
    if part == "first":
        found = found[:1]
    elif part == "last":
        found = found[-1:]
    return torch.stack([t.float().square().sum() for t in found]).sum()


@operation(
    6.0,
    which=(-1, -1, -1, -2, 0),
    part=("", "", "first", "last"),
    retain=(False, False, False, True),
    keep=(False, False, False, True),
    trap=("", "", "", "", "backward"),
)
def backward(world: World, which: int, part: str, retain: bool, keep: bool, trap: str) -> Any:
    """Of an output; ``keep``: it is there for another one, ``retain``: which may go well."""
    out = chosen(world.outputs, which)
    loss = loss_of(out, part)
    if not keep:
        world.outputs.pop(which % len(world.outputs))
    with armed(trap):
        loss.backward(retain_graph=retain)
    return loss


@operation(0.4, which=LAST, model=LAST, parameter=MANY, count=(1, 2, 30))
def backward_into(world: World, which: int, model: int, parameter: int, count: int) -> Any:
    """``inputs=``: gradients of these parameters only."""
    loss = loss_of(chosen(world.outputs, which), "")
    params = list(world.model(model).parameters())
    if not params:
        raise Nothing
    at = parameter % len(params)
    loss.backward(inputs=params[at : at + count])
    return loss


@operation(0.4, which=LAST, of=("input", "parameters", "output"), model=LAST)
def gradient(world: World, which: int, of: str, model: int) -> Any:
    """``torch.autograd.grad``."""
    if of == "input":
        x = world.rows(3).requires_grad_()
        out = world.model(model)(x)
        return torch.autograd.grad(loss_of(out, ""), [x])
    out = chosen(world.outputs, which)
    wanted = list(world.model(model).parameters()) if of == "parameters" else tensors(out)[:1]
    return torch.autograd.grad(loss_of(out, ""), wanted, allow_unused=True, retain_graph=True)


@operation(3.0, model=LAST, optimizer=LAST, rows=ROWS, count=(1, 1, 2), clip=NO_YES)
def step(world: World, model: int, optimizer: int, rows: int, count: int, clip: bool) -> Any:
    """A usual training step, of several microbatches."""
    chosen(world.optimizers or [None], optimizer)
    losses = []
    for _ in range(count):
        losses.append(loss_of(world.model(model)(world.rows(rows)), ""))
        losses[-1].backward()
    if clip:
        norm = nn.utils.clip_grad_norm_(world.model(model).parameters(), 0.5)
        world.note("norm", norm)
    world.note("gradients", [p.grad for p in world.model(model).parameters()])
    if world.optimizers:
        chosen(world.optimizers, optimizer).step()
        chosen(world.optimizers, optimizer).zero_grad()
    return losses


# ---- optimizers and gradients ----

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.AdamW(params, lr=0.01),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "fused": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
}


@operation(0.8, model=LAST, kind=tuple(OPTIMIZERS), trained=(False, True))
def optimizer(world: World, model: int, kind: str, trained: bool) -> None:
    """``trained``: only of what requires gradients now."""
    params = [p for p in world.model(model).parameters() if p.requires_grad or not trained]
    world.optimizers.append(OPTIMIZERS[kind](params))


@operation(2.0, optimizer=LAST)
def optimize(world: World, optimizer: int) -> Any:
    found = chosen(world.optimizers, optimizer)
    found.step()
    return list(found.state_dict()["state"].values())


@operation(1.5, by=("optimizer", "model", "unit"), which=LAST, none=(True, False))
def zero_grad(world: World, by: str, which: int, none: bool) -> None:
    if by == "optimizer":
        chosen(world.optimizers, which).zero_grad(set_to_none=none)
    elif by == "model":
        world.model(which).zero_grad(set_to_none=none)
    else:
        world.unit(-1, which).zero_grad(set_to_none=none)


@operation(0.8, model=LAST, most=(0.5, 1e3), kind=(2.0, 1.0, float("inf")), foreach=(None, False))
def clip(world: World, model: int, most: float, kind: float, foreach: bool | None) -> Any:
    params = list(world.model(model).parameters())
    return nn.utils.clip_grad_norm_(params, most, norm_type=kind, foreach=foreach)
