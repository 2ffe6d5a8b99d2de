"""What sharded parameters are made of, quickly: strides, specs, wrappers."""

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
"""Specs in use. They keep their mesh, so that its address is not another one's meanwhile."""


@functools.lru_cache(4096)
def strides_of(size: torch.Size) -> tuple[int, ...]:
    """The strides of a contiguous tensor."""
    return tuple(make_contiguous_strides_for(size))


def placements_on(info: DataParallelMeshInfo, shard: Shard) -> tuple[Placement, ...]:
    """Where a plain parameter lies: replicated, sharded, or both, in the order of the mesh."""
    if isinstance(info, HSDPMeshInfo):
        return (Replicate(), shard)
    return (shard,) if isinstance(info, FSDPMeshInfo) else (Replicate(),)


def shared_spec(
    mesh: DeviceMesh, placements: tuple[Placement, ...], param: torch.Tensor
) -> DTensorSpec:
    """One spec for all parameters that are alike."""
    meta = TensorMeta(param.size(), param.stride(), param.dtype)
    key = (id(mesh), placements, *meta)
    spec = _specs.get(key)
    if spec is None:
        spec = _specs[key] = DTensorSpec(mesh, placements, tensor_meta=meta)
    return spec


def as_parameter(made: DTensor, local: torch.Tensor, requires_grad: bool) -> nn.Parameter:
    """``nn.Parameter(made)``; without another wrapper where it is a new one around ``local``."""
    is_new = type(made) is DTensor and made._local_tensor is local and not made.requires_grad
    if not is_new or type(local) is not torch.Tensor:
        return nn.Parameter(made, requires_grad=requires_grad)
    made.requires_grad_(requires_grad)
    made._is_param = True
    return made  # type: ignore[return-value]


def has_no_values(param: torch.Tensor) -> bool:
    """torch's ``is_fake``, which is slow to find out what is usual: a DTensor of a plain tensor."""
    local = param._local_tensor if type(param) is DTensor else None
    is_usual = (
        type(local) is torch.Tensor
        and not torch._is_functional_tensor(local)
        and not torch._C._functorch.is_functorch_wrapped_tensor(local)
    )
    return not is_usual and is_fake(param)
