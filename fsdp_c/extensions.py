"""All-gather extensions: hooks of a shard that take part in its gather (called by the core).

``fsdp_pre_all_gather`` gives what a rank sends, ``fsdp_post_all_gather`` makes the unsharded
parameter of what has come. Which arguments they take, what is noted between the two and what is
refused is torch's own code; memory, packing and the collective are the core's.
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
"""A method of tensor subclasses, beside ``fsdp_post_all_gather``."""

Result = TypeVar("Result")


def as_normal_tensors(function: Callable[..., Result]) -> Callable[..., Result]:
    """In inference mode the function runs outside it: training may use its tensors later."""

    @functools.wraps(function)
    def outside(*args: Any) -> Result:
        if not torch.is_inference_mode_enabled():
            return function(*args)
        with torch.inference_mode(False), torch.no_grad():
            return function(*args)

    return outside


def is_extended(param: FSDPParam) -> bool:
    """Whether the shard has hooks of its own."""
    return hasattr(param._sharded_local_tensor, "fsdp_pre_all_gather")


def _readable(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """``tensor``, or a copy of it, in memory of its own that lies on ``device`` as it is read."""
    if not _C.has_memory(tensor):
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=device).copy_(tensor)
    if tensor.device.type != device.type:
        tensor = tensor.to(device)
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.contiguous()


@as_normal_tensors
@torch.no_grad()
def inputs_of(param: FSDPParam) -> list[torch.Tensor]:
    """What this rank sends: 1-D tensors, on the stream that is current."""
    return [_readable(tensor, param.device) for tensor in param.all_gather_inputs]


def _refuse_unfit_outputs(param: FSDPParam) -> None:
    """Raises where what is cut on another dim than 0 has other sizes than the parameter, as torch
    does when it puts the parts of all ranks side by side."""
    info, size = param.mesh_info, list(param.padded_sharded_param_size)
    size[0] *= info.shard_mesh_size if isinstance(info, FSDPMeshInfo) else 1
    for output in param.all_gather_outputs:
        output.view(size)


@as_normal_tensors
def make_unsharded(param: FSDPParam) -> None:
    """Has the unsharded parameter made, or written to, of what has come from all ranks."""
    if param.fsdp_placement.dim != 0:
        _refuse_unfit_outputs(param)
    param.init_unsharded_param()


def release_outputs(param: FSDPParam, resharded_smaller: bool) -> None:
    """Frees what was gathered, where the extension says that it has made something else of it
    (which torch asks for from release 2.15 on); not where shards are taken from it."""
    may_release = getattr(param._sharded_local_tensor, _RELEASES_OUTPUTS, None)
    if may_release is not None and not resharded_smaller and may_release():
        for tensor in param.all_gather_outputs:
            free_storage(tensor)
