"""Total norm of gradients and their scaling: local norms, one collective, local scaling.

torch's ``clip_grad_norm_`` dispatches several DTensor operations per gradient. The functions here
use the local tensors, with bit-equal results. Callers are ``fsdp_c.clip_grad_norm_`` and
``torch_clipping.py``, which replaces torch's functions.

``csrc/python/clip.c`` collects the local gradients. For the 2-norm of contiguous float32 gradients
on the CPU it also computes the total norm and scales. torch's operators implement all other cases.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._foreach_utils import (
    _device_has_foreach_support,
    _group_tensors_by_device_and_dtype,
    _has_foreach_support,
)

import fsdp_c._C as _C

_Groups = tuple[dist.ProcessGroup, ...]
_GroupKey = tuple[tuple[tuple[int, ...], str], ...]
"""Ranks and backend of each process group; see ``_make_group_key``."""
GroupNames = tuple[tuple[str, ...], _GroupKey]
"""Names of process groups, and the key of the groups."""
Kinds = list[tuple[Any, Any]]
"""The distinct (mesh, placements) of gradients, as ``_C.clip_collect`` returns them.

``(None, None)``: plain tensors. ``kind_of`` has the index for each gradient.
"""

_PARALLEL_NUMEL = 32768
"""Elements above which torch's own operators use several threads."""

_DISPATCH_MODE_KEYS = tuple(torch._C._TorchDispatchModeKey.__members__.values())


# ---- float32 gradients on the CPU, 2-norm --------------------------------------------------------


def compute_norm_on_cpu(
    tensors: list[torch.Tensor], kind_of: list[int], group_names: list[GroupNames | None]
) -> float | None:
    """Returns the total norm.

    Returns None if sums are pending, or if a gradient is not contiguous float32 on the CPU.
    """
    known = [names for names in group_names if names is not None]
    return _C.clip_norm(tensors, kind_of, known) if len(known) == len(group_names) else None


def scale_on_cpu(
    tensors: list[torch.Tensor], max_norm: float, total: float, all_or_none: bool = False
) -> bool:
    """Scales the gradients to ``max_norm``.

    If ``all_or_none`` and a gradient is not contiguous float32 on the CPU, scales none and returns
    False.
    """
    scaled = _C.clip_scale(tensors, max_norm, total, _PARALLEL_NUMEL, all_or_none)
    if scaled is None:
        return False
    factor, large_tensors = scaled
    if large_tensors:
        with torch.no_grad():
            torch._foreach_mul_(large_tensors, make_scalar(factor))
    return True


