"""Everyday conveniences on real ranks: clipping, full parameters, loading, averages, generation."""

from __future__ import annotations

import conveniences
import pytest
from launch import run_ranks


@pytest.mark.parametrize("world", [2, 4])
def test_clipping_gives_torchs_totals_and_gradients_in_one_collective(world: int) -> None:
    run_ranks(conveniences.clip, world)
