"""Random models with tied weights and blocks that run twice; see workers/shared_models.py."""

from __future__ import annotations

import pytest
import shared_models
from launch import run_ranks


@pytest.mark.torch("2.13")
@pytest.mark.parametrize(("world", "count"), [(2, 16), (4, 8)])
def test_random_models_with_shared_parts_match_torch(world: int, count: int) -> None:
    seeds = list(range(100 * world, 100 * world + count))
    for trained, found in run_ranks(shared_models.compare_models, world, (seeds,), timeout=250):
        assert not found
        assert trained >= count // 2
