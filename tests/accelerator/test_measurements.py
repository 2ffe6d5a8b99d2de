"""fsdp_c needs no more launches, events and memory per step than torch on the simulated device."""

from __future__ import annotations

import measurements
import pytest
from launch import run_ranks
from measurements import Measurements

pytestmark = pytest.mark.xdist_group("accelerator_measurements")

FSDP_C_RUNS = ("fsdp_c", "fsdp_c without kernels")


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, Measurements]]:
    """Returns measurements by variant and run."""
    (by_variant,) = run_ranks(measurements.run, 1, timeout=280)
    return by_variant


@pytest.mark.parametrize("run", FSDP_C_RUNS)
@pytest.mark.parametrize("variant", measurements.VARIANTS)
def test_launches_events_and_peak_memory_do_not_exceed_torch(
    measured: dict[str, dict[str, Measurements]], variant: str, run: str
) -> None:
    expected, actual = measured[variant]["torch"], measured[variant][run]
    assert actual.launches <= expected.launches
    assert actual.recorded_events <= expected.recorded_events
    assert actual.waited_events <= expected.waited_events
    assert actual.peak_kib <= expected.peak_kib


@pytest.mark.parametrize("run", FSDP_C_RUNS)
@pytest.mark.parametrize("variant", measurements.VARIANTS)
def test_buffers_allocated_by_process_group_equal_torch(
    measured: dict[str, dict[str, Measurements]], variant: str, run: str
) -> None:
    expected, actual = measured[variant]["torch"], measured[variant][run]
    assert actual.group_buffers == expected.group_buffers
    assert (actual.group_buffers > 0) == ("memory from group" in variant)


@pytest.mark.parametrize("run", FSDP_C_RUNS)
def test_buckets_lower_peak_memory_of_unit_with_six_blocks(
    measured: dict[str, dict[str, Measurements]], run: str
) -> None:
    """Without buckets, the unit's float32 reduce-scatter input exists beside all its bfloat16
    gradients. With one bucket per block, the peak is that of the backward before the reduction."""
    assert measured["one unit in buckets"][run].peak_kib < 0.9 * measured["one unit"][run].peak_kib
