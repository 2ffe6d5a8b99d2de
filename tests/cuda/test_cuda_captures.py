"""CUDA graphs: torch and fsdp_c can capture the same steps, by the rules of the CUDA manual."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.xdist_group("cuda"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cases(run_worker: Any) -> dict[str, Any]:
    return {name: run_worker("captures", name) for name in ("torch", "fsdp_c")}


def test_whole_step_is_captured_and_replayed(cases: dict[str, Any]) -> None:
    for implementation, by_case in cases.items():
        for name, case in by_case.items():
            assert (implementation, name, case["outcome"]) == (implementation, name, "captured")
            assert case["findings"] == []
            assert case["replays"] == 3


def test_graphs_hold_at_most_the_memory_of_torchs_graphs(cases: dict[str, Any]) -> None:
    for name, case in cases["fsdp_c"].items():
        assert case["pool MiB"] <= cases["torch"][name]["pool MiB"], name


def test_calls_during_a_capture_return_errors_by_the_cuda_manual(run_worker: Any) -> None:
    outcomes = run_worker("capture_rules")  # cudaError_t: 9xx are errors of captures
    assert outcomes == {
        "wait for an event from outside": 905,
        "query of the captured stream": 900,
        "synchronize the device": 900,
        "a forked stream is not joined": 904,
        "query of another event in global mode": 900,
        "query of another event in relaxed mode": 0,
        "event of a finished capture": 907,
        "fork and join": 0,
    }
