"""After a failure anywhere in a step, streams and memory of the simulated device are in order."""

from __future__ import annotations

import device_sweep
import pytest
from device_sweep import Sweep
from launch import run_ranks

pytestmark = pytest.mark.xdist_group("accelerator_faults")


@pytest.fixture(scope="module")
def sweeps() -> dict[str, Sweep]:
    (found,) = run_ranks(device_sweep.run, 1, timeout=290)
    return found


@pytest.mark.parametrize("place", device_sweep.PLACES)
@pytest.mark.parametrize("variant", device_sweep.VARIANTS)
def test_a_step_that_failed_can_be_repeated_without_a_race(
    sweeps: dict[str, Sweep], variant: str, place: str
) -> None:
    swept = sweeps[f"{variant}, {place}"]
    assert swept.wrong == []
    assert swept.points >= 6
