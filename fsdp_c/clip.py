"""Clipping by total norm: local norms, one collective, local scaling.

torch's ``clip_grad_norm_`` goes through DTensor's dispatch, which looks at every gradient several
times over. The same numbers come from the local tensors; on the CPU, for float32 and the 2-norm,
the loops over parameters are C (csrc/python/clip.c).
"""

from __future__ import annotations

import math
import types
import warnings
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._foreach_utils import (
    _device_has_foreach_support,
    _group_tensors_by_device_and_dtype,
    _has_foreach_support,
)

import fsdp_c._C as _C

_Groups = tuple[dist.ProcessGroup, ...]
_Likeness = tuple[tuple[tuple[int, ...], str], ...]
_Named = tuple[tuple[str, ...], _Likeness]

_PARALLEL_NUMEL = 32768
"""Elements above which torch's own operators use several threads."""

_TRACING = tuple(torch._C._TorchDispatchModeKey.__members__.values())


def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scales the gradients so that their total norm is at most ``max_norm``, in place.

    Does what ``torch.nn.utils.clip_grad_norm_`` does, for sharded parameters (any mesh, any
    placements) and plain ones together, with one collective for each dtype and each mesh dimension
    that is sharded over: one in all for the usual model. All ranks have to call it.

    Args:
        parameters: Parameters, or a module for all of its parameters. Those without gradient are
            left out. A plain tensor's gradient counts once: it is taken to be the same everywhere.
        max_norm: Largest total norm; gradients are multiplied by
            ``min(max_norm / (total + 1e-6), 1)``.
        norm_type: Any order that ``torch.linalg.vector_norm`` has, ``inf`` too.
        error_if_nonfinite: Raise where the total norm is nan or infinite.
        foreach: As in torch.

    Returns:
        The total norm before clipping: a plain 0-d tensor with the same value on all ranks (torch
        gives a DTensor, whose ``full_tensor()`` it is).

    Raises:
        RuntimeError: ``error_if_nonfinite``, before any gradient is changed; ``foreach=True`` on a
            device without such kernels.

    The total is torch's bit for bit on two ranks for orders 1, 2, 3 and ``inf``. Otherwise it may
    differ in the last bits: where more ranks add up, a backend's order of summation may depend on
    the length of the message (torch reduces one number at a time); and for other orders vectorized
    and single powers are rounded differently.
    """
    params = _as_list(parameters)
    norm_type, max_norm = float(norm_type), float(max_norm)
    if norm_type == 2.0 and foreach is None and not _is_traced():
        found = _C.clip(params, max_norm, error_if_nonfinite, _PARALLEL_NUMEL, _group_names)
        if found is not None:
            value, factor, large = found
            if error_if_nonfinite and not math.isfinite(value):
                raise _nonfinite(norm_type)
            if large:
                with torch.no_grad():
                    torch._foreach_mul_(large, _number(factor))
            return _number(value)
    with torch.no_grad():
        return _clip(params, max_norm, norm_type, error_if_nonfinite, foreach)


def _number(value: float) -> torch.Tensor:
    """What the C path found, whatever the defaults of new tensors are: it is float32, and exact."""
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def _is_traced() -> bool:
    """Whether torch's operations are recorded or have no values (fake tensors, make_fx, AOT)."""
    return any(torch._C._get_dispatch_mode(key) is not None for key in _TRACING)


def _clip(
    params: list[torch.Tensor],
    max_norm: float,
    norm_type: float,
    error_if_nonfinite: bool,
    foreach: bool | None,
) -> torch.Tensor:
    """Any order, dtype, device and mixture of placements."""
    tensors, kinds, kind_of = _C.clip_collect(params)
    if not tensors:
        return torch.tensor(0.0)
    groups = [_sharded_over(mesh, placements) for mesh, placements in kinds]
    first: dict[_Likeness, _Groups] = {}
    groups = [first.setdefault(_likeness(one), one) for one in groups]
    whole = tensors
    if any(_is_partial(placements) for _, placements in kinds):
        whole = [_summed(param.grad) for param in params if param.grad is not None]
    total = _total_norm(whole, groups, kind_of, norm_type, foreach)
    if error_if_nonfinite and not math.isfinite(total.item()):
        raise _nonfinite(norm_type)
    _scale(tensors, torch.clamp(max_norm / (total + 1e-6), max=1.0), foreach)
    return total


def _nonfinite(norm_type: float) -> RuntimeError:
    return RuntimeError(
        f"The total norm of order {norm_type} for gradients from `parameters` is non-finite, so it "
        "cannot be clipped. To disable this error and scale the gradients by the non-finite norm "
        "anyway, set `error_if_nonfinite=False`"
    )


