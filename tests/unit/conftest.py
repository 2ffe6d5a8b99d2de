"""Fixtures for tests in one process. torch's fake process group transfers no data."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore

# The default limit of 200 ms for an example fails on a busy machine and under the sanitizers.
settings.register_profile("fsdp_c", deadline=None)
settings.load_profile("fsdp_c")


@pytest.fixture(autouse=True)
def seed_random_numbers() -> None:
    """Seeds torch, so that the random numbers of a test do not depend on earlier tests."""
    torch.manual_seed(0)


@contextlib.contextmanager
def fake_world(size: int) -> Iterator[int]:
    """Creates a default process group, with this process as rank 0. Yields its size."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=size)
    # An equal mesh of an earlier test may be in the cache, with process groups that have ended.
    _clear_sharding_prop_cache()
    try:
        yield size
    finally:
        dist.destroy_process_group()


@pytest.fixture
def fake_group() -> Iterator[int]:
    """Creates a default process group of 8 ranks. Yields its size."""
    with fake_world(8) as size:
        yield size


@pytest.fixture
def single_group() -> Iterator[int]:
    """Creates a default process group of 1 rank. Yields its size."""
    with fake_world(1) as size:
        yield size
