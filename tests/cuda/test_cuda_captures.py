"""CUDA graphs: torch and fsdp_c can capture the same steps, by the rules of the CUDA manual."""

from __future__ import annotations

import re
from typing import Any

import pytest

pytestmark = [pytest.mark.xdist_group("cuda captures"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def cases(run_pair: Any) -> dict[str, Any]:
    return dict(run_pair("captures"))


def test_whole_step_is_captured_and_replayed(cases: dict[str, Any]) -> None:
    for implementation, by_case in cases.items():
        assert len(by_case) in (15, 18)  # torch 2.15 has more methods
        for name, case in by_case.items():
            assert (implementation, name, case["outcome"]) == (implementation, name, "captured")
            assert case["findings"] == []
            assert case["replays"] == 3


def test_graphs_hold_at_most_the_memory_of_torchs_graphs(cases: dict[str, Any]) -> None:
    for name, case in cases["fsdp_c"].items():
        assert case["pool MiB"] <= cases["torch"][name]["pool MiB"], name


def test_graphs_of_large_units_hold_at_most_the_memory_of_torchs_graphs(run_pair: Any) -> None:
    """A buffer of a unit fills several segments of the allocator. A segment has at least 2 MiB."""
    torchs, own = run_pair("captures", before=("--size", "MIDDLE", "--blocks", "4")).values()
    assert set(own) == set(torchs)
    for name, case in own.items():
        assert case["outcome"] == torchs[name]["outcome"] == "captured", name
        assert 100 < case["pool MiB"] <= torchs[name]["pool MiB"], name


UNITS = ("roots", "roots, hsdp", "roots, replicate", "roots, checkpointing")
UNITS += ("roots, 4 microbatches", "roots, capturable optimizer")
"""Cases of ``workers/unit_captures.py``, which describes them."""
NEW = ("computations", "computations, hsdp", "computations, replicate")
NEW += ("computations, checkpointing", "computations, grouped head")
NEW += ("computations, finalize_backward", "roots, finalize_backward")
"""Further cases, with methods that torch has since 2.15."""


@pytest.mark.parametrize("names", [NEW[:1], UNITS + NEW[1:]], ids=["kept storage", "others"])
def test_single_units_are_captured_as_under_torch(run_pair: Any, names: tuple[str, ...]) -> None:
    """Units with kept storage also train for 100 steps, in which addresses must not change."""
    torchs, own = run_pair("unit_captures", *names).values()
    assert set(own) == set(torchs)
    assert set(own) in ({*names}, {*names} - {*NEW})
    if not own:
        pytest.skip("needs torch 2.15")
    for name, case in own.items():
        for result in (case, torchs[name]):
            assert result["outcome"] == "captured", name
            assert result["findings"] == [], name
            assert result["replays"] >= 12, name
        assert case["replays"] == torchs[name]["replays"], name
        assert case["pool MiB"] <= torchs[name]["pool MiB"], name


def test_replays_of_units_have_the_bits_of_eager_steps(run_pair: Any) -> None:
    torchs, own = run_pair("unit_replays").values()
    assert torchs["findings"] == own["findings"] == []
    assert set(own["cases"]) == set(torchs["cases"])
    assert set(own["cases"]) in ({*UNITS}, {*UNITS, *NEW})
    for name, digests in own["cases"].items():
        assert re.fullmatch("[0-9a-f]{16}", digests["eager"]), name  # not an exception
        assert digests["graphs"] == digests["eager"] == torchs["cases"][name]["eager"], name
        assert digests == torchs["cases"][name], name


@pytest.mark.parametrize("case", ["roots, resharded", "units of a root"])
def test_capture_of_unit_that_does_not_join_its_streams_fails_as_under_torch(
    run_pair: Any, case: str
) -> None:
    # 9xx are errors of captures
    results = run_pair("unit_captures", case, watchdog_message=r"cudaError 9\d\d")
    for implementation, result in results.items():
        # None: torch 2.15's watchdog reported such an error first
        if result is not None:
            error = re.match(r"AcceleratorError: .*cudaError 9\d\d", result[case]["outcome"])
            assert error, (implementation, result[case]["outcome"])


UNSUPPORTED = {
    # case: text of the exception
    "roots, grouped head": "FSDP requires a single root module",
    "computations, not kept": "unsharded parameters have 2 lists of addresses",
}


def test_capture_of_single_units_that_torch_does_not_capture_ends_as_under_torch(
    run_pair: Any,
) -> None:
    for implementation, results in run_pair("unit_captures", *UNSUPPORTED).items():
        for case, message in UNSUPPORTED.items():
            assert message in results[case]["outcome"], (implementation, case)


def test_microbatches_of_single_units_race_without_finalize_backward_as_under_torch(
    run_pair: Any,
) -> None:
    """autograd adds their gradients on a stream for which the reduce-scatter does not wait."""
    name = "computations, 4 microbatches"
    for results in run_pair("unit_captures", name).values():
        if name not in results:
            pytest.skip("needs torch 2.15")
        assert results[name]["outcome"] == "captured"
        assert "after the write by aten::add_.Tensor" in results[name]["findings"][0]


UNSAFE = ("cudaMalloc", "cudaHostAlloc", "cudaMallocHost", "cudaMemset", "cudaMemcpy", "cudaFree")
UNSAFE += ("cudaFreeHost",)
"""Calls that a thread makes in relaxed mode only."""


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
        "legacy default stream while a blocking stream is captured": 906,
        **dict.fromkeys(UNSAFE, 900),
        **{f"{name} by a thread in relaxed mode": 0 for name in UNSAFE},
    }
