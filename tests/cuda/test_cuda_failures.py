"""Failures of cudaMalloc, of NCCL and of launches during a training step, under torch and fsdp_c.

After one failed call, the step raises torch's exception, and the next step trains and leaves all
parameters sharded. A cudaMalloc that succeeds when it is repeated raises nothing. No process hangs
if a collective never ends or the device stops.
"""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.xdist_group("cuda captures"), pytest.mark.timeout(900)]
FAILURES = {"cudaMalloc", "cudaMalloc, retried", "collective", "launch of torch"}


@pytest.fixture(scope="module")
def torch_failures(run_worker: Any) -> dict[str, str]:
    """The outcome of the step under torch, by kind of failure."""
    results = run_worker("failures", "torch", "fsdp")
    types = {kind: {o["failed"] for o in outcomes} for kind, outcomes in results.items()}
    assert all(len(found) == 1 for found in types.values()), types
    return {kind: found.pop() for kind, found in types.items()}


@pytest.mark.parametrize("job", ["fsdp", "hsdp"])
def test_training_continues_after_each_failed_call(
    run_worker: Any, torch_failures: dict[str, str], job: str
) -> None:
    assert set(torch_failures) == FAILURES
    assert torch_failures["cudaMalloc"] == "OutOfMemoryError"
    assert torch_failures["cudaMalloc, retried"] == "trained"
    results = run_worker("failures", "fsdp_c", job)
    assert set(results) == {*FAILURES, "launch of fsdp_c"}
    for kind, outcomes in results.items():
        assert len(outcomes) >= 2, kind
        failed = torch_failures.get(kind, "RuntimeError")
        for outcome in outcomes:
            assert outcome == {"failed": failed, "next": "trained", "unsharded": []}, kind


CASES = {
    # case: whether torch's watchdog ends the process
    "tear down": True,
    "clean up": False,
    "blocking wait, forward": False,
    "blocking wait, backward": False,
    "asynchronous error": False,
}


@pytest.mark.parametrize("case", CASES)
def test_failure_of_nccl_has_torchs_outcome(run_pair: Any, case: str) -> None:
    torchs, own = run_pair(
        "watchdog", case, watchdog_message="collective operation timeout|Operation timed out"
    ).values()
    if torchs is not None and "skipped" in torchs:
        pytest.skip(torchs["skipped"])
    if CASES[case]:
        assert torchs is None
        assert own is None
    else:
        assert own["next"] != "trained"
        assert own["unsharded"] == []
        assert (own["failed"], own["next"]) == (torchs["failed"], torchs["next"])


def test_step_on_stopped_device_and_the_next_step_raise(run_worker: Any) -> None:
    for implementation in ("torch", "fsdp_c"):
        # torch 2.14: the watchdog may end the process before the second step
        result = run_worker("watchdog", implementation, "device", watchdog_message="cudaError 719")
        if result is not None:
            assert (result["failed"], result["next"]) == ("AcceleratorError", "AcceleratorError")
