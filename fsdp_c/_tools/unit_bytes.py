"""Computes the unit sizes of a sharded model, or of a model that would be sharded by a plan."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo
from torch.distributed.tensor import DTensor

from .._auto_shard.unit import Unit
from .._runtime import fsdp_units
from .._runtime.mixed_precision import get_compute_dtype, get_reduce_dtype
from .fake_step import Piece
from .forecast import UnitSizes

BUCKET_LIMIT = 2**30
"""Bytes of gradients at which a unit's bucket is full: FC_BUCKET_LIMIT of csrc/core/bucket.h."""


class ParamSize(NamedTuple):
    """One parameter: its elements, its padded elements on this rank, its dtypes."""

    numel: int
    padded: int
    own: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    trained: bool


@dataclass(frozen=True)
class Layout:
    """The input of a forecast: the pieces of a model and their units.

    Attributes:
        pieces: The modules of each state.
        units: The sizes of each unit.
        params: The parameters of each unit.
        modules: The modules of each unit.
        dtypes: The compute dtypes by ``id`` of a registered parameter.
    """

    pieces: list[Piece]
    units: list[UnitSizes]
    params: list[list[ParamSize]]
    modules: list[tuple[nn.Module, ...]]
    dtypes: dict[int, torch.dtype]


def unit_sizes(
    name: str,
    piece: int,
    mesh: tuple[int, int],
    params: Iterable[ParamSize],
    reshard: bool | int,
    offloads: bool,
    regathers: bool = True,
    spans: Iterable[tuple[int, int]] | None = None,
) -> UnitSizes:
    """Returns the sizes of a unit of ``params``.

    ``mesh`` is (replicas, ranks to shard over). ``spans`` are the buckets, as index ranges of
    ``params``; ``None`` computes the core's buckets.
    """
    replicas, world = mesh
    params = list(params)
    trained = [param for param in params if param.trained]
    casts = any(param.own != param.compute for param in params)
    gathered = sum(param.padded * param.compute.itemsize for param in params) * world
    return UnitSizes(
        name=name,
        pieces=(piece,),
        world=world,
        replicas=replicas,
        shard=sum(param.padded * param.own.itemsize for param in params),
        gathered=gathered if world > 1 or casts else 0,
        rows=sum(param.padded * param.reduce.itemsize for param in trained) * world,
        gradient=sum(param.padded * param.own.itemsize for param in trained),
        whole_gradients=sum(param.numel * param.compute.itemsize for param in trained),
        casts=any(param.own != param.reduce for param in trained),
        reshard=reshard,
        offloads=offloads,
        regathers=regathers,
        buckets=_buckets(params, spans) if trained else (),
    )


def _reduced_bytes(param: ParamSize) -> int:
    return param.numel * param.reduce.itemsize if param.trained else 0


def _buckets(params: list[ParamSize], spans: Iterable[tuple[int, int]] | None) -> tuple[int, ...]:
    """Returns the bytes of each reduction of the unit."""
    sums = (sum(map(_reduced_bytes, params[slice(*span)])) for span in spans or _spans(params))
    return tuple(size for size in sums if size > 0)


def _spans(params: list[ParamSize]) -> Iterator[tuple[int, int]]:
    """Yields the buckets as ``deal`` of csrc/core/bucket.c makes them, last parameters first."""
    end, size = len(params), 0
    for index in range(len(params) - 1, -1, -1):
        size += _reduced_bytes(params[index])
        if size >= BUCKET_LIMIT or index == 0:
            yield index, end
            end, size = index, 0


# ---- of a sharded model --------------------------------------------------------------------------


def layout_of(model: nn.Module) -> Layout:
    """Returns the layout of a sharded model."""
    layout = Layout([], [], [], [], {})
    pieces: dict[Any, int] = {}
    state: Any
    for name, state, group in fsdp_units.iterate_groups(model):
        if state not in pieces:
            pieces[state] = len(layout.pieces)
            layout.pieces.append(
                Piece(tuple(state._modules), state._input_dtype, state._output_dtype)
            )
        info = group.mesh_info
        world = info.shard_mesh_size if isinstance(info, FSDPMeshInfo) else 1
        replicas = info.replicate_mesh_size if isinstance(info, DDPMeshInfo) else 1
        params = [_live_size(param) for param in group.fsdp_params]
        offloads = isinstance(group.offload_policy, CPUOffloadPolicy) and group.device.type != "cpu"
        layout.units.append(
            unit_sizes(
                name,
                pieces[state],
                (replicas, world),
                params,
                _reshards(state, group, model),
                offloads,
                group.unshard_in_backward,
                getattr(group, "_buckets", [(0, len(params))]),
            )
        )
        layout.params.append(params)
        layout.modules.append(tuple(group.modules))
        for param in group.fsdp_params:
            for face in fsdp_units.list_registered_params(param):
                layout.dtypes[id(face)] = fsdp_units.get_compute_dtype(param)
    return layout


