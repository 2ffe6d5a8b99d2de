"""Replacements for parts of FSDP2 that torch 2.11 lacks and newer releases have.

``torch215_methods.py`` and ``mixed_precision.py`` hold the parts that torch 2.15 added. The module detects
a release by the names that torch defines or by the code of its modules (``originals.py``). It does
not read attributes of functions, because libraries replace functions before fsdp_c is imported.
Everything here runs at import or during init. torch's own version is used if it exists.

- Functions and types: torch's under one name, or a replacement.
- :class:`ParamOfOlderTorch`, :class:`GroupOfOlderTorch`, :class:`StateOfOlderTorch`: the last bases
  of fsdp_c's classes. torch's classes precede them in the method resolution order, so they have no
  effect on a recent torch.
- :func:`add_missing_methods`: adds the methods that ``FSDPModule`` lacks.

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
import torch.distributed.fsdp._fully_shard._fsdp_state as _state
import torch.nn as nn
import torch.utils._pytree as pytree
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DataParallelMeshInfo,
    DDPMeshInfo,
    FSDPMeshInfo,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from .._runtime.fsdp_units import list_sharded_modules
from . import patches
from .originals import has_parameter

HAS_MESH_FOR_EACH_PARAM = hasattr(_common, "ShardPlacementResult")
"""Whether ``shard_placement_fn`` may return a mesh. If not, a state has one group."""

HAS_NAMED_MESH_DIMS = hasattr(_common.DataParallelMeshInfo, "is_spmd_mesh")
"""Whether ``fully_shard`` supports ``dp_mesh_dims``."""


def _raise_unsupported(feature: str, since: str) -> NoReturn:
    raise NotImplementedError(
        f"{feature} needs torch {since} or newer; this is torch {torch.__version__}"
    )


# ---- tensors in arguments and outputs ------------------------------------------------------------


def _is_unregistered_dataclass(node: Any) -> bool:
    """Whether ``node`` is a dataclass object whose class is not registered with pytree."""
    is_object = dataclasses.is_dataclass(node) and not isinstance(node, type)
    return is_object and type(node) not in pytree.SUPPORTED_NODES


def _collect_grad_tensors(tree: Any) -> tuple[torch.Tensor, ...]:
    tensors: list[torch.Tensor] = []
    for leaf in pytree.tree_leaves(tree, is_leaf=_is_unregistered_dataclass):
        if _is_unregistered_dataclass(leaf):
            for field in dataclasses.fields(leaf):
                tensors += _collect_grad_tensors(getattr(leaf, field.name))
        elif isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            tensors.append(leaf)
    return tuple(tensors)


def _replace_grad_tensors(tree: Any, new: Iterator[torch.Tensor]) -> Any:
    def visit(leaf: Any) -> Any:
        if _is_unregistered_dataclass(leaf):
            values = {f.name: getattr(leaf, f.name) for f in dataclasses.fields(leaf)}
            changes = {
                name: _replace_grad_tensors(value, new)
                for name, value in values.items()
                if _collect_grad_tensors(value)
            }
            return dataclasses.replace(leaf, **changes) if changes else leaf
        return next(new) if isinstance(leaf, torch.Tensor) and leaf.requires_grad else leaf

    return pytree.tree_map(visit, tree, is_leaf=_is_unregistered_dataclass)


collect_grad_tensors: Callable[[Any], tuple[torch.Tensor, ...]] = getattr(
    _utils, "collect_grad_tensors", _collect_grad_tensors
)
"""Returns the tensors that require grad in nested containers and dataclasses, in order."""

replace_grad_tensors: Callable[[Any, Iterator[torch.Tensor]], Any] = getattr(
    _utils, "replace_grad_tensors", _replace_grad_tensors
)
"""Returns the structure with each tensor that requires grad replaced by an iterator's next one."""


dtensor_new: Callable[..., DTensor] = getattr(torch.Tensor, "_dtensor__new__", None) or DTensor
"""Makes a DTensor from a local tensor, a spec and ``requires_grad=``."""


# ---- collectives ---------------------------------------------------------------------------------

ALL_GATHER = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
REDUCE_SCATTER = (
    "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
)
"""The names of the ``torch.distributed`` functions that FSDP2's own collectives call."""


def make_orig_dtype_argument(dtype: torch.dtype | None) -> Any:
    """The argument ``orig_dtype`` of torch's ``foreach_reduce``, as a tuple of arguments.

    Empty from torch 2.15 on, where ``sharded_grad_dtype`` of each parameter replaces it."""
    return (dtype,) if _HAS_ORIG_DTYPE_ARGUMENT else ()


