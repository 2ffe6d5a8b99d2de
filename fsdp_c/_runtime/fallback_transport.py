"""Shared-memory transport (csrc/transport) for collectives that torch's functions issue.

All ranks of a process group use the same transport. A rank on which torch's functions move the
data, for example because of a patch on that rank only, must use this transport, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param_group as torch_group

import fsdp_c._C as _C

from . import label_comparison

_GATHERS = (torch_group.DefaultAllGather, torch_group.ProcessGroupAllocAllGather)
_GATHER, _REDUCE, _ALL_REDUCE = range(3)
_TORCH_COMMS = (
    *_GATHERS,
    torch_group.DefaultReduceScatter,
    torch_group.ProcessGroupAllocReduceScatter,
)


@contextlib.contextmanager
def _enter_transport(
    group: Any, device: torch.device, comm: Any, operation: int, nbytes: int
) -> Iterator[None]:
    can_enter = (
        device.type == "cpu" and isinstance(group, dist.ProcessGroup) and type(comm) in _TORCH_COMMS
    )
    entered = _C.enter_shm(group, operation, nbytes) if can_enter else None
    if device.type != "cpu" and isinstance(group, dist.ProcessGroup):
        label_comparison.remove(group)
    try:
        yield
    finally:
        _C.leave_shm(entered)


def use_transport(
    group: Any, device: torch.device, comm: Any, nbytes: int
) -> contextlib.AbstractContextManager[None]:
    """Context in which collectives of ``group`` on the CPU use the negotiated transport.

    ``comm`` is the object that calls the collectives. The context has no effect on a custom object,
    which chooses its own transport. ``nbytes``: size of this rank's input, 0: unknown.
    """
    operation = _GATHER if type(comm) in _GATHERS else _REDUCE
    return _enter_transport(group, device, comm, operation, nbytes)


def use_all_reduce_transport(
    group: Any, device: torch.device, comm: Any, nbytes: int
) -> contextlib.AbstractContextManager[None]:
    """Context in which all-reduces of the replicate ``group`` use the negotiated transport.

    ``group`` is ``None`` if there are no replicas. ``nbytes``: size of the reduced tensor.
    """
    return _enter_transport(group, device, comm, _ALL_REDUCE, nbytes)


@contextlib.contextmanager
def exclude_user_collectives() -> Iterator[None]:
    """Context for user hooks: their all-reduces do not count as gradient all-reduces."""
    previous = _C.set_gradient_all_reduce(False)
    try:
        yield
    finally:
        _C.set_gradient_all_reduce(previous)
