"""Functions and types of FSDP2 that differ between torch releases, under one name each.

Each name is torch's object if torch defines it, else a replacement. The module detects a release by
the names that torch defines or by the code of its modules (``originals.py``). The module does not
read attributes of functions, because libraries replace functions before fsdp_c is imported.

The module detects releases at import. Its functions for meshes and parameters run during init,
those for tensors and collectives also during steps.

``missing_members.py`` has the members of torch's classes that some releases lack, and
``_runtime/module_methods.py`` the methods of modules. ``_runtime/torch215_methods.py`` and
``_runtime/mixed_precision.py`` have the parts that torch 2.15 added.

A feature that cannot be replaced raises ``NotImplementedError`` with the argument and the release.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import torch
import torch.distributed as dist
import torch.distributed.fsdp._common_utils as _utils
import torch.distributed.fsdp._fully_shard._fsdp_collectives as _collectives
import torch.distributed.fsdp._fully_shard._fsdp_common as _common
import torch.distributed.fsdp._fully_shard._fsdp_init as _init
import torch.distributed.fsdp._fully_shard._fsdp_param as _param
import torch.nn as nn
import torch.utils._pytree as pytree
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DataParallelMeshInfo,
    FSDPMeshInfo,
)
from torch.distributed.tensor import DTensor, Shard

from .originals import has_parameter

HAS_MESH_FOR_EACH_PARAM = hasattr(_common, "ShardPlacementResult")
"""Whether ``shard_placement_fn`` may return a mesh. If not, a state has one group."""

HAS_NAMED_MESH_DIMS = hasattr(_common.DataParallelMeshInfo, "is_spmd_mesh")
"""Whether ``fully_shard`` supports ``dp_mesh_dims``."""


def raise_unsupported(feature: str, since: str) -> NoReturn:
    """Raises ``NotImplementedError`` for a feature of torch release ``since``."""
    raise NotImplementedError(
        f"{feature} needs torch {since} or newer; this is torch {torch.__version__}"
    )


# ---- tensors in arguments and outputs ------------------------------------------------------------


def _is_unregistered_dataclass(node: Any) -> bool:
    """Whether ``node`` is a dataclass object whose class is not registered with pytree."""
    is_instance = dataclasses.is_dataclass(node) and not isinstance(node, type)
    return is_instance and type(node) not in pytree.SUPPORTED_NODES


def _collect_grad_tensors(tree: Any) -> tuple[torch.Tensor, ...]:
    tensors: list[torch.Tensor] = []
    for leaf in pytree.tree_leaves(tree, is_leaf=_is_unregistered_dataclass):
        if _is_unregistered_dataclass(leaf):
            for field in dataclasses.fields(leaf):
                tensors += _collect_grad_tensors(getattr(leaf, field.name))
        elif isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            tensors.append(leaf)
    return tuple(tensors)


def _replace_grad_tensors(tree: Any, replacements: Iterator[torch.Tensor]) -> Any:
    def visit(leaf: Any) -> Any:
        if _is_unregistered_dataclass(leaf):
            values = {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf)}
            changes = {
                name: _replace_grad_tensors(value, replacements)
                for name, value in values.items()
                if _collect_grad_tensors(value)
            }
            return dataclasses.replace(leaf, **changes) if changes else leaf
        return next(replacements) if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf

    return pytree.tree_map(visit, tree, is_leaf=_is_unregistered_dataclass)


collect_grad_tensors: Callable[[Any], tuple[torch.Tensor, ...]] = getattr(
    _utils, "collect_grad_tensors", _collect_grad_tensors
)
"""Returns the tensors that require grad in nested containers and dataclasses, in order."""

replace_grad_tensors: Callable[[Any, Iterator[torch.Tensor]], Any] = getattr(
    _utils, "replace_grad_tensors", _replace_grad_tensors
)
"""Returns a copy in which the tensors of an iterator replace the tensors that require grad."""


dtensor_new: Callable[..., DTensor] = getattr(torch.Tensor, "_dtensor__new__", None) or DTensor
"""Makes a DTensor from a local tensor, a spec and ``requires_grad=``."""


# ---- collectives ---------------------------------------------------------------------------------

ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)
"""The names of the ``torch.distributed`` functions that FSDP2's own collectives call."""


