"""torch's clipping functions, with the C path for what is usual and torch's own code for the rest.

``torch.nn.utils.clip_grad_norm_``, ``get_total_norm`` and ``clip_grads_with_norm_`` lead here once
fsdp_c is switched on (``FSDP_C=1``, :func:`fsdp_c.install`). Arguments, results and bits are
torch's: the total norm of DTensors is a DTensor. Usual are contiguous float32 gradients on the CPU
that are DTensors on one mesh, sharded over at most one dimension of it, and the 2-norm. Whatever
else comes, and whatever somebody else looks at (modes, a compiler), torch does itself.
"""

from __future__ import annotations

import math
import sys
import types
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import fsdp_c._C as _C
import fsdp_c_redirect

from .clip import _PARALLEL_NUMEL, _group_names, _is_traced, _Named, _nonfinite, _number
from .switches import is_on

_Tensors = torch.Tensor | Iterable[torch.Tensor]

ENVIRONMENT_SWITCH = "FSDP_C_CLIP"
_MODULE = "torch.nn.utils.clip_grad"
_KINDS = (Shard, Replicate)

# ---- what torch's functions run ------------------------------------------------------------------


def clip_grad_norm_(
    parameters: _Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    params = _listed(parameters)
    if type(params) is list and _is_two(norm_type) and _is_usual() and not _is_patched():
        if not params and isinstance(parameters, types.GeneratorType):
            # Said here: torch would name this file as the caller's.
            warnings.warn(
                "`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=3
            )
        elif (bound := _as_float(max_norm)) is not None:
            mesh = _OneMesh()
            found = _C.clip(params, bound, error_if_nonfinite, _PARALLEL_NUMEL, mesh)
            if found is not None:
                value, factor, large = found
                if error_if_nonfinite and not math.isfinite(value):
                    raise _nonfinite(2.0)
                _scale(large, factor)
                return mesh.total(value)
    return _torchs("clip_grad_norm_")(params, max_norm, norm_type, error_if_nonfinite, foreach)


def get_total_norm(
    tensors: _Tensors,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    grads = _listed(tensors)
    if type(grads) is list and _is_two(norm_type) and _is_usual():
        mesh = _OneMesh()
        value = _C.clip_total(grads, mesh)
        if value is not None:
            if error_if_nonfinite and not math.isfinite(value):
                raise _nonfinite(2.0)
            return mesh.total(value)
    return _torchs("_get_total_norm")(grads, norm_type, error_if_nonfinite, foreach)


def clip_grads_with_norm_(
    parameters: _Tensors,
    max_norm: float,
    total_norm: torch.Tensor,
    foreach: bool | None = None,
) -> None:
    params = _listed(parameters)
    if type(params) is list and params and _is_usual():
        mesh = _OneMesh()
        total, bound = mesh.value_of(total_norm), _as_float(max_norm)
        if total is not None and bound is not None:
            found = _C.clip_scale(params, bound, total, _PARALLEL_NUMEL, mesh)
            if found is not None:
                _scale(found[1], found[0])
                return None
    return _torchs("_clip_grads_with_norm_")(params, max_norm, total_norm, foreach)


# ---- what is usual -------------------------------------------------------------------------------


def _listed(tensors: Any) -> Any:
    """A list, as torch makes one; a single tensor is left to torch."""
    return tensors if isinstance(tensors, torch.Tensor) else list(tensors)


def _as_float(number: Any) -> float | None:
    """A number as torch takes it; None: torch has to say what is wrong with it."""
    return float(number) if type(number) in (int, float) else None


def _is_two(norm_type: Any) -> bool:
    return type(norm_type) in (int, float) and norm_type == 2


def _is_usual() -> bool:
    """Whether nobody records or changes what torch's operations do."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.maybe_current_level() is not None
        or _is_traced()
    )


def _is_patched() -> bool:
    """Whether the functions that torch's clip_grad_norm_ calls are others than torch's."""
    names = vars(sys.modules[_MODULE])
    return any(names.get(name) is not one.function for name, one in _redirected.items())


def _scale(tensors: list[torch.Tensor], factor: float) -> None:
    if tensors:
        with torch.no_grad():
            torch._foreach_mul_(tensors, _number(factor))


class _OneMesh:
    """Answers the C path: which groups a kind of gradient is reduced over, while all are alike."""

    def __init__(self) -> None:
        self._mesh: DeviceMesh | None = None
        self._named: _Named | None = None

    def __call__(self, mesh: DeviceMesh | None, placements: Any) -> _Named | None:
        named = None if mesh is None else _known_kinds(mesh, placements)
        if named is None:
            return None
        if self._mesh is None:
            self._mesh = mesh
        if self._named is None:
            self._named = named
        same = self._mesh is mesh or self._mesh == mesh
        return self._named if same and named[1] == self._named[1] else None

    def total(self, value: float) -> DTensor:
        """The total norm, as torch has it: the same on all ranks of the mesh."""
        assert self._mesh is not None
        return DTensor(_number(value), _spec_of_total(self._mesh), requires_grad=False)

    def value_of(self, total: Any) -> float | None:
        """What a total norm is that torch made (or somebody else, as a plain tensor)."""
        if type(total) is DTensor:
            if any(type(placement) is not Replicate for placement in total.placements):
                return None
            self._mesh = total.device_mesh
            total = total._local_tensor
        usual = type(total) is torch.Tensor and total.dtype is torch.float32 and total.ndim == 0
        return total.item() if usual and total.device.type == "cpu" else None


class _PerMesh:
    """A function of a mesh and placements that remembers its answers while the mesh lives."""

    def __init__(self, find: Callable[..., Any]) -> None:
        self._find = find
        self._known: dict[tuple[int, Any], tuple[weakref.ref[DeviceMesh], Any]] = {}

    def __call__(self, mesh: DeviceMesh, placements: Any = None) -> Any:
        key = (id(mesh), placements)  # the very mesh: an equal one may have other groups
        known = self._known.get(key)
        if known is None or known[0]() is not mesh:
            found = self._find(mesh) if placements is None else self._find(mesh, placements)
            alive = {k: one for k, one in self._known.items() if one[0]() is not None}
            known = (weakref.ref(mesh), found)
            self._known = {**alive, key: known}
        return known[1]


def _find_kind(mesh: DeviceMesh, placements: Any) -> _Named | None:
    """The groups that gradients are reduced over; None where torch might do it otherwise."""
    if any(type(placement) not in _KINDS for placement in placements):
        return None
    if sum(type(placement) is Shard for placement in placements) > 1:
        return None
    return _group_names(mesh, placements)


def _find_spec(mesh: DeviceMesh) -> DTensorSpec:
    scalar = TensorMeta(torch.Size([]), (), torch.float32)
    return DTensorSpec(mesh, (Replicate(),) * mesh.ndim, tensor_meta=scalar)


_known_kinds = _PerMesh(_find_kind)
_spec_of_total = _PerMesh(_find_spec)

# ---- the switch ----------------------------------------------------------------------------------

_OURS: dict[str, Callable[..., Any]] = {
    "clip_grad_norm_": clip_grad_norm_,
    "_get_total_norm": get_total_norm,  # torch.nn.utils.get_total_norm
    "_clip_grads_with_norm_": clip_grads_with_norm_,
}
_redirected: dict[str, fsdp_c_redirect.Redirection] = {}


def redirect() -> None:
    """Makes torch's functions lead here; ``FSDP_C_CLIP=0`` leaves them."""
    if _redirected or not is_on(ENVIRONMENT_SWITCH, "1"):
        return
    module = sys.modules[_MODULE]
    for name, ours in _OURS.items():
        function = fsdp_c_redirect.find_torchs(module, name)
        if function is not None:
            _redirected[name] = fsdp_c_redirect.Redirection(function, ours)


def restore() -> None:
    """Undoes :func:`redirect`."""
    for redirection in _redirected.values():
        redirection.undo()
    _redirected.clear()


def _torchs(name: str) -> Callable[..., Any]:
    """torch's own function of that name."""
    redirection = _redirected.get(name)
    function = getattr(sys.modules[_MODULE], name) if redirection is None else redirection.original
    return function
