"""How large the units of a model are: of a sharded one, or of one as it would be sharded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import DDPMeshInfo, FSDPMeshInfo
from torch.distributed.tensor import DTensor

from . import suspicions
from .fake_step import Piece
from .forecast import UnitSizes
from .mixed_precision import compute_dtype, reduce_dtype
from .wrap import Unit

BUCKET_LIMIT = 2**30
"""Bytes of gradients at which a unit's bucket is full: FC_BUCKET_LIMIT of csrc/core/bucket.h."""


class ParamSize(NamedTuple):
    """One parameter: elements in all and, with padding, on this rank; its dtypes."""

    numel: int
    padded: int
    own: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    trained: bool


@dataclass(frozen=True)
class Layout:
    """What a forecast is made of: pieces of the model and the units that they are.

    ``dtypes``: by the id of a parameter as it is registered now. ``params``: of each unit.
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
    """A unit of these parameters on a mesh of (replicas, ranks to shard over), reduced in these
    spans (``None``: as the core would)."""
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


def _sent(param: ParamSize) -> int:
    return param.numel * param.reduce.itemsize if param.trained else 0


def _buckets(params: list[ParamSize], spans: Iterable[tuple[int, int]] | None) -> tuple[int, ...]:
    """What each reduction of the unit takes."""
    sums = (sum(map(_sent, params[slice(*span)])) for span in spans or _spans(params))
    return tuple(size for size in sums if size > 0)


def _spans(params: list[ParamSize]) -> Iterator[tuple[int, int]]:
    """``deal`` of csrc/core/bucket.c: the last parameters first, a full bucket is closed."""
    end, size = len(params), 0
    for index in range(len(params) - 1, -1, -1):
        size += _sent(params[index])
        if size >= BUCKET_LIMIT or index == 0:
            yield index, end
            end, size = index, 0


# ---- of a sharded model --------------------------------------------------------------------------


def layout_of(model: nn.Module) -> Layout:
    """The units of a sharded model."""
    found = Layout([], [], [], [], {})
    pieces: dict[Any, int] = {}
    state: Any
    for name, state, group in suspicions.groups_of(model):
        if state not in pieces:
            pieces[state] = len(found.pieces)
            found.pieces.append(
                Piece(tuple(state._modules), state._input_dtype, state._output_dtype)
            )
        info = group.mesh_info
        world = info.shard_mesh_size if isinstance(info, FSDPMeshInfo) else 1
        replicas = info.replicate_mesh_size if isinstance(info, DDPMeshInfo) else 1
        params = [_live_size(param) for param in group.fsdp_params]
        offloads = isinstance(group.offload_policy, CPUOffloadPolicy) and group.device.type != "cpu"
        found.units.append(
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
        found.params.append(params)
        found.modules.append(tuple(group.modules))
        for param in group.fsdp_params:
            for face in suspicions.faces_of(param):
                found.dtypes[id(face)] = suspicions.compute_dtype(param)
    return found


def _live_size(param: Any) -> ParamSize:
    compute = suspicions.compute_dtype(param)
    return ParamSize(
        numel=param._orig_size.numel(),
        padded=param.padded_numel,
        own=param.orig_dtype,
        compute=compute,
        reduce=param.reduce_dtype or compute,
        trained=param.sharded_param.requires_grad,
    )


def _reshards(state: Any, group: Any, model: nn.Module) -> bool | int:
    """What becomes of a group after forward; of the root it is decided in the first one."""
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
    """The units that ``wrap.plan`` has found, on a mesh of (replicas, ranks to shard over)."""
    found = Layout([], [], [], [], {})
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
    for unit in [units[-1], *units[:-1]]:  # the root first, as its forward is
        policy = unit.kwargs.get("mp_policy")
        casts = getattr(policy, "cast_forward_inputs", True)
        dtype = getattr(policy, "param_dtype", None) if casts else None
        sizes = [_planned_size(param, policy, mesh[1]) for param in params[unit]]
        found.dtypes.update((id(p), size.compute) for p, size in zip(params[unit], sizes))
        reshard = unit.kwargs.get("reshard_after_forward")
        if reshard is None:
            reshard = unit is not units[-1]
        if reshard is not True and reshard in (1, mesh[1]):
            reshard = reshard != 1
        offloads = isinstance(unit.kwargs.get("offload_policy"), CPUOffloadPolicy)
        found.pieces.append(Piece(unit.modules, dtype, getattr(policy, "output_dtype", None)))
        if not sizes:
            continue
        name = ", ".join(one or "(root)" for one in unit.names)
        place = len(found.pieces) - 1
        found.units.append(unit_sizes(name, place, mesh, sizes, reshard, offloads, unit.regathers))
        found.params.append(sizes)
        found.modules.append(unit.modules)
    return found


def _planned_size(param: nn.Parameter, policy: Any, world: int) -> ParamSize:
    wanted = compute_dtype(policy, param) if policy is not None else None
    compute = wanted if wanted is not None and param.is_floating_point() else param.dtype
    reduce = (reduce_dtype(policy, param.dtype, compute) if policy is not None else None) or compute
    rows = param.size(0) if param.ndim else 1
    chunk = -(-rows // world) * (param.numel() // max(rows, 1))
    return ParamSize(param.numel(), chunk, param.dtype, compute, reduce, param.requires_grad)


# ---- what is in no unit --------------------------------------------------------------------------


def other_bytes(model: nn.Module, dtypes: dict[int, torch.dtype]) -> int:
    """Bytes of buffers and of parameters that no unit has."""
    tensors: dict[int, torch.Tensor] = {id(b): b for b in model.buffers()}
    tensors |= {id(p): p for p in model.parameters() if id(p) not in dtypes}
    total = 0
    for tensor in tensors.values():
        local = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
        total += local.numel() * local.itemsize
    return total
