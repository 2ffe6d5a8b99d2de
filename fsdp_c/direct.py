"""Shared memory (csrc/torch/direct.cpp) for collectives that torch's own functions issue.

Which way rows take is agreed upon by all ranks. So a rank whose data torch's functions move, say
because somebody has patched one of them there and nowhere else, has to take that way, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param_group as stock

import fsdp_c._C as _C

_GATHERS = (stock.DefaultAllGather, stock.ProcessGroupAllocAllGather)
_GATHER, _REDUCE, _ALL_REDUCE = range(3)
_DEFAULTS = (*_GATHERS, stock.DefaultReduceScatter, stock.ProcessGroupAllocReduceScatter)


@contextlib.contextmanager
def _entered(group: Any, device: torch.device, comm: Any, use: int) -> Iterator[None]:
    may = device.type == "cpu" and isinstance(group, dist.ProcessGroup) and type(comm) in _DEFAULTS
    entered = _C.enter_direct(group, use) if may else None
    try:
        yield
    finally:
        _C.leave_direct(entered)


def direct(group: Any, device: torch.device, comm: Any) -> contextlib.AbstractContextManager[None]:
    """Inside, ``group`` moves rows on the CPU as the ranks agreed, whoever calls its collectives.

    ``comm`` is what calls them: an object of the user's has its own way on all ranks.
    """
    return _entered(group, device, comm, _GATHER if type(comm) in _GATHERS else _REDUCE)


def all_reduced_directly(
    group: Any, device: torch.device, comm: Any
) -> contextlib.AbstractContextManager[None]:
    """The same of replicas, whose ``group`` (``None``: there are none) all-reduces a row inside."""
    return _entered(group, device, comm, _ALL_REDUCE)


@contextlib.contextmanager
def by_the_user() -> Iterator[None]:
    """Inside that, what is all-reduced is no row."""
    before = _C.all_reduces_rows(False)
    try:
        yield
    finally:
        _C.all_reduces_rows(before)