def _live_size(param: Any) -> ParamSize:
    compute = fsdp_units.get_compute_dtype(param)
    return ParamSize(
        numel=param._orig_size.numel(),
        padded=param.padded_numel,
        own=param.orig_dtype,
        compute=compute,
        reduce=param.reduce_dtype or compute,
        trained=param.sharded_param.requires_grad,
    )


def _reshards(state: Any, group: Any, model: nn.Module) -> bool | int:
    """Whether a group reshards after forward, or to how many ranks.

    A root whose first forward has not run yet stays unsharded, like an initialized root.
    """
    undecided_root = (
        state._is_root is None and state._auto_reshard_after_forward and model in state._modules
    )
    if undecided_root or not group._reshard_after_forward:
        return False
    if group._use_post_forward_mesh:
        return int(group._smaller_mesh_info.shard_mesh_size)
    return True


# ---- of a model as it would be sharded -----------------------------------------------------------


def layout_for(model: nn.Module, units: list[Unit], mesh: tuple[int, int]) -> Layout:
    """Returns the layout of planned units on a mesh of (replicas, ranks to shard over)."""
    layout = Layout([], [], [], [], {})
    owner = {module: unit for unit in units for module in unit.modules}
    params: dict[Unit, dict[nn.Parameter, None]] = {unit: {} for unit in units}

    def visit(module: nn.Module, unit: Unit, seen: set[nn.Module]) -> None:
        unit = owner.get(module, unit)
        if module in seen:
            return
        seen.add(module)
        ignored = unit.kwargs.get("ignored_params") or ()
        for param in module._parameters.values():
            if param is not None and param not in ignored and id(param) not in taken:
                taken.add(id(param))
                params[unit][param] = None
        for child in module.children():
            visit(child, unit, seen)

    taken: set[int] = set()
    visit(model, units[-1], set())
    for unit in [units[-1], *units[:-1]]:  # the root first, in forward order
        policy = unit.kwargs.get("mp_policy")
        casts = getattr(policy, "cast_forward_inputs", True)
        dtype = getattr(policy, "param_dtype", None) if casts else None
        sizes = [_planned_size(param, policy, mesh[1]) for param in params[unit]]
        layout.dtypes.update((id(p), size.compute) for p, size in zip(params[unit], sizes))
        reshard = unit.kwargs.get("reshard_after_forward")
        if reshard is None:
            reshard = unit is not units[-1]
        if reshard is not True and reshard in (1, mesh[1]):
            reshard = reshard != 1
        offloads = isinstance(unit.kwargs.get("offload_policy"), CPUOffloadPolicy)
        layout.pieces.append(Piece(unit.modules, dtype, getattr(policy, "output_dtype", None)))
        if not sizes:
            continue
        name = ", ".join(fqn or "(root)" for fqn in unit.names)
        place = len(layout.pieces) - 1
        layout.units.append(unit_sizes(name, place, mesh, sizes, reshard, offloads, unit.regathers))
        layout.params.append(sizes)
        layout.modules.append(unit.modules)
    return layout


def _planned_size(param: nn.Parameter, policy: Any, world: int) -> ParamSize:
    dtype = get_compute_dtype(policy, param) if policy is not None else None
    compute = dtype if dtype is not None and param.is_floating_point() else param.dtype
    reduce = (
        get_reduce_dtype(policy, param.dtype, compute) if policy is not None else None
    ) or compute
    rows = param.size(0) if param.ndim else 1
    chunk = -(-rows // world) * (param.numel() // max(rows, 1))
    return ParamSize(param.numel(), chunk, param.dtype, compute, reduce, param.requires_grad)


# ---- tensors outside of units --------------------------------------------------------------------


def other_bytes(model: nn.Module, dtypes: dict[int, torch.dtype]) -> int:
    """Returns the bytes of buffers and of parameters that belong to no unit."""
    tensors: dict[int, torch.Tensor] = {id(b): b for b in model.buffers()}
    tensors |= {id(p): p for p in model.parameters() if id(p) not in dtypes}
    total = 0
    for tensor in tensors.values():
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        total += local.numel() * local.itemsize
    return total
