"""``replicate`` on real ranks: buckets change when gradients are reduced, and nothing else."""

from __future__ import annotations

import functools

import pytest
import replicated
from launch import run_ranks

LATE = replicated.OF_TORCH_2_13
CASES = [
    pytest.param(world, one.__name__, marks=[pytest.mark.torch("2.13")] if one in LATE else [])
    for world, all in replicated.SCENARIOS.items()
    for one in all
]


@functools.cache
def outcomes(world: int) -> list[dict[str, str]]:
    """What went wrong on each rank, by scenario: one launch for all of them."""
    found: list[dict[str, str]] = run_ranks(replicated.outcomes, world, timeout=240)
    return found


@pytest.mark.parametrize(("world", "scenario"), CASES)
def test_replicate(world: int, scenario: str) -> None:
    assert [rank[scenario] for rank in outcomes(world)] == [""] * world