def make_scalar(value: float) -> torch.Tensor:
    """Returns a number of the C path as a float32 CPU tensor, regardless of torch's defaults."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def is_tracing() -> bool:
    """Whether a dispatch mode traces operations (fake tensors, make_fx, AOT)."""
    return any(torch._C._get_dispatch_mode(key) is not None for key in _DISPATCH_MODE_KEYS)


# ---- any order, dtype, device and mixture of placements ------------------------------------------


def clip_with_torch_operators(
    params: list[torch.Tensor],
    tensors: list[torch.Tensor],
    kinds: Kinds,
    kind_of: list[int],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> torch.Tensor:
    """Scales the local gradients ``tensors`` in place. Returns the total norm before scaling."""
    if not tensors:
        return torch.tensor(0.0)
    groups = [_get_shard_groups(mesh, placements) for mesh, placements in kinds]
    groups_by_key: dict[_GroupKey, _Groups] = {}
    groups = [groups_by_key.setdefault(_make_group_key(group), group) for group in groups]
    gradients = tensors
    if any(_is_partial(placements) for _, placements in kinds):
        gradients = [_sum_partial(param.grad) for param in params if param.grad is not None]
    total = _compute_total_norm(gradients, groups, kind_of, norm_type, foreach)
    if error_if_nonfinite and not math.isfinite(total.item()):
        raise make_nonfinite_error(norm_type)
    _scale_grads(tensors, torch.clamp(max_norm / (total + 1e-6), max=1.0), foreach)
    return total


def make_nonfinite_error(norm_type: float) -> RuntimeError:
    return RuntimeError(
        f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it "
        "cannot be clipped. To disable this error and scale the gradients by the non-finite norm "
        "anyway, set `error_if_nonfinite=False`"
    )


def _sum_partial(grad: torch.Tensor) -> torch.Tensor:
    """Returns the local tensor after pending sums: the norm of a sum needs the sum itself."""
    if not isinstance(grad, DTensor):
        return grad
    placements = [Replicate() if p.is_partial() else p for p in grad.placements]
    return grad.redistribute(placements=placements)._local_tensor


def _compute_total_norm(
    tensors: list[torch.Tensor],
    groups: list[_Groups],
    kind_of: list[int],
    norm_type: float,
    foreach: bool | None,
) -> torch.Tensor:
    """Returns the norm of all tensors over all ranks, 0-d, on the first tensor's device.

    Tensor ``i`` is sharded over ``groups[kind_of[i]]``.
    """
    norms = []
    # Partition and order are torch's, because they determine the order of the last sum.
    parts = _group_tensors_by_device_and_dtype([tensors], with_indices=True)  # type: ignore[list-item]
    for (device, _), ((part,), indices) in parts.items():
        local_norms = torch.stack(_compute_local_norms(part, norm_type, device, foreach))  # type: ignore[arg-type]
        norms.append(_reduce_norms(local_norms, groups, [kind_of[i] for i in indices], norm_type))
    first_device = tensors[0].device
    stacked = norms[0] if len(norms) == 1 else torch.cat([norm.to(first_device) for norm in norms])
    return torch.linalg.vector_norm(stacked, norm_type)


def _compute_local_norms(
    tensors: list[torch.Tensor], norm_type: float, device: torch.device, foreach: bool | None
) -> list[torch.Tensor]:
    if math.isinf(norm_type) or norm_type < 0:
        # An empty local tensor gets the neutral element of max, min or a sum of inverse powers.
        neutral_norm = 0.0 if norm_type > 0 else math.inf
        non_empty = [tensor for tensor in tensors if tensor.numel() > 0]
        if len(non_empty) < len(tensors):
            norms = iter(_compute_local_norms(non_empty, norm_type, device, foreach))
            return [next(norms) if t.numel() > 0 else t.new_full((), neutral_norm) for t in tensors]
    if tensors and _choose_foreach(tensors, device, foreach):
        return list(torch._foreach_norm(tensors, norm_type))
    return [torch.linalg.vector_norm(tensor, norm_type) for tensor in tensors]


def _choose_foreach(
    tensors: list[torch.Tensor], device: torch.device, foreach: bool | None
) -> bool:
    if foreach is None:
        return _has_foreach_support(tensors, device)
    if foreach and not _device_has_foreach_support(device):
        raise RuntimeError(
            f"foreach=True was passed, but can't use the foreach API on {device.type} tensors"
        )
    return foreach


def _reduce_norms(
    norms: torch.Tensor, groups: list[_Groups], kind_of: list[int], norm_type: float
) -> torch.Tensor:
    """Reduces norms of shards to norms of full tensors: (n,) -> (n,). May change ``norms``."""
    if all(group == groups[0] for group in groups):
        return _all_reduce_norms(norms, groups[0], norm_type)
    for shard_groups in dict.fromkeys(groups):
        members = [i for i, kind in enumerate(kind_of) if groups[kind] == shard_groups]
        if members:
            indices = torch.tensor(members, device=norms.device)
            norms[indices] = _all_reduce_norms(norms[indices], shard_groups, norm_type)
    return norms


def _all_reduce_norms(norms: torch.Tensor, groups: _Groups, norm_type: float) -> torch.Tensor:
    if not groups:
        return norms
    op: Any = dist.ReduceOp.SUM
    sums_powers = not math.isinf(norm_type) and norm_type not in (0.0, 1.0)
    if math.isinf(norm_type):
        op = dist.ReduceOp.MAX if norm_type > 0 else dist.ReduceOp.MIN
    if sums_powers:
        norms = norms**norm_type
    for group in groups:
        dist.all_reduce(norms, op, group)
    return norms ** (1.0 / norm_type) if sums_powers else norms


def _scale_grads(tensors: list[torch.Tensor], factor: torch.Tensor, foreach: bool | None) -> None:
    # Other devices would need a synchronization to read the factor. Fake tensors have no values.
    can_read_factor = (
        factor.device.type == "cpu" and type(factor) is torch.Tensor and not is_tracing()
    )
    if can_read_factor and factor.item() == 1.0:
        return
    parts = _group_tensors_by_device_and_dtype([tensors])  # type: ignore[list-item]
    for (device, _), ((part,), _) in parts.items():
        if _choose_foreach(part, device, foreach):  # type: ignore[arg-type]
            torch._foreach_mul_(part, factor.to(device))  # type: ignore[arg-type]
        else:
            for tensor in part:
                tensor.mul_(factor.to(device))  # type: ignore[union-attr]


# ---- process groups ------------------------------------------------------------------------------


class PerMeshCache:
    """A function of a mesh and placements that caches its results while the mesh is alive."""

    def __init__(self, find: Callable[[DeviceMesh, Any], Any]) -> None:
        self._find = find
        self._cache: dict[tuple[int, Any], tuple[weakref.ref[DeviceMesh], Any]] = {}

    def __call__(self, mesh: DeviceMesh, placements: Any) -> Any:
        key = (id(mesh), placements)  # by identity: equal meshes may have different groups
        cached = self._cache.get(key)
        if cached is None or cached[0]() is not mesh:
            live_entries = {k: entry for k, entry in self._cache.items() if entry[0]() is not None}
            cached = (weakref.ref(mesh), self._find(mesh, placements))
            self._cache = {**live_entries, key: cached}
        return cached[1]


def _find_group_names(mesh: DeviceMesh, placements: Any) -> GroupNames | None:
    if _is_partial(placements):
        return None
    groups = _get_shard_groups(mesh, placements)
    return tuple(group.group_name for group in groups), _make_group_key(groups)


_group_names_cache = PerMeshCache(_find_group_names)


def get_group_names(mesh: DeviceMesh | None, placements: Any) -> GroupNames | None:
    """Returns the names and the key of the groups to reduce over; None for pending sums."""
    return ((), ()) if mesh is None else _group_names_cache(mesh, placements)


def _get_shard_groups(mesh: DeviceMesh | None, placements: Any) -> _Groups:
    """Returns the process groups over which a gradient is sharded; none for a plain tensor.

    A mesh dim of one rank needs no group: torch issues no collective over it.
    """
    if mesh is None:
        return ()
    sharded_dims = (
        dim
        for dim, p in enumerate(placements)
        if not (p.is_replicate() or p.is_partial()) and mesh.size(dim) > 1
    )
    return tuple(mesh.get_group(dim) for dim in sharded_dims)


def _make_group_key(groups: _Groups) -> _GroupKey:
    """Returns a key that is equal for process groups with equal ranks and backends.

    Equal meshes may have different groups, and DTensor's caches mix these meshes.
    """
    return tuple(
        (tuple(dist.get_process_group_ranks(group)), dist.get_backend_config(group))
        for group in groups
    )


def _is_partial(placements: Any) -> bool:
    return placements is not None and any(p.is_partial() for p in placements)
