"""torch's clipping functions on the fast path of ``grad_norm.py``.

``torch.nn.utils.clip_grad_norm_``, ``get_total_norm`` and ``clip_grads_with_norm_`` run the
functions of this module after ``FSDP_C=1`` or :func:`fsdp_c.install`. Arguments, results and
bits are torch's: the total norm of DTensors is a DTensor. The fast path computes the 2-norm of
contiguous float32 DTensors on the CPU that are on one mesh and sharded over at most one dimension.
In all other cases, and while a mode or a compiler is active, torch's code runs.
"""

from __future__ import annotations

import math
import sys
import types
import warnings
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

import fsdp_c._C as _C
from fsdp_c_autoload.redirect import Redirection, find_torch_function

from .env import is_env_enabled
from .grad_norm import (
    GroupNames,
    Kinds,
    PerMeshCache,
    compute_norm_on_cpu,
    get_group_names,
    is_tracing,
    make_nonfinite_error,
    make_scalar,
    scale_on_cpu,
)

_Tensors = torch.Tensor | Iterable[torch.Tensor]

ENVIRONMENT_SWITCH = "FSDP_C_CLIP"
_MODULE = "torch.nn.utils.clip_grad"
_FAST_PLACEMENTS = (Shard, Replicate)

# ---- torch's functions ---------------------------------------------------------------------------


