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


UNITS = (
    "roots",
    "roots, hsdp",
    "roots, replicate",
    "roots, checkpointing",
    "computations, never resharded",
    "computations, replicate",
    "computations, checkpointing",
    "computations, grouped head",
)
"""Cases of ``workers/unit_captures.py``, which describes them."""
KEPT = ("computations", "computations, hsdp")
"""Further cases, with ``set_keep_unsharded_storage``, which torch has since 2.15."""


def test_single_units_are_captured_as_under_torch(run_worker: Any) -> None:
    torchs, own = (run_worker("unit_captures", name) for name in ("torch", "fsdp_c"))
    assert set(own) == set(torchs)
    assert set(own) in ({*UNITS}, {*UNITS, *KEPT})
    for name, case in own.items():
        for result in (case, torchs[name]):
            assert result["outcome"] == "captured", name
            assert result["findings"] == [], name
            assert result["replays"] >= 12, name
        assert case["replays"] == torchs[name]["replays"], name
        assert case["pool MiB"] <= torchs[name]["pool MiB"], name


@pytest.mark.parametrize("case", ["roots, resharded", "units of a root"])
def test_capture_of_unit_that_does_not_join_its_streams_fails_as_under_torch(
    run_worker: Any, case: str
) -> None:
    for implementation in ("torch", "fsdp_c"):
        # None: torch 2.15's watchdog noticed the error first
        result = run_worker("unit_captures", implementation, case, watchdog_may_abort=True)
        if result is not None:
            assert result[case]["outcome"].startswith("AcceleratorError"), implementation


def test_calls_during_a_capture_return_errors_by_the_cuda_manual(run_worker: Any) -> None:
    outcomes = run_worker("capture_rules")  # cudaError_t: 9xx are errors of captures
    assert outcomes == {
        "wait for an event from outside": 905,
        "query of the captured stream": 900,
        "synchronize the device": 900,
        "a forked stream is not joined": 904,
        "query of another event by a thread in global mode": 900,
        "query of another event by a thread in relaxed mode": 0,
        "event of a finished capture": 907,
        "fork and join": 0,
    }
