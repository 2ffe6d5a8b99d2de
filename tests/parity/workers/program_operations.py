"""Operations of random programs on models, units, forwards, backwards and optimizers.

An operation is a function of a ``World`` and of arguments drawn from its registered choices. The
first choice is the usual one; a failing program is shortened to usual arguments. Numbers select
objects modulo their count. ``program_changes.py`` has the operations on settings and state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from program_models import ARMED, KINDS, WITHOUT_CONSTRUCTOR, Net
from program_world import NoOperand, World, choose, tensors
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

Function = Callable[..., Any]


@dataclass
class Operation:
    """A function of ``World``, its weight, and the choices of its arguments."""

    function: Function
    weight: float
    choices: dict[str, Sequence[Any]]


OPERATIONS: dict[str, Operation] = {}
MANY = range(12)
FEW = range(3)
LAST = (-1, -2, 0, 1)
"""Indices of objects. The usual one is that of the last object."""
NO_YES = (False, True)
RARE = ("tied", "borrowed", "scalar")
BLOCKS = ("", *(kind for kind in (*WITHOUT_CONSTRUCTOR[1:], *KINDS) * 5 if kind not in RARE), *RARE)
"""Kinds of blocks. Many units with RARE kinds raise, so a common kind is five times as likely."""


def operation(weight: float = 1.0, **choices: Sequence[Any]) -> Callable[[Function], Function]:
    """Returns a decorator that registers an operation with its weight and argument choices."""

    def register(function: Function) -> Function:
        OPERATIONS[function.__name__] = Operation(function, weight, choices)
        return function

    return register


# ---- models and units ----


@operation(
    0.4,
    kinds=[BLOCKS] * 4,
    structure=("tensor", "pair", "dict", "view"),
    dtype=(None, None, None, torch.bfloat16, torch.float64),
    own_blocks=NO_YES,
)
def build(
    world: World, kinds: list[str], structure: str, dtype: torch.dtype | None, own_blocks: bool
) -> None:
    """Builds a model. ``own_blocks``: the model shares no block with the first model."""
    if len(world.models) >= 3:
        raise NoOperand
    before = None if own_blocks or not world.models else world.models[0]
    net = Net(kinds, structure, before if isinstance(before, Net) else None)
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
    """Returns the mesh of this name, which is created once; None for the default."""
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


def sharding_options(
    world: World,
    modules: Sequence[nn.Module],
    reshard: Any,
    mesh: str,
    policy: str,
    offload: bool,
    placement: str,
    ignored: int,
) -> dict[str, Any]:
    """Returns the keyword arguments of ``fully_shard`` that differ from the defaults."""
    options: dict[str, Any] = {}
    if reshard is not None:
        options["reshard_after_forward"] = reshard
    if mesh:
        options["mesh"] = mesh_of(world, mesh)
    if policy:
        options["mp_policy"] = POLICIES[policy]
    if offload:
        options["offload_policy"] = CPUOffloadPolicy(pin_memory=False)
    if placement:
        options["shard_placement_fn"] = placement_of(placement)
    if ignored >= 0:
        params = [param for module in modules for param in module.parameters()]
        options["ignored_params"] = {choose(params, ignored)}
    return options


@operation(0.2, model=LAST, root=(True, True, True, False), pairs=NO_YES, **SHARDING)
def shard(world: World, model: int, root: bool, pairs: bool, **options: Any) -> str:
    """Shards the blocks of a model, singly or in pairs, and the root."""
    net = world.model(model)
    arguments = sharding_options(world, [net], **options)
    targets = list(dict.fromkeys(net.blocks)) if isinstance(net, Net) else list(net.children())
    if pairs:
        for index in range(0, len(targets), 2):
            world.api.fully_shard(targets[index : index + 2], **arguments)
    else:
        for block in targets:
            world.api.fully_shard(block, **arguments)
    return type(world.api.fully_shard(net, **arguments)).__name__ if root else ""


@operation(0.3, model=LAST, module=range(20), **SHARDING)
def shard_one(world: World, model: int, module: int, **options: Any) -> str:
    """Shards any module at any time."""
    target = world.module(model, module)
    arguments = sharding_options(world, [target], **options)
    return type(world.api.fully_shard(target, **arguments)).__name__


@operation(0.15, model=LAST, module=range(20), other=range(1, 20), **SHARDING)
def shard_both(world: World, model: int, module: int, other: int, **options: Any) -> list[str]:
    """Shards two modules as one unit."""
    targets = [world.module(model, module), world.module(model, module + other)]
    sharded = world.api.fully_shard(targets, **sharding_options(world, targets, **options))
    return [type(module).__name__ for module in sharded]


@operation(0.2, model=LAST, module=(0, 0, *range(20)), policy=("", *POLICIES), mesh=("", "one"))
def replicate(world: World, model: int, module: int, policy: str, mesh: str) -> str:
    options: dict[str, Any] = {"mp_policy": POLICIES[policy]} if policy else {}
    if mesh:
        options["mesh"] = init_device_mesh("cpu", (world.api.world,), mesh_dim_names=("replicate",))
    return type(world.api.replicate(world.module(model, module), **options)).__name__


# ---- forward and backward ----


def call_in_mode(world: World, function: Any, mode: str, rows: int, **kwargs: Any) -> Any:
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
FAILURES = ("", "", "", "", "forward", "early")
ROWS = (3, 4, 3, 3, 1)


@operation(6.0, model=LAST, mode=MODES, rows=ROWS, failure=FAILURES, skip=(0, 0, 0, 0, 1, 2))
def forward(world: World, model: int, mode: str, rows: int, failure: str, skip: int) -> Any:
    """Runs forward. ``skip`` is the number of first blocks to skip, ``failure`` a name of ARMED."""
    with arm_failure(failure):
        out = call_in_mode(
            world, world.model(model), mode, rows, **({"skip": skip} if skip else {})
        )
    world.outputs.append(out)
    return out


@operation(0.7, model=LAST, module=range(20), mode=MODES, failure=FAILURES)
def forward_of_module(world: World, model: int, module: int, mode: str, failure: str) -> Any:
    """Runs forward of one module of a model."""
    with arm_failure(failure):
        out = call_in_mode(world, world.module(model, module), mode, 3)
    world.outputs.append(out)
    return out


@operation(
    0.6, model=LAST, module=range(20), register=(True, False), method=("encode", "both", "none")
)
def call_other_method(world: World, model: int, module: int, register: bool, method: str) -> Any:
    """Calls a method other than forward. ``register``: registers it as a forward method before."""
    from torch.distributed.fsdp import register_fsdp_forward_method

    targets = [m for m in world.model(model).modules() if hasattr(m, method)]
    target = choose(targets or [world.model(model)], module)
    if register:
        register_fsdp_forward_method(target, method)
    x = world.rows(3)
    out = getattr(target, method)({"x": x, "n": [x]} if method == "both" else x)
    world.outputs.append(out)
    return out


class arm_failure:
    """Adds ``name`` to ARMED. ARMED is empty after the context."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        if self.name:
            ARMED.add(self.name)

    def __exit__(self, *unused: object) -> None:
        ARMED.clear()


