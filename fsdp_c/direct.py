"""The process groups that the extension moves rows with (csrc/torch/direct.cpp), where torch's own
functions move them in its place.

Which way rows take is agreed upon by all ranks. So a rank whose data torch's functions move, say
because somebody has patched one of them there and nowhere else, has to take that way, too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
import torch.distributed.fsdp._fully_shard._fsdp_param_group as stock

import fsdp_c._C as _C

_DEFAULTS = (stock.DefaultAllGather, stock.DefaultReduceScatter)


@contextlib.contextmanager
def mover(group: Any, device: torch.device, comm: Any) -> Iterator[Any]:
    """Gives the group that moves the rows of ``group``: ``group`` itself, or one that
    ``torch.distributed`` knows, as long as this lasts, by all that it knows of ``group``.

    ``comm`` is what calls the collective: an object of the user's has its own way on all ranks.
    """
    direct = None
    if device.type == "cpu" and isinstance(group, dist.ProcessGroup) and type(comm) in _DEFAULTS:
        direct = _C.direct_group(group)
    if direct is None:
        yield group
        return
    world = c10d._world
    tables: tuple[dict[Any, Any], ...] = (
        world.pg_map,
        world.pg_names,
        world.pg_group_ranks,
        world.pg_backend_config,
        world.pg_to_tag,
    )
    known = [table for table in tables if group in table]
    for table in known:
        table[direct] = table[group]
    try:
        yield direct
    finally:
        for table in known:
            table.pop(direct, None)