def _has_orig_dtype_argument() -> bool:
    """Whether torch's ``foreach_reduce`` takes ``orig_dtype``.

    Reads torch's source: development versions of 2.15 differ, and a wrapper hides the argument.
    """
    takes = has_parameter(_collectives, "foreach_reduce", "orig_dtype")
    return not hasattr(_param.FSDPParam, "unsharded_grad_dtype") if takes is None else takes


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
        _raise_unsupported(f"{caller}(dp_mesh_dims=...)", "2.12")
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
"""Returns the unique number stored on a parameter object. Equal numbers reveal tied parameters."""


class ParamOfOlderTorch:
    """Members of ``FSDPParam`` that depend on the release.

    They describe the sharded and unsharded DTensors, were removed by torch 2.15, or are set by
    torch's constructor, which ``Param`` does not call.
    """

    is_spmd_types = False
    keep_unsharded_storage = False  # the group owns this setting
    sharded_grad_dtype: torch.dtype | None
    _has_sharded_grad_dtype_override = False
    _release_all_gather_outputs_after_post_all_gather = False  # Param does it: _release_outputs()

    mesh_info: Any
    reduce_dtype: torch.dtype | None
    unsharded_accumulated_grad: torch.Tensor | None
    _unsharded_param: nn.Parameter
    _unsharded_dtensor_spec: DTensorSpec | None

    @property
    def _sharding_spec_by_dtype(self) -> dict[torch.dtype, DTensorSpec]:
        """torch's cache of specs. It is always empty, because the core makes the gradients."""
        return {}

    @_sharding_spec_by_dtype.setter
    def _sharding_spec_by_dtype(self, value: dict[torch.dtype, DTensorSpec]) -> None:
        """Does nothing: torch's constructor assigns it."""

    @property
    def unsharded_accumulated_grad_data(self) -> torch.Tensor:
        """The local tensor of the accumulated gradient, in the reduce dtype."""
        grad = self.unsharded_accumulated_grad
        if grad is None:
            raise AssertionError("Expects unsharded_accumulated_grad to not be None")
        return self._get_grad_inner_tensor(grad)  # type: ignore[attr-defined]

    def to_accumulated_grad_if_needed(self) -> None:
        """Moves the gradient to the accumulated one, in the reduce dtype.

        The core calls it if a gradient method is patched.
        """
        param, dtype = self._unsharded_param, self.reduce_dtype
        grad = param.grad
        if grad is not None and dtype is not None and grad.dtype != dtype:
            param.grad = None
            self.unsharded_accumulated_grad = grad.to(dtype)

    def accumulate_unsharded_grad_if_needed(self) -> None:
        """Adds the gradient to the accumulated one, if both exist, and clears it."""
        param, accumulated = self._unsharded_param, self.unsharded_accumulated_grad
        if accumulated is not None and param.grad is not None:
            accumulated += param.grad
            param.grad = None

    def _init_shard_mesh(self) -> DeviceMesh:
        return self.shard_mesh  # type: ignore[attr-defined]

    def _init_sharding_spec(self, param: nn.Parameter, placement: Shard, dim: int) -> torch.Tensor:
        """Sets the sharding spec; returns the local tensor to shard."""
        mesh = self.mesh_info.mesh
        placements: list[Placement] = []
        if isinstance(self.mesh_info, DDPMeshInfo):
            placements.append(Replicate())
        if isinstance(self.mesh_info, FSDPMeshInfo):
            placements.append(placement)
        local: torch.Tensor = param
        meta: TensorMeta | None = TensorMeta(param.size(), param.stride(), param.dtype)
        self._unsharded_dtensor_spec = None
        if isinstance(param, DTensor):
            spec = param._spec
            if len(spec.placements) > 2:
                raise NotImplementedError(
                    f"FSDP only supports 1D TP/EP or 2D EP+TP, not {spec.placements}"
                )
            split = spec.num_shards_map[dim]
            if isinstance(self.mesh_info, FSDPMeshInfo) and split > 1:
                placements[-1] = _StridedShard(dim, split_factor=split)
            mesh = DeviceMesh._concatenate([mesh, spec.mesh])
            placements += spec.placements
            local, meta = param._local_tensor, spec.tensor_meta
            self._unsharded_dtensor_spec = self._tp_spec = spec
        self._spmd_mesh, self._spmd_placements = mesh, tuple(placements)
        self._sharding_spec = DTensorSpec(mesh, self._spmd_placements, tensor_meta=meta)
        return local

    def _get_unsharded_dtensor_spec(self, unsharded: torch.Tensor) -> DTensorSpec:
        """Returns the spec of the original parameter, with the dtype of ``unsharded``."""
        spec = self._unsharded_dtensor_spec
        assert spec is not None and spec.tensor_meta is not None
        shape, stride, dtype = spec.tensor_meta
        if dtype == unsharded.dtype:
            return spec
        meta = TensorMeta(shape, stride, unsharded.dtype)
        return DTensorSpec(spec.mesh, spec.placements, tensor_meta=meta)


# ---- groups and states ---------------------------------------------------------------------------