def loss_of(out: Any, part: str) -> torch.Tensor:
    targets = [t for t in tensors(out) if t.is_floating_point() and t.requires_grad]
    if not targets:
        raise NoOperand
    if part == "first":
        targets = targets[:1]
    elif part == "last":
        targets = targets[-1:]
    return torch.stack([t.float().square().sum() for t in targets]).sum()


@operation(
    6.0,
    index=(-1, -1, -1, -2, 0),
    output_part=("", "", "first", "last"),
    retain_graph=(False, False, False, True),
    keep_output=(False, False, False, True),
    failure=("", "", "", "", "backward"),
)
def backward(
    world: World, index: int, output_part: str, retain_graph: bool, keep_output: bool, failure: str
) -> Any:
    """Runs backward of an output. ``keep_output``: the output stays for another backward."""
    out = choose(world.outputs, index)
    loss = loss_of(out, output_part)
    if not keep_output:
        world.outputs.pop(index % len(world.outputs))
    with arm_failure(failure):
        loss.backward(retain_graph=retain_graph)
    return loss


@operation(0.4, index=LAST, model=LAST, parameter=MANY, count=(1, 2, 30))
def backward_into(world: World, index: int, model: int, parameter: int, count: int) -> Any:
    """Runs backward with ``inputs``, which computes gradients of some parameters only."""
    loss = loss_of(choose(world.outputs, index), "")
    params = list(world.model(model).parameters())
    if not params:
        raise NoOperand
    start = parameter % len(params)
    loss.backward(inputs=params[start : start + count])
    return loss


