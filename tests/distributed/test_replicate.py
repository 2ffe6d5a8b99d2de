"""``replicate`` with several bucket sizes gives the results of torch's and of DDP."""

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
def tracebacks(world: int) -> list[dict[str, str]]:
    """Runs all scenarios in one launch. Returns, per rank, each scenario's traceback, or ""."""
    results: list[dict[str, str]] = run_ranks(replicated.outcomes, world, timeout=240)
    return results


@pytest.mark.parametrize(("world", "scenario"), CASES)
def test_replicate_scenario_passes_on_all_ranks(world: int, scenario: str) -> None:
    assert [rank[scenario] for rank in tracebacks(world)] == [""] * world
