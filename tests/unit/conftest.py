"""Fixtures for tests in one process. torch's fake process group transfers no data."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from hypothesis import settings
from torch.testing._internal.distributed.fake_pg import FakeStore

# The default limit of 200 ms for an example fails on a busy machine and under the sanitizers.
settings.register_profile("fsdp_c", deadline=None)
settings.load_profile("fsdp_c")


@pytest.fixture(autouse=True)
def seed_random_numbers() -> None:
    """Seeds torch, so that the random numbers of a test do not depend on earlier tests."""
    torch.manual_seed(0)


@pytest.fixture
def fake_group() -> Iterator[int]:
    """Creates a default process group of 8 ranks, with this process as rank 0. Yields its size."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    try:
        yield 8
    finally:
        dist.destroy_process_group()


@pytest.fixture
def single_group() -> Iterator[int]:
    """Creates a default process group of 1 rank. Yields its size."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        yield 1
    finally:
        dist.destroy_process_group()