@operation(0.4, index=LAST, inputs_kind=("input", "parameters", "output"), model=LAST)
def autograd_grad(world: World, index: int, inputs_kind: str, model: int) -> Any:
    """Calls ``torch.autograd.grad``."""
    if inputs_kind == "input":
        x = world.rows(3).requires_grad_()
        out = world.model(model)(x)
        return torch.autograd.grad(loss_of(out, ""), [x])
    out = choose(world.outputs, index)
    inputs = (
        list(world.model(model).parameters()) if inputs_kind == "parameters" else tensors(out)[:1]
    )
    return torch.autograd.grad(loss_of(out, ""), inputs, allow_unused=True, retain_graph=True)


@operation(3.0, model=LAST, optimizer=LAST, rows=ROWS, count=(1, 1, 2), clip=NO_YES)
def step(world: World, model: int, optimizer: int, rows: int, count: int, clip: bool) -> Any:
    """Runs a training step of several microbatches."""
    losses = []
    for _ in range(count):
        losses.append(loss_of(world.model(model)(world.rows(rows)), ""))
        losses[-1].backward()
    if clip:
        norm = nn.utils.clip_grad_norm_(world.model(model).parameters(), 0.5)
        world.record_event("norm", norm)
    world.record_event("gradients", [p.grad for p in world.model(model).parameters()])
    if world.optimizers:
        choose(world.optimizers, optimizer).step()
        choose(world.optimizers, optimizer).zero_grad()
    return losses


# ---- optimizers and gradients ----

OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.AdamW(params, lr=0.01),
    "foreach": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
    "fused": lambda params: torch.optim.Adam(params, lr=0.01, fused=True),
}


@operation(0.8, model=LAST, kind=tuple(OPTIMIZERS), trained=(False, True))
def create_optimizer(world: World, model: int, kind: str, trained: bool) -> None:
    """Creates an optimizer of all parameters, or of those that require gradients (``trained``)."""
    params = [p for p in world.model(model).parameters() if p.requires_grad or not trained]
    world.optimizers.append(OPTIMIZERS[kind](params))


@operation(2.0, optimizer=LAST)
def step_optimizer(world: World, optimizer: int) -> Any:
    target = choose(world.optimizers, optimizer)
    target.step()
    return list(target.state_dict()["state"].values())


@operation(1.5, owner=("optimizer", "model", "unit"), index=LAST, set_to_none=(True, False))
def zero_grad(world: World, owner: str, index: int, set_to_none: bool) -> None:
    if owner == "optimizer":
        choose(world.optimizers, index).zero_grad(set_to_none=set_to_none)
    elif owner == "model":
        world.model(index).zero_grad(set_to_none=set_to_none)
    else:
        world.unit(-1, index).zero_grad(set_to_none=set_to_none)


@operation(
    0.8, model=LAST, max_norm=(0.5, 1e3), norm_type=(2.0, 1.0, float("inf")), foreach=(None, False)
)
def clip_gradients(
    world: World, model: int, max_norm: float, norm_type: float, foreach: bool | None
) -> Any:
    params = list(world.model(model).parameters())
    return nn.utils.clip_grad_norm_(params, max_norm, norm_type=norm_type, foreach=foreach)
