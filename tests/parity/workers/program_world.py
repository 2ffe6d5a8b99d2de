"""The objects of a random program, and their visible state after each operation.

The state is described by lines of text: types, layouts, dtypes, flags, a digest of this rank's
bits, and the first values.
"""

from __future__ import annotations

import hashlib
import re
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from behavior import Api
from fsdp_units import units_of
from program_models import DIM
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves


class NoOperand(Exception):
    """An operation has no object to work on, and is skipped."""


@dataclass
class World:
    """The objects of one program on one rank."""

    api: Api
    models: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    handles: list[Any] = field(default_factory=list)
    saved: list[Any] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)
    patches: list[tuple[Any, str, Any]] = field(default_factory=list)
    """Replaced attributes: object, name, original value."""
    events: list[str] = field(default_factory=list)
    """Lines that hooks have recorded during the operation."""
    meshes: dict[str, DeviceMesh] = field(default_factory=dict)
    last_parameters: dict[str, weakref.ref[Any]] = field(default_factory=dict)
    """The parameter that ``identity_of`` found last, by model, name and type."""
    draws: int = 0
    """Calls of ``rows`` so far."""

    def model(self, index: int) -> Any:
        return choose(self.models, index)

    def module(self, model: int, index: int) -> Any:
        return choose(list(self.model(model).modules()), index)

    def units(self, model: int) -> list[Any]:
        return units_of(self.model(model))

    def unit(self, model: int, index: int) -> Any:
        return choose(self.units(model), index)

    def parameter(self, model: int, index: int) -> Any:
        return choose(list(self.model(model).parameters()), index)

    def rows(self, count: int) -> torch.Tensor:
        """Returns new random rows; they differ between calls and ranks."""
        self.draws += 1
        generator = torch.Generator().manual_seed(1000 * self.api.rank + self.draws)
        return torch.randn(count, DIM, generator=generator)

    def record_event(self, name: str, *values: Any) -> None:
        """Records an event within an operation."""
        self.events.append(f"{name}: {', '.join(describe(value) for value in values)}")


def choose(objects: list[Any], index: int) -> Any:
    if not objects:
        raise NoOperand
    return objects[index % len(objects)]


def tensors(structure: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(structure) if isinstance(leaf, torch.Tensor)]


def describe(value: Any) -> str:
    """Describes all comparable properties of a value in one line."""
    if isinstance(value, torch.Tensor):
        return describe_tensor(value)
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {describe(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(describe(item) for item in value) + "]"
    if value is None or isinstance(value, (bool, int, float, str, torch.dtype)):
        return repr(value)
    return type(value).__name__


def describe_tensor(tensor: torch.Tensor) -> str:
    kind = type(tensor).__name__
    local: Any = tensor.detach()
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        layout = f"{tuple(tensor.shape)} {tensor.placements} on {tuple(mesh.shape)}"
        kind = f"{kind} {layout} {mesh.mesh_dim_names}"
        local = tensor._local_tensor.detach()
    flags = [name for name in ("requires_grad", "is_inference") if has_flag(tensor, name)]
    flags += [] if tensor.is_leaf else ["non-leaf"]
    dtype = str(tensor.dtype).removeprefix("torch.")
    text = f"{kind} {dtype} {tuple(local.shape)} {' '.join(flags)}"
    if local.device.type == "meta":
        return f"{text} meta"
    if local.untyped_storage().nbytes() < local.numel() * local.element_size():
        return f"{text} freed"
    data = local.contiguous().view(-1).clone()  # a clone, because numpy() pins the storage
    if data.is_floating_point():
        data[data.isnan()] = float("nan")  # the bits of a nan depend on the order of a sum
    digest = hashlib.blake2b(data.view(torch.uint8).numpy().tobytes(), digest_size=4).hexdigest()
    return f"{text} {digest} {[round(number, 5) for number in data[:2].tolist()]}"


def has_flag(tensor: torch.Tensor, name: str) -> bool:
    value = getattr(tensor, name)
    return bool(value() if callable(value) else value)


def describe_state(world: World) -> Iterator[str]:
    """Yields the lines that describe the state visible to users."""
    for number, model in enumerate(world.models):
        for name, module in model.named_modules():
            kind = type(module).__name__
            if isinstance(module, FSDPModule) or not module.training:
                yield f"{number} module {name} {kind} {'' if module.training else 'eval'}"
        for name, parameter in model.named_parameters(remove_duplicate=False):
            yield (
                f"{number} {name}: {describe(parameter)} "
                f"{identity_of(world, number, name, parameter)}"
            )
            if parameter.grad is not None:
                yield f"{number} {name}.grad: {describe(parameter.grad)}"
        for name, buffer in model.named_buffers():
            yield f"{number} {name}: {describe(buffer)}"


def identity_of(world: World, number: int, name: str, parameter: Any) -> str:
    """Returns "renewed" if the parameter is another object than at the last call, else ""."""
    key = f"{number} {name} {type(parameter).__name__}"
    before = world.last_parameters.get(key)
    world.last_parameters[key] = weakref.ref(parameter)
    if before is None:
        return ""
    return "" if before() is parameter else "renewed"


def run_operation(world: World, run: Callable[[], Any]) -> list[str]:
    """Runs an operation; returns the lines of its result or error, its events and the state."""
    world.events.clear()
    try:
        result = f"gave {describe(run())}"
    except NoOperand:
        return ["nothing to do"]
    except Exception as error:
        result = f"raised {type(error).__name__}: {first_line(error)}"
    return [result, *world.events, *describe_state(world)]


def first_line(error: BaseException) -> str:
    """Returns the first line of the message without addresses."""
    text = (str(error).splitlines() or [""])[0]
    return re.sub(r"0x[0-9a-f]+|\bid=\d+", "0x", text)
