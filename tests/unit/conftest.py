"""Fixtures for tests in one process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from fake_world import fake_world
from hypothesis import settings

# The default limit of 200 ms for an example fails on a busy machine and under the sanitizers.
settings.register_profile("fsdp_c", deadline=None)
settings.load_profile("fsdp_c")


@pytest.fixture(autouse=True)
def seed_random_numbers() -> None:
    """Seeds torch, so that the random numbers of a test do not depend on earlier tests."""
    torch.manual_seed(0)


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
