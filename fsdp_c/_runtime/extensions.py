"""All-gather extensions: methods of a tensor subclass that customize its all-gather.

``fsdp_pre_all_gather`` returns the tensors to gather. ``fsdp_post_all_gather`` makes the unsharded
parameter from the gathered tensors. torch's code calls both methods and validates their results.
The C core calls this module, and owns memory, packing and the collective.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam, free_storage

import fsdp_c._C as _C

_RELEASES_OUTPUTS = "fsdp_should_release_all_gather_outputs_after_post_all_gather"
"""The name of an optional method of tensor subclasses with ``fsdp_post_all_gather``."""

Result = TypeVar("Result")


def leave_inference_mode(function: Callable[..., Result]) -> Callable[..., Result]:
    """Decorator that leaves inference mode, because training may use tensors of the function."""

    @functools.wraps(function)
    def call_outside(*args: Any) -> Result:
        if not torch.is_inference_mode_enabled():
            return function(*args)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args)

    return call_outside


def has_extensions(param: FSDPParam) -> bool:
    """Whether the shard has all-gather extensions."""
    return hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather")


def _make_readable(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns ``tensor`` or a copy that is contiguous on ``device``, without lazy conj or neg."""
    if not _C.has_memory(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor)
    if tensor.device.type != device.type:
        tensor = tensor.to(device)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous()


@leave_inference_mode
@torch.no_grad()
def prepare_inputs(param: FSDPParam) -> list[torch.Tensor]:
    """Returns the 1-D tensors that this rank sends, made on the current stream."""
    return [_make_readable(tensor, param.device) for tensor in param.all_gather_inputs]


def _check_outputs(param: FSDPParam) -> None:
    """Raises torch's error if gathered outputs cannot be concatenated on a dim other than 0."""
    info, size = param.mesh_info, list(param.padded_sharded_param_size)
    size[0] *= info.shard_mesh_size if isinstance(info, FSDPMeshInfo) else 1
    for output in param.all_gather_outputs:
        output.view(size)


@leave_inference_mode
def make_unsharded(param: FSDPParam) -> None:
    """Makes or updates the unsharded parameter from the gathered tensors."""
    if param.fsdp_placement.dim != 0:
        _check_outputs(param)
    param.init_unsharded_param()


def release_outputs(param: FSDPParam, reshards_to_smaller_mesh: bool) -> None:
    """Frees the gathered tensors if the extension allows it (torch 2.15).

    Keeps the tensors if the group reshards to a smaller mesh, because they contain its shards.
    """
    may_release = getattr(param._sharded_local_tensor, _RELEASES_OUTPUTS, None)
    if may_release is not None and not reshards_to_smaller_mesh and may_release():
        for tensor in param.all_gather_outputs:
            free_storage(tensor)