class GroupOfOlderTorch:
    """Methods of ``FSDPParamGroup`` that older releases lack."""

    def _validate_reduce_scatter_max_input_buffers(self) -> None:
        """Accepts any number: only symmetric memory limits it, and older releases have none."""

    def _set_separate_reduce_scatter_group(self, enable: bool, new_groups: Any) -> None:
        _raise_unsupported("set_separate_reduce_scatter_group", "2.13")

    def set_symm_mem(self, backend: Any = "NCCL") -> None:
        """Raises ``NotImplementedError``: this torch lacks functions for symmetric memory."""
        _raise_unsupported("set_symm_mem_for_comm", "2.12")


class StateOfOlderTorch:
    """Members of ``FSDPState`` that older releases lack."""

    _state_name = "FSDP"
    _fsdp_param_groups: Any
    _state_ctx: Any

    @property
    def _fsdp_param_group(self) -> Any:
        groups = self._fsdp_param_groups
        assert len(groups) <= 1, "this torch supports one group per state"
        return groups[0] if groups else None

    def _get_state_for_module(self, module: nn.Module) -> Any:
        return _state._get_module_fsdp_state(module)

    def _validate_no_duplicate_params(self) -> None:
        seen = set()
        for state in self._state_ctx.all_states:
            for group in state._fsdp_param_groups:
                for param in group.fsdp_params:
                    if param._orig_param_uid in seen:
                        raise ValueError(
                            f"Parameter '{param._param_fqn}' is shared with a parameter already "
                            "managed by another FSDP group: put both modules into one, "
                            "fully_shard([module_a, module_b])"
                        )
                    seen.add(param._orig_param_uid)


def register_group_hooks(stock_state: Any, state: Any) -> Any:
    """Registers torch's forward hooks for the modules of ``state``; returns their handle."""
    arguments = [
        state._modules,
        state._pre_forward,
        state._post_forward,
        state._modules_to_run_forward,
    ]
    if hasattr(state, "_cast_output_dtype"):
        arguments.append(state._cast_output_dtype)
    return stock_state._register_group_forward_hooks(*arguments)


# ---- modules -------------------------------------------------------------------------------------


def _iterate_groups(module: Any, recurse: bool) -> Iterator[Any]:
    for sharded in list_sharded_modules(module) if recurse else [module]:
        yield from sharded._get_fsdp_state()._fsdp_param_groups


def _reset_iter_state(self: Any) -> None:
    """Resets the iteration after an exception in forward or backward. Call it on the root."""
    self._get_fsdp_state()._reset_iter_state()


def _set_reduce_scatter_unused_params(
    self: Any, reduce_scatter_unused_params: bool, *, recurse: bool = True
) -> None:
    """Sets whether parameters without gradient are reduced as zeros."""
    for group in _iterate_groups(self, recurse):
        group.reduce_scatter_unused_params = reduce_scatter_unused_params


def _set_reduce_scatter_max_input_buffers(
    self: Any, max_input_buffers: int, *, recurse: bool = True
) -> None:
    """Sets how many reduce-scatter inputs may be alive at once.

    Raises:
        TypeError: ``max_input_buffers`` is not an int.
        ValueError: ``max_input_buffers`` is less than 1.
    """
    if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
        raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
    if max_input_buffers < 1:
        raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
    for group in _iterate_groups(self, recurse):
        group.reduce_scatter_max_input_buffers = max_input_buffers


def _set_separate_reduce_scatter_group(
    self: Any, enable: bool = True, *, recurse: bool = True
) -> None:
    """Raises ``NotImplementedError``: this torch has no separate reduce-scatter group."""
    _raise_unsupported("set_separate_reduce_scatter_group", "2.13")


def _set_symm_mem_for_comm(self: Any, backend: str = "NCCL") -> None:
    """Calls ``set_symm_mem`` of each group, which raises on this torch."""
    for group in _iterate_groups(self, recurse=False):
        group.set_symm_mem(backend)


_NEWER_METHODS = {
    "reset_iter_state": _reset_iter_state,
    "set_reduce_scatter_unused_params": _set_reduce_scatter_unused_params,
    "set_reduce_scatter_max_input_buffers": _set_reduce_scatter_max_input_buffers,
    "set_separate_reduce_scatter_group": _set_separate_reduce_scatter_group,
    "set_symm_mem_for_comm": _set_symm_mem_for_comm,
}


def add_missing_methods(cls: type, latest: dict[str, Callable[..., Any]]) -> None:
    """Adds methods to a module's new class, ``FSDP<Name>``.

    These are the methods that this torch's mixin lacks, and the ``latest`` release's methods.
    """
    for name, method in {**_NEWER_METHODS, **latest}.items():
        if name not in vars(cls) and (name in latest or not hasattr(FSDPModule, name)):
            patches.set_class_attribute(cls, name, method)
