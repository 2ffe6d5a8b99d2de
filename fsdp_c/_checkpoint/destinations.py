"""Destinations of full tensors that are loaded: this rank's blocks of the model's tensors.

Tensors on the meta device get new memory. They are registered after all values are loaded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_device_from_mesh
from torch.distributed.tensor import DTensor, Shard

from .._runtime.fsdp_units import iterate_groups, reshard_all
from ..names import clean_tensor_name
from .source import LoadingRanks


def collect_targets(model: nn.Module) -> dict[str, Any]:
    """Reshards all units. Returns the model's state dict (not detached), by clean name."""
    reshard_all(model)
    targets: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        targets[clean_tensor_name(name)] = value
    return targets


def collect_targets_on_all_ranks(model: nn.Module, ranks: LoadingRanks) -> dict[str, Any]:
    """Returns the targets. Raises on all ranks if the model of any rank raises."""
    targets: dict[str, Any] = {}
    failure: Exception | None = None
    try:
        targets = collect_targets(model)
    except Exception as error:
        failure = error
    ranks.raise_if_any_failed(failure, "failed in state_dict() of its model; nothing was loaded")
    return targets


@dataclass
class Destination:
    """The destination of a full tensor: ``local`` is its block that begins at index ``starts``.

    ``value`` is the model's tensor. ``starts`` is None if ``local`` is not one block of the full
    tensor.
    """

    value: torch.Tensor
    local: torch.Tensor
    starts: tuple[int, ...] | None


def make_destinations(model: nn.Module, targets: dict[str, Any]) -> dict[str, Destination]:
    """Makes a destination for each of ``targets``. Allocates memory for meta tensors."""
    destinations: dict[str, Destination] = {}
    allocated: dict[int, torch.Tensor] = {}
    offloaded = _find_offloaded(model)
    for name, value in targets.items():
        local = value._local_tensor if isinstance(value, DTensor) else value
        if local.is_meta:
            if id(value) not in allocated:
                on_host = id(value) in offloaded
                device = torch.device("cpu") if on_host else _choose_device(value, model)
                allocated[id(value)] = torch.empty_like(local, device=device)
            local = allocated[id(value)]
        destinations[name] = Destination(value, local.detach(), _find_block_start(value))
    return destinations


def make_destinations_on_all_ranks(
    model: nn.Module, targets: dict[str, Any], ranks: LoadingRanks
) -> dict[str, Destination]:
    """Returns the destinations. Raises on all ranks if the allocation fails on any rank."""
    destinations: dict[str, Destination] = {}
    failure: Exception | None = None
    try:
        destinations = make_destinations(model, targets)
    except Exception as error:
        failure = error
    ranks.raise_if_any_failed(failure, "cannot allocate memory for the values; nothing was loaded")
    return destinations


def _find_offloaded(model: nn.Module) -> set[int]:
    """Returns the ids of the sharded parameters with a ``CPUOffloadPolicy``."""
    return {
        id(param.sharded_param)
        for _, _, group in iterate_groups(model)
        for param in group.fsdp_params
        if param.offload_to_cpu
    }


def _choose_device(value: torch.Tensor, model: nn.Module) -> torch.device:
    """Returns the device on which to allocate memory for a meta tensor."""
    meshes = (p.device_mesh for p in (value, *model.parameters()) if isinstance(p, DTensor))
    mesh = next(meshes, None)
    return torch.device("cpu") if mesh is None else _get_device_from_mesh(mesh)


def _find_block_start(value: torch.Tensor) -> tuple[int, ...] | None:
    """Returns the first index of this rank's block by dimension; None if it has no single block."""
    starts = [0] * value.ndim
    if not isinstance(value, DTensor):
        return tuple(starts)
    sizes = list(value.shape)
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    for dim, placement in enumerate(value.placements):
        if placement.is_replicate():
            continue
        if type(placement) is not Shard:
            return None
        axis = placement.dim
        chunk = -(-sizes[axis] // mesh.size(dim))
        begin = min(chunk * coordinate[dim], sizes[axis])
        starts[axis] += begin
        sizes[axis] = min(chunk, sizes[axis] - begin)
    return tuple(starts) if tuple(sizes) == tuple(value._local_tensor.shape) else None


def register_tensors(model: nn.Module, destinations: dict[str, Destination]) -> None:
    """Registers the new tensors in place of those on the meta device."""
    allocated: dict[int, torch.Tensor] = {}
    for destination in destinations.values():
        value: Any = destination.value
        if not value.is_meta or id(value) in allocated:
            continue
        tensor: torch.Tensor = destination.local
        if isinstance(value, DTensor):
            tensor = DTensor(tensor, value._spec, requires_grad=False)
        if isinstance(value, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=value.requires_grad)
        allocated[id(value)] = tensor
    if not allocated:
        return
    for module in model.modules():
        for registered in (module._parameters, module._buffers):
            tensors_by_name: dict[str, Any] = registered
            for name, value in tensors_by_name.items():
                if id(value) in allocated:
                    tensors_by_name[name] = allocated[id(value)]
    for _, _, group in iterate_groups(model):
        for param in group.fsdp_params:
            param.reset_sharded_param()


def load_other_entries(
    model: nn.Module,
    targets: dict[str, Any],
    destinations: dict[str, Destination],
    objects: dict[str, Any],
) -> None:
    """Passes entries that are not parameters or buffers to ``load_state_dict``.

    These are extra states, and tensors that modules create for their state dicts.
    """
    registered_ids = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    entries = {name: value for name, value in objects.items() if name in targets}
    for name, destination in destinations.items():
        if id(destination.value) not in registered_ids and not destination.value.is_meta:
            entries[name] = destination.value
    if entries:
        names = {clean_tensor_name(name): name for name in model.state_dict(keep_vars=True)}
        model.load_state_dict({names[name]: value for name, value in entries.items()}, strict=False)
