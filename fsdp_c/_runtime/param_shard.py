"""``ParamShard``: makes this rank's shard of a parameter, with its padding and DTensor."""

from __future__ import annotations

from dataclasses import replace
from enum import Enum
from types import NoneType
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch.distributed.fsdp._fully_shard._fsdp_common import DataParallelMeshInfo, FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

import fsdp_c._C as _C

from .._compat.guard import is_patched
from .._compat.missing_members import MissingParamMembers
from .._compat.torch_releases import dtensor_new
from .dtensor_specs import get_contiguous_strides, get_shared_spec, make_parameter, make_placements
from .mixed_precision import REDUCES_IN_PARAM_DTYPE, has_grad_dtype
from .typed_params import IS_AVAILABLE, pause_type_check


def _check_size(tensor: torch.Tensor, expected: torch.Size) -> None:
    if tensor.shape != expected:
        raise AssertionError(f"Expects size {expected} but got {tensor.shape}")


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Whether ``tensor`` is a wrapper subclass without own storage."""
    return type(tensor) is not torch.Tensor and (
        is_traceable_wrapper_subclass(tensor) or not _C.has_memory(tensor)
    )


_PLAIN_TYPES = (NoneType, bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)


def _is_plain(value: Any) -> bool:
    """Whether ``value`` is data that refers to no tensor, module or other object."""
    try:
        if isinstance(value, dict):
            return all(map(_is_plain, (*value, *value.values())))
        if isinstance(value, (list, tuple, set, frozenset)):
            return all(map(_is_plain, value))
    except RecursionError:  # the container contains itself
        return False
    return isinstance(value, _PLAIN_TYPES)


def _refers_to_module(value: Any) -> bool:
    return isinstance(value, nn.Module) or isinstance(getattr(value, "__self__", None), nn.Module)


def copy_user_attributes(param: nn.Parameter) -> dict[str, Any]:
    """Returns the attributes of a parameter object that fsdp_c's parameter objects get.

    A plain parameter passes on only plain data: other attributes would keep memory allocated, or
    prevent the copy of an optimizer. A tensor subclass passes on all attributes except its inner
    tensors, because its methods may need them. No parameter passes on the uid that it has from an
    earlier ``fully_shard`` call, because the uid marks originals.
    """
    attributes = {name: value for name, value in vars(param).items() if name != "_fsdp_orig_uid"}
    if type(param) in (nn.Parameter, DTensor):
        return {name: value for name, value in attributes.items() if _is_plain(value)}
    has_inner_tensors = not isinstance(param, DTensor) and is_wrapper(param)
    return {
        name: value
        for name, value in attributes.items()
        if not (has_inner_tensors and isinstance(value, torch.Tensor))
    }


def _replace_size(size: torch.Size, dim: int, rows: int) -> torch.Size:
    return torch.Size((*size[:dim], rows, *size[dim + 1 :]))


def _resolve_shard_dim(placement: Shard | None, param: torch.Tensor, local: torch.Tensor) -> int:
    if placement is None:
        return 0
    dim = placement.dim + (param.ndim if placement.dim < 0 else 0)
    if not 0 <= dim < local.ndim:
        raise AssertionError(f"Shard dim {dim} is invalid for {local.ndim}D tensor: {param.shape}")
    return dim


class SmallerMesh(NamedTuple):
    """The ranks to which parameters are resharded after forward."""

    size: int
    rank: int


class ParamShard(_C.Param, FSDPParam, MissingParamMembers):
    """The part of ``Param`` that shards the original parameter and wraps shards in DTensors."""

    mesh_info: Any  # one of torch's classes of mesh infos
    _unsharded_dtensor_spec: DTensorSpec | None
    _orig_attributes: dict[str, Any]
    _orig_class: type

    # Properties of torch's class since 2.15.
    unsharded_grad_dtype: torch.dtype | None
    may_reduce_grad_outside_dp: bool

    @property
    def unsharded_accumulated_grad(self) -> torch.Tensor | None:
        """The gradient of backwards without reduction. torch 2.15 keeps it in ``.grad``."""
        if self._accumulated is not None or not REDUCES_IN_PARAM_DTYPE:
            return self._accumulated
        unsharded = getattr(self, "_unsharded_param", None)
        return None if unsharded is None else unsharded.grad

    @unsharded_accumulated_grad.setter
    def unsharded_accumulated_grad(self, value: torch.Tensor | None) -> None:
        self._accumulated = value

    def _init_layout(
        self,
        param: nn.Parameter,
        placement: Shard | None,
        mesh_info: DataParallelMeshInfo,
        smaller_mesh: SmallerMesh | None,
    ) -> int:
        """Initializes the base class with the sizes of the shards. Returns the sharded dimension.

        Raises:
            AssertionError: The parameter does not have the dimension of ``placement``.
            NotImplementedError: As in torch, the parameter cannot be sharded in this way.
        """
        local = param._local_tensor if isinstance(param, DTensor) else param
        dim = _resolve_shard_dim(placement, param, local)
        if isinstance(mesh_info, FSDPMeshInfo):
            world, rank = mesh_info.shard_mesh_size, mesh_info.shard_mesh_rank
        else:
            world, rank = 1, 0
        if dim > 0 and local.size(dim) % world != 0:
            raise NotImplementedError(
                f"FSDP does not support uneven sharding on dim {dim}: "
                f"{local.size()} (world size: {world})"
            )
        if smaller_mesh is not None and isinstance(param, DTensor):
            raise NotImplementedError(
                "Resharding to smaller mesh is not supported for DTensor parameters yet"
            )
        _C.Param.__init__(self, tuple(local.size()), dim, world, rank, smaller_mesh)
        return dim

    @torch.no_grad()
    def _shard(self, param: nn.Parameter) -> None:
        dim = self.fsdp_placement.dim
        data = self._init_sharding_spec(param, self.fsdp_placement, dim).detach()
        self._orig_size = data.size()
        self._contiguous_orig_stride = get_contiguous_strides(data.size())
        self.padded_sharded_param_size = _replace_size(data.size(), dim, self.chunk_rows)
        self.sharded_size = _replace_size(data.size(), dim, self.local_rows)
        self.contiguous_sharded_stride = get_contiguous_strides(self.sharded_size)
        padded = self._pad(self._get_local_shard(data, dim))
        if self.offload_to_cpu and not padded.is_meta:
            padded = padded.cpu()
            padded = padded.pin_memory() if self.pin_memory else padded
        local = padded.narrow(dim, 0, self.local_rows).detach()  # detach() returns no view
        self.sharded_param = make_parameter(
            self.to_sharded_dtensor(local), local, param.requires_grad
        )
        self._copy_attributes(self.sharded_param)
        self._read_grad_dtype(param)
        if self._has_sharded_grad_dtype_override:
            self.sharded_param.grad_dtype = self.sharded_grad_dtype
        self._adopted_tensor = self.sharded_param._local_tensor
        self._sharded_param_data = padded.view(-1)
        self._note_shard()

    def _init_post_forward_size(self, smaller_mesh: SmallerMesh | None) -> None:
        """Sets the size of the shard between forward and backward.

        ``smaller_mesh``: None if the shard stays that of ``mesh_info``.
        """
        self.sharded_post_forward_size = self.sharded_size
        if smaller_mesh is not None:
            rows = -(-self._orig_size[0] // smaller_mesh.size)
            start = min(smaller_mesh.rank * rows, self._orig_size[0])
            own_rows = min(rows, self._orig_size[0] - start)
            self.sharded_post_forward_size = torch.Size((own_rows, *self._orig_size[1:]))
        self.contiguous_sharded_post_forward_stride = get_contiguous_strides(
            self.sharded_post_forward_size
        )

    def _read_grad_dtype(self, param: nn.Parameter) -> None:
        """Records ``param.grad_dtype`` if the user has set it (torch 2.15).

        A parameter that replaces another one has no ``grad_dtype``. The record then stays.
        """
        if has_grad_dtype(param):
            self._has_sharded_grad_dtype_override = True
            self.sharded_grad_dtype = param.grad_dtype

    def _init_grad_dtype(self) -> None:
        """Sets the unsharded parameter's ``grad_dtype``, which torch has used since 2.15.

        Backwards without reduction accumulate gradients in it. If it is wider than the compute
        dtype, other backwards leave gradients in the compute dtype, and the reduction casts them.
        Gradients that DTensor may reduce over further mesh dimensions are always cast first.
        """
        dtype = self.unsharded_grad_dtype
        compute_dtype = self.param_dtype or self.orig_dtype
        self._grad_dtype = dtype
        self._defers_cast = (
            dtype is not None
            and dtype.is_floating_point
            and compute_dtype.is_floating_point
            and dtype.itemsize > compute_dtype.itemsize
            and not self.may_reduce_grad_outside_dp
        )
        unsharded = getattr(self, "_unsharded_param", None)
        if unsharded is not None and unsharded.grad_dtype != dtype:
            unsharded.grad_dtype = dtype

    def _init_sharding_spec_plain(self, param: nn.Parameter, fsdp_placement: Shard) -> torch.Tensor:
        """Sets the sharding spec, which equal plain parameters share; returns ``param``."""
        if is_patched("_init_sharding_spec_plain"):
            return super()._init_sharding_spec_plain(param, fsdp_placement)
        self._spmd_mesh = self.mesh_info.mesh
        self._spmd_placements = make_placements(self.mesh_info, fsdp_placement)
        self._sharding_spec = get_shared_spec(self._spmd_mesh, self._spmd_placements, param)
        return param

    def _copy_attributes(self, to: nn.Parameter) -> None:
        """Copies attributes of the original parameter object to a sharded or unsharded parameter.

        A sharded parameter gets plain data, so that it can be copied and pickled as under torch. An
        unsharded parameter gets no attribute that refers to a module, because the garbage collector
        does not traverse the core's reference to this parameter. No attribute hides one that
        ``DTensor`` defines, such as ``placements``.
        """
        is_sharded = to is self.sharded_param
        for name, value in self._orig_attributes.items():
            if hasattr(type(to), name) and not hasattr(self._orig_class, name):
                continue
            if _is_plain(value) or not (is_sharded or _refers_to_module(value)):
                to.__dict__.setdefault(name, value)

    @property
    def _shard_rank(self) -> int:
        info = self.mesh_info
        return info.shard_mesh_rank if isinstance(info, FSDPMeshInfo) else 0

    def _get_local_shard(self, data: torch.Tensor, dim: int) -> torch.Tensor:
        """Returns this rank's shard of ``data`` without padding; a view of a plain tensor."""
        start = self._shard_rank * self.chunk_rows
        if type(data) is torch.Tensor or start >= self.rows:
            return data.narrow(dim, min(start, self.rows), self.local_rows)
        # Some subclasses (NF4Tensor) implement torch.chunk, which FSDP2 calls, but not narrow.
        info = self.mesh_info
        world = info.shard_mesh_size if isinstance(info, FSDPMeshInfo) else 1
        return torch.chunk(data, world, dim)[self._shard_rank]

    def _pad(self, shard: torch.Tensor) -> torch.Tensor:
        """Returns a new tensor of ``padded_sharded_param_size``: the shard, then zeros."""
        padded = shard.new_zeros(self.padded_sharded_param_size)
        if shard.numel() > 0:
            dim = self.fsdp_placement.dim
            padded.narrow(dim, 0, shard.size(dim)).copy_(shard)
        return padded

    if IS_AVAILABLE:

        def _get_grad_inner_tensor(self, grad: torch.Tensor) -> torch.Tensor:
            """Calls torch's method, whose operations the package ``spmd_types`` must not check."""
            with pause_type_check():
                return super()._get_grad_inner_tensor(grad)

    @property
    def _sharded_local_tensor(self) -> torch.Tensor:
        return self.sharded_param._local_tensor

    # The next two methods raise on errors. torch's versions also print the error and the stack on
    # every rank.

    def to_sharded_dtensor(self, tensor: torch.Tensor) -> DTensor:
        """Wraps ``tensor`` (``sharded_size``). ``DTensor.__init__`` would import dynamo."""
        _check_size(tensor, self.sharded_size)
        spec = self._sharding_spec
        if spec.tensor_meta is not None and spec.tensor_meta.dtype != tensor.dtype:
            spec = replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=tensor.dtype))
        return dtensor_new(DTensor, tensor, spec, requires_grad=tensor.requires_grad)

    def to_sharded_post_forward_dtensor(self, tensor: torch.Tensor) -> DTensor:
        """Returns ``tensor``, the shard on the smaller mesh after forward, as a DTensor."""
        _check_size(tensor, self.sharded_post_forward_size)
        return super().to_sharded_post_forward_dtensor(tensor)
