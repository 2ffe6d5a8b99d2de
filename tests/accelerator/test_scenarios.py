"""Scenarios on the simulated accelerator: fsdp_c trains to the bits of torch, without a race."""

from __future__ import annotations

import pytest
import scenario_ranks
import scenarios
from launch import run_ranks
from scenario_ranks import ScenarioRun

pytestmark = pytest.mark.xdist_group("accelerator_scenarios")

Runs = dict[str, dict[str, ScenarioRun]]
FSDP_C_RUNS = ("fsdp_c", "fsdp_c without kernels")
NAMES = [
    pytest.param(name, marks=pytest.mark.torch(scenarios.SINCE[name]))
    for name in scenarios.SCENARIOS
]


@pytest.fixture(scope="module")
def runs() -> Runs:
    """Runs by scenario and implementation."""
    (by_scenario,) = run_ranks(scenario_ranks.run, 1, timeout=280)
    return by_scenario


@pytest.mark.parametrize("name", NAMES)
def test_torch_trains_scenario_and_races_only_where_listed(runs: Runs, name: str) -> None:
    run = runs[name]["torch"]
    assert not str(run.record[0]).startswith("raised "), f"torch {run.record[0]}"
    if name in scenarios.TORCH_RACES:
        assert scenarios.TORCH_RACES[name] in str(run.findings), "torch no longer has this race"
    else:
        assert run.findings == []


@pytest.mark.parametrize("implementation", FSDP_C_RUNS)
@pytest.mark.parametrize("name", NAMES)
def test_scenario_matches_torch_bitwise_without_races(
    runs: Runs, name: str, implementation: str
) -> None:
    run = runs[name][implementation]
    assert run.record == runs[name]["torch"].record
    assert run.findings == []


def test_double_backward_matches_plain_model_where_torch_reduces_too_early() -> None:
    """The device's thread runs autograd nodes of the recorded backward after torch's post-backward
    hook, so torch reduces incomplete gradients."""
    (records,) = run_ranks(scenario_ranks.run_double_backward, 1, timeout=120)
    assert records["fsdp_c"] == records["unsharded"]
    assert records["torch"][0] == records["unsharded"][0]
    assert records["torch"][1] != records["unsharded"][1]


@pytest.mark.torch("2.13")  # reset_iter_state() is new in 2.13
def test_training_after_failed_backward_matches_training_after_reset_iter_state() -> None:
    (runs,) = run_ranks(scenario_ranks.run_failed_backward, 1, timeout=120)
    assert not str(runs["fsdp_c"].record[0]).startswith("raised ")
    assert runs["fsdp_c"].record == runs["fsdp_c with a reset"].record
    assert runs["fsdp_c"].findings == runs["fsdp_c with a reset"].findings == []
    assert runs["torch"].record != runs["fsdp_c"].record


@pytest.mark.torch("2.12")  # as in test_threaded_ranks.py
def test_models_trained_by_threads_on_separate_devices_match_torch_without_races() -> None:
    (by_implementation,) = run_ranks(scenario_ranks.run_on_threads, 1, timeout=120)
    for *records, findings in by_implementation.values():
        assert findings == []
        assert [len(record) for record in records] == [12] * 4  # four steps with three entries
        assert [record[0] for record in records] == [f"sim:{index}" for index in range(4)]
        assert len({str(record[1:3]) for record in records}) == 1
    assert by_implementation["fsdp_c"] == by_implementation["torch"]
