"""Fast construction of sharded parameters: cached strides and specs, and DTensor parameters."""

from __future__ import annotations

import functools
import weakref
from typing import Any

import torch
import torch.nn as nn
from torch._prims_common import make_contiguous_strides_for
from torch._subclasses.fake_tensor import is_fake
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import (
    DataParallelMeshInfo,
    FSDPMeshInfo,
    HSDPMeshInfo,
)
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

_specs: weakref.WeakValueDictionary[Any, DTensorSpec] = weakref.WeakValueDictionary()
"""Cache of DTensor specs in use. A spec keeps its mesh alive, whose ``id`` is part of the key."""


@functools.lru_cache(4096)
def get_contiguous_strides(size: torch.Size) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor of ``size``."""
    return tuple(make_contiguous_strides_for(size))


def make_placements(info: DataParallelMeshInfo, shard: Shard) -> tuple[Placement, ...]:
    """Returns the placements of a plain parameter, in the order of the mesh dimensions."""
    if isinstance(info, HSDPMeshInfo):
        return (Replicate(), shard)
    return (shard,) if isinstance(info, FSDPMeshInfo) else (Replicate(),)


def get_shared_spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], param: torch.Tensor
) -> DTensorSpec:
    """Returns one spec for all parameters with equal mesh, placements, shape, stride and dtype."""
    meta = TensorMeta(param.size(), param.stride(), param.dtype)
    key = (id(mesh), placements, *meta)
    spec = _specs.get(key)
    if spec is None:
        spec = _specs[key] = DTensorSpec(mesh, placements, tensor_meta=meta)
    return spec


def make_parameter(param: DTensor, local: torch.Tensor, requires_grad: bool) -> nn.Parameter:
    """Returns ``nn.Parameter(param)``. A new DTensor around ``local`` is converted in place."""
    is_new = type(param) is DTensor and param._local_tensor is local and not param.requires_grad
    if not is_new or type(local) is not torch.Tensor:
        return nn.Parameter(param, requires_grad=requires_grad)
    param.requires_grad_(requires_grad)
    param._is_param = True
    return param  # type: ignore[return-value]


def is_fake_param(param: torch.Tensor) -> bool:
    """Whether ``param`` is a fake tensor. DTensors of plain tensors skip the slower ``is_fake``."""
    local = param._local_tensor if type(param) is DTensor else None
    is_plain = (
        type(local) is torch.Tensor
        and not torch._is_functional_tensor(local)
        and not torch._C._functorch.is_functorch_wrapped_tensor(local)
    )
    return not is_plain and is_fake(param)
