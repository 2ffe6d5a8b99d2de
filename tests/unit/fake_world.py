"""A default process group without other processes. torch's fake process group transfers no data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextlib.contextmanager
def fake_world(size: int, rank: int = 0) -> Iterator[int]:
    """Makes this process one rank of a fake default process group. Yields the size of the group.

    The block may destroy the group.
    """
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    # An equal mesh of an earlier test may be in the cache, with process groups that have ended.
    _clear_sharding_prop_cache()
    try:
        yield size
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
