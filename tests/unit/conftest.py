"""One process that believes it is rank 0 of 8: torch's fake process group moves nothing."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture(autouse=True)
def same_random_numbers() -> None:
    """A test draws what it draws alone, whichever tests ran before it in its process."""
    torch.manual_seed(0)


@pytest.fixture
def fake_group() -> Iterator[int]:
    """A default process group of 8 ranks for the length of one test; gives the world size."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        yield 8
    finally:
        dist.destroy_process_group()


@pytest.fixture
def single_group() -> Iterator[int]:
    """A default process group of 1 rank."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield 1
    finally:
        dist.destroy_process_group()
