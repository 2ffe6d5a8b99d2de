"""On the simulated accelerator stock and ours train to the same bits, and neither races."""

from __future__ import annotations

import pytest
import scenario_ranks
import scenarios
from launch import run_ranks
from scenario_ranks import Seen

pytestmark = pytest.mark.xdist_group("accelerator_scenarios")

Runs = dict[str, dict[str, Seen]]
OURS = ("fsdp_c", "fsdp_c without kernels")


@pytest.fixture(scope="module")
def runs() -> Runs:
    """The runs of each scenario by implementation."""
    (found,) = run_ranks(scenario_ranks.run, 1, timeout=280)
    return found


@pytest.mark.parametrize("name", scenarios.SCENARIOS)
def test_stock_trains_and_races_only_where_it_is_known_to(runs: Runs, name: str) -> None:
    seen = runs[name]["torch"]
    assert "Error: " not in str(seen.record[0]), f"stock cannot do this: {seen.record}"
    if name in scenarios.STOCK_RACES:
        assert scenarios.STOCK_RACES[name] in str(seen.findings), "torch has changed"
    else:
        assert seen.findings == []


@pytest.mark.parametrize("ours", OURS)
@pytest.mark.parametrize("name", scenarios.SCENARIOS)
def test_ours_trains_to_the_same_bits_without_a_race(runs: Runs, name: str, ours: str) -> None:
    seen = runs[name][ours]
    assert seen.record == runs[name]["torch"].record
    assert seen.findings == []


def test_stock_reduces_in_the_middle_of_a_double_backward() -> None:
    """Nodes that a device's thread has recorded come late there, behind the post-backward."""
    (found,) = run_ranks(scenario_ranks.run_double_backward, 1, timeout=120)
    assert found["fsdp_c"] == found["plain"]
    assert found["torch"][0] == found["plain"][0]
    assert found["torch"][1] != found["plain"][1]


def test_a_batch_that_raised_may_be_left_out() -> None:
    (found,) = run_ranks(scenario_ranks.run_batch_left_out, 1, timeout=120)
    assert found["fsdp_c"].record == found["with a reset"].record
    assert found["fsdp_c"].findings == found["with a reset"].findings == []
    assert found["torch"].record != found["fsdp_c"].record


def test_threads_train_on_devices_of_their_own() -> None:
    (found,) = run_ranks(scenario_ranks.run_on_threads, 1, timeout=120)
    for records in found.values():
        *trained, findings = records
        assert findings == []
        assert [record[0] for record in trained] == [f"sim:{index}" for index in range(4)]
        assert len({str(record[1:3]) for record in trained}) == 1
    assert found["fsdp_c"] == found["torch"]
