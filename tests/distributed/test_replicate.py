"""``replicate`` on several ranks beside torch's, with all bucket sizes."""

from __future__ import annotations

import functools

import pytest
import replicated
from launch import run_ranks

pytestmark = pytest.mark.xdist_group("replicate")  # the tests share launches

SINCE_2_13 = replicated.SINCE_TORCH_2_13
CASES = [
    pytest.param(
        world,
        scenario.__name__,
        marks=[pytest.mark.torch("2.13")] if scenario in SINCE_2_13 else [],
    )
    for world, scenarios in replicated.SCENARIOS.items()
    for scenario in scenarios
]


@functools.cache
def outcomes(world: int) -> list[dict[str, str]]:
    """Runs all scenarios in one launch; returns each rank's tracebacks by scenario."""
    results: list[dict[str, str]] = run_ranks(replicated.outcomes, world, timeout=240)
    return results


@pytest.mark.parametrize(("world", "scenario"), CASES)
def test_replicate_scenario_passes_on_all_ranks(world: int, scenario: str) -> None:
    assert [rank[scenario] for rank in outcomes(world)] == [""] * world
