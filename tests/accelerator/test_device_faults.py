"""Recovery from a failed call anywhere in a training step, on the simulated device."""

from __future__ import annotations

import device_sweep
import pytest
from device_sweep import SweepResult
from launch import run_ranks

pytestmark = pytest.mark.xdist_group("accelerator_faults")


@pytest.fixture(scope="module")
def sweeps() -> dict[str, SweepResult]:
    (results,) = run_ranks(device_sweep.run, 1, timeout=290)
    return results


@pytest.mark.parametrize("place", device_sweep.PLACES)
@pytest.mark.parametrize("variant", device_sweep.VARIANTS)
def test_step_after_failed_call_matches_clean_run_without_races(
    sweeps: dict[str, SweepResult], variant: str, place: str
) -> None:
    sweep = sweeps[f"{variant}, {place}"]
    assert sweep.errors == []
    assert sweep.failed_calls >= 6