class _GroupNames:
    """Names of the groups to reduce over, with their likeness; None where sums are pending.

    Remembers its answers: the gradients of a training are placed alike, call after call.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[int, Any], tuple[weakref.ref[Any], _Named | None]] = {}

    def __call__(self, mesh: DeviceMesh | None, placements: Any) -> _Named | None:
        if mesh is None:
            return (), ()
        # The very mesh: an equal one may have other groups.
        key = (id(mesh), placements)
        known = self._known.get(key)
        if known is None or known[0]() is not mesh:
            alive = {k: one for k, one in self._known.items() if one[0]() is not None}
            known = (weakref.ref(mesh), self._find(mesh, placements))
            self._known = {**alive, key: known}
        return known[1]

    def _find(self, mesh: DeviceMesh, placements: Any) -> _Named | None:
        if _is_partial(placements):
            return None
        groups = _sharded_over(mesh, placements)
        return tuple(group.group_name for group in groups), _likeness(groups)


_group_names = _GroupNames()


def _as_list(parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor]) -> list[torch.Tensor]:
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    if isinstance(parameters, nn.Module):
        return list(parameters.parameters())
    found = list(parameters)
    if not found and isinstance(parameters, types.GeneratorType):
        warnings.warn(
            "`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=3
        )
    return found


def _sharded_over(mesh: DeviceMesh | None, placements: Any) -> _Groups:
    """The process groups over which a gradient is split; none for a plain tensor."""
    if mesh is None:
        return ()
    split = (dim for dim, p in enumerate(placements) if not (p.is_replicate() or p.is_partial()))
    return tuple(mesh.get_group(dim) for dim in split)


def _likeness(groups: _Groups) -> _Likeness:
    """Equal for groups that do the same: equal meshes made twice have groups of their own, and
    DTensor's caches give a parameter now the one, now the other."""
    return tuple(
        (tuple(dist.get_process_group_ranks(group)), dist.get_backend_config(group))
        for group in groups
    )


def _is_partial(placements: Any) -> bool:
    return placements is not None and any(p.is_partial() for p in placements)


def _summed(grad: torch.Tensor) -> torch.Tensor:
    """The local tensor after pending sums: the norm of a sum is not known from its terms."""
    if not isinstance(grad, DTensor):
        return grad
    placements = [Replicate() if p.is_partial() else p for p in grad.placements]
    return grad.redistribute(placements=placements)._local_tensor


def _total_norm(
    tensors: list[torch.Tensor],
    groups: list[_Groups],
    kind_of: list[int],
    norm_type: float,
    foreach: bool | None,
) -> torch.Tensor:
    """The norm of all tensors as one vector, over all ranks; 0-d, on the first one's device.

    ``groups[kind_of[i]]`` is what tensor ``i`` is split over.
    """
    norms = []
    # The same partition, in the same order, as torch's: the last sum goes over it.
    parts = _group_tensors_by_device_and_dtype([tensors], with_indices=True)  # type: ignore[list-item]
    for (device, _), ((part,), indices) in parts.items():
        local = torch.stack(_local_norms(part, norm_type, device, foreach))  # type: ignore[arg-type]
        norms.append(_reduced(local, groups, [kind_of[i] for i in indices], norm_type))
    first = tensors[0].device
    stacked = norms[0] if len(norms) == 1 else torch.cat([norm.to(first) for norm in norms])
    return torch.linalg.vector_norm(stacked, norm_type)


def _local_norms(
    tensors: list[torch.Tensor], norm_type: float, device: torch.device, foreach: bool | None
) -> list[torch.Tensor]:
    if math.isinf(norm_type) or norm_type < 0:
        # Nothing on this rank: what adds nothing to a maximum, a minimum or a sum of inverses.
        neutral = 0.0 if norm_type > 0 else math.inf
        full = [tensor for tensor in tensors if tensor.numel() > 0]
        if len(full) < len(tensors):
            found = iter(_local_norms(full, norm_type, device, foreach))
            return [next(found) if t.numel() > 0 else t.new_full((), neutral) for t in tensors]
    if tensors and _use_foreach(tensors, device, foreach):
        return list(torch._foreach_norm(tensors, norm_type))
    return [torch.linalg.vector_norm(tensor, norm_type) for tensor in tensors]


def _use_foreach(tensors: list[torch.Tensor], device: torch.device, foreach: bool | None) -> bool:
    if foreach is None:
        return _has_foreach_support(tensors, device)
    if foreach and not _device_has_foreach_support(device):
        raise RuntimeError(
            f"foreach=True was passed, but can't use the foreach API on {device.type} tensors"
        )
    return foreach


def _reduced(
    norms: torch.Tensor, groups: list[_Groups], kind_of: list[int], norm_type: float
) -> torch.Tensor:
    """The norms of whole tensors from those of this rank's parts: (n,) -> (n,)."""
    if all(group == groups[0] for group in groups):
        return _all_reduced(norms, groups[0], norm_type)
    for over in dict.fromkeys(groups):
        own = [i for i, kind in enumerate(kind_of) if groups[kind] == over]
        if own:
            indices = torch.tensor(own, device=norms.device)
            norms[indices] = _all_reduced(norms[indices], over, norm_type)
    return norms


def _all_reduced(norms: torch.Tensor, groups: _Groups, norm_type: float) -> torch.Tensor:
    if not groups:
        return norms
    op: Any = dist.ReduceOp.SUM
    power = not math.isinf(norm_type) and norm_type not in (0.0, 1.0)
    if math.isinf(norm_type):
        op = dist.ReduceOp.MAX if norm_type > 0 else dist.ReduceOp.MIN
    if power:
        norms = norms**norm_type
    for group in groups:
        dist.all_reduce(norms, op, group)
    return norms ** (1.0 / norm_type) if power else norms


def _scale(tensors: list[torch.Tensor], factor: torch.Tensor, foreach: bool | None) -> None:
    # On other devices it would take a synchronization to know; fake tensors have no values.
    known = factor.device.type == "cpu" and type(factor) is torch.Tensor and not _is_traced()
    if known and factor.item() == 1.0:
        return
    parts = _group_tensors_by_device_and_dtype([tensors])  # type: ignore[list-item]
    for (device, _), ((part,), _) in parts.items():
        if _use_foreach(part, device, foreach):  # type: ignore[arg-type]
            torch._foreach_mul_(part, factor.to(device))  # type: ignore[arg-type]
        else:
            for tensor in part:
                tensor.mul_(factor.to(device))  # type: ignore[union-attr]