def clip_grad_norm_(
    parameters: _Tensors,
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    params = _list_tensors(parameters)
    if isinstance(parameters, types.GeneratorType) and not params:
        # torch's function gets a list, so it would not warn.
        warnings.warn(
            "`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=3
        )
    elif (
        type(params) is list
        and _is_two_norm(norm_type)
        and _is_plain_execution()
        and not _is_patched()
        and (max_norm_value := _convert_to_float(max_norm)) is not None
    ):
        norm = _compute_norm(params, True, error_if_nonfinite)
        if norm is not None:
            scale_on_cpu(norm.grads, max_norm_value, norm.total)
            return _wrap_total(norm.total, norm.mesh)
    return _get_torch_function("clip_grad_norm_")(
        params, max_norm, norm_type, error_if_nonfinite, foreach
    )


def get_total_norm(
    tensors: _Tensors,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    grads = _list_tensors(tensors)
    if type(grads) is list and _is_two_norm(norm_type) and _is_plain_execution():
        norm = _compute_norm(grads, False, error_if_nonfinite)
        if norm is not None:
            return _wrap_total(norm.total, norm.mesh)
    return _get_torch_function("_get_total_norm")(grads, norm_type, error_if_nonfinite, foreach)


def clip_grads_with_norm_(
    parameters: _Tensors,
    max_norm: float,
    total_norm: torch.Tensor,
    foreach: bool | None = None,
) -> None:
    params = _list_tensors(parameters)
    if type(params) is list and params and _is_plain_execution():
        mesh, total = _read_total(total_norm)
        max_norm_value = _convert_to_float(max_norm)
        if total is not None and max_norm_value is not None:
            tensors, kinds, _ = _C.clip_collect(params, True)
            _, group_names = _find_common_mesh(kinds, mesh)
            if (
                tensors
                and None not in group_names
                and scale_on_cpu(tensors, max_norm_value, total, True)
            ):
                return None
    return _get_torch_function("_clip_grads_with_norm_")(params, max_norm, total_norm, foreach)


class _Norm(NamedTuple):
    """The total norm over all ranks, the common mesh of the gradients, and their local tensors."""

    total: float
    mesh: DeviceMesh | None
    grads: list[torch.Tensor]


def _compute_norm(
    tensors: list[torch.Tensor], are_params: bool, error_if_nonfinite: bool
) -> _Norm | None:
    """Returns the total 2-norm of gradients, or of the gradients of parameters.

    Returns None for gradients that the fast path does not support.

    Raises:
        RuntimeError: The norm is not finite, and ``error_if_nonfinite`` is set.
    """
    grads, kinds, kind_of = _C.clip_collect(tensors, are_params)
    mesh, group_names = _find_common_mesh(kinds)
    total = compute_norm_on_cpu(grads, kind_of, group_names)
    if total is None:
        return None
    if error_if_nonfinite and not math.isfinite(total):
        raise make_nonfinite_error(2.0)
    return _Norm(total, mesh, grads)


# ---- conditions of the fast path -----------------------------------------------------------------


def _list_tensors(tensors: Any) -> Any:
    """Returns a list as torch makes it; a single tensor is returned unchanged."""
    return tensors if isinstance(tensors, torch.Tensor) else list(tensors)


def _convert_to_float(number: Any) -> float | None:
    """Returns the number as torch converts it; None if torch must convert or raise."""
    return float(number) if type(number) in (int, float) else None


def _is_two_norm(norm_type: Any) -> bool:
    return type(norm_type) in (int, float) and norm_type == 2


def _is_plain_execution() -> bool:
    """Whether no mode, transform or compiler records or changes torch's operations."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._functorch.maybe_current_level() is not None
        or is_tracing()
    )


def _is_patched() -> bool:
    """Whether torch's module has another function than the redirected one under any name."""
    names = vars(sys.modules[_MODULE])
    return any(
        names.get(name) is not redirection.function for name, redirection in _redirected.items()
    )


def _find_single_dim_groups(mesh: DeviceMesh, placements: Any) -> GroupNames | None:
    if any(type(placement) not in _FAST_PLACEMENTS for placement in placements):
        return None
    if sum(type(placement) is Shard for placement in placements) > 1:
        return None
    return get_group_names(mesh, placements)


def _make_scalar_spec(mesh: DeviceMesh, placements: Any) -> DTensorSpec:
    scalar = TensorMeta(torch.Size([]), (), torch.float32)
    return DTensorSpec(mesh, placements, tensor_meta=scalar)


_single_dim_cache = PerMeshCache(_find_single_dim_groups)
_spec_cache = PerMeshCache(_make_scalar_spec)


def _find_common_mesh(
    kinds: Kinds, mesh: DeviceMesh | None = None
) -> tuple[DeviceMesh | None, list[GroupNames | None]]:
    """Returns a common mesh of all kinds, and for each kind the process groups of the first kind.

    The mesh is ``mesh`` if given, else the mesh of the first kind. The groups are ``[None]`` if
    torch's result may differ: for plain gradients, for kinds on other meshes or of other groups
    than the first, and for more than one sharded dimension.
    """
    group_names: list[GroupNames | None] = []
    for kind_mesh, placements in kinds:
        groups = None if kind_mesh is None else _single_dim_cache(kind_mesh, placements)
        mesh = kind_mesh if mesh is None else mesh
        is_same_mesh = mesh is kind_mesh or mesh == kind_mesh
        if groups is None or not is_same_mesh or (group_names and groups[1] != group_names[0][1]):  # type: ignore[index]
            return mesh, [None]
        group_names.append(group_names[0] if group_names else groups)
    return mesh, group_names


def _wrap_total(total: float, mesh: DeviceMesh | None) -> DTensor:
    """Returns the total norm as torch does, equal on all ranks of the mesh."""
    assert mesh is not None
    spec = _spec_cache(mesh, (Replicate(),) * mesh.ndim)
    return DTensor(make_scalar(total), spec, requires_grad=False)


def _read_total(total: Any) -> tuple[DeviceMesh | None, float | None]:
    """Returns the mesh of a DTensor total norm, and the value of a float32 total norm on the CPU.

    Returns None for a missing mesh or another value.
    """
    mesh = None
    if type(total) is DTensor:
        if any(type(placement) is not Replicate for placement in total.placements):
            return None, None
        mesh, total = total.device_mesh, total._local_tensor
    is_scalar = type(total) is torch.Tensor and total.dtype is torch.float32 and total.ndim == 0
    return mesh, total.item() if is_scalar and total.device.type == "cpu" else None


# ---- the switch ----------------------------------------------------------------------------------

_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "clip_grad_norm_": clip_grad_norm_,
    "_get_total_norm": get_total_norm,  # torch.nn.utils.get_total_norm
    "_clip_grads_with_norm_": clip_grads_with_norm_,
}
_redirected: dict[str, Redirection] = {}


def redirect() -> None:
    """Redirects torch's functions to this module, unless ``FSDP_C_CLIP=0`` is set."""
    if _redirected or not is_env_enabled(ENVIRONMENT_SWITCH, "1"):
        return
    module = sys.modules[_MODULE]
    for name, replacement in _REPLACEMENTS.items():
        function = find_torch_function(module, name)
        if function is not None:
            _redirected[name] = Redirection(function, replacement)


def restore() -> None:
    """Undoes :func:`redirect`."""
    for redirection in _redirected.values():
        redirection.undo()
    _redirected.clear()


def _get_torch_function(name: str) -> Callable[..., Any]:
    """Returns torch's own function of that name."""
    redirection = _redirected.get(name)
    function = getattr(sys.modules[_MODULE], name) if redirection is None else redirection.original
    return function