SymmMemAllGather: type | None = getattr(_collectives, "SymmMemAllGather", None)
SymmMemReduceScatter: type | None = getattr(_collectives, "SymmMemReduceScatter", None)
"""torch's collectives over symmetric memory. None: the release has none."""


def make_orig_dtype_argument(dtype: torch.dtype | None) -> Any:
    """Returns the argument ``orig_dtype`` of torch's ``foreach_reduce``, as a tuple of arguments.

    Empty from torch 2.15 on, where ``sharded_grad_dtype`` of each parameter replaces it.
    """
    return (dtype,) if _HAS_ORIG_DTYPE_ARGUMENT else ()


def _has_orig_dtype_argument() -> bool:
    """Whether torch's ``foreach_reduce`` takes ``orig_dtype``.

    Reads torch's source: development versions of 2.15 differ, and a wrapper hides the argument.
    """
    has_argument = has_parameter(_collectives, "foreach_reduce", "orig_dtype")
    return (
        not hasattr(_param.FSDPParam, "unsharded_grad_dtype")
        if has_argument is None
        else has_argument
    )


_HAS_ORIG_DTYPE_ARGUMENT = _has_orig_dtype_argument()


# ---- meshes --------------------------------------------------------------------------------------

ShardPlacementFnResult = Any
"""The result of ``shard_placement_fn``: ``Shard``, ``None`` or torch's ``ShardPlacementResult``."""


def resolve_placement(
    result: ShardPlacementFnResult, default: FSDPMeshInfo
) -> tuple[Shard | None, FSDPMeshInfo]:
    """Returns the placement and the mesh that ``shard_placement_fn`` chose.

    Raises:
        ValueError: ``result`` is neither ``Shard``, ``None`` nor a ``ShardPlacementResult``.
    """
    if HAS_MESH_FOR_EACH_PARAM:
        resolved = _common.resolve_shard_placement(result, default)
        return resolved.placement, resolved.mesh_info
    if result is None or isinstance(result, Shard):
        return result, default
    raise ValueError(f"Invalid shard_placement_fn result: {result}")


def validate_mesh(mesh: DeviceMesh, dp_mesh_dims: Any, caller: str) -> None:
    """Validates the mesh of ``fully_shard`` by torch's function.

    Raises:
        NotImplementedError: This torch does not support ``dp_mesh_dims``.
        ValueError, AssertionError: The mesh is invalid; raised by torch.
    """
    if HAS_NAMED_MESH_DIMS:
        _init._validate_mesh(mesh, dp_mesh_dims)
        return
    if dp_mesh_dims is not None:
        raise_unsupported(f"{caller}(dp_mesh_dims=...)", "2.12")
    _init._validate_mesh(mesh)


def make_mesh_info(mesh: DeviceMesh, dp_mesh_dims: Any) -> DataParallelMeshInfo:
    """Returns torch's mesh info for a mesh that :func:`validate_mesh` accepted."""
    if dp_mesh_dims is None:
        return _init._get_mesh_info(mesh)
    return _init._get_mesh_info(mesh, dp_mesh_dims)


def is_spmd_mesh(mesh_info: DataParallelMeshInfo) -> bool:
    """Whether ``mesh_info`` was made with ``dp_mesh_dims``."""
    return HAS_NAMED_MESH_DIMS and mesh_info.is_spmd_mesh


# ---- parameters ----------------------------------------------------------------------------------

_uids = itertools.count()


def _get_uid(param: nn.Parameter) -> int:
    if not hasattr(param, "_fsdp_orig_uid"):
        param._fsdp_orig_uid = next(_uids)  # type: ignore[attr-defined]
    return param._fsdp_orig_uid  # type: ignore[attr-defined]


orig_param_uid: Callable[[nn.Parameter], int] = getattr(_param, "_get_orig_param_uid", _get_uid)
"""Returns the unique number stored on a parameter object. Tied parameters have equal numbers."""
