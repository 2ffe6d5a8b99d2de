"""Failures of cudaMalloc, of NCCL calls and of launches, each in turn, during a training step.

A step raises; the step after it trains, with all parameters sharded at its end.
"""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.xdist_group("cuda"), pytest.mark.timeout(900)]
EXPECTED = {
    "cudaMalloc": "OutOfMemoryError",
    "cudaMalloc, retried": "trained",
    "collective": "RuntimeError",
    "launch of fsdp_c": "RuntimeError",
}


@pytest.mark.parametrize("job", ["fsdp", "hsdp"])
def test_training_continues_after_each_failed_call(run_worker: Any, job: str) -> None:
    results = run_worker("failures", "fsdp_c", job)
    assert set(results) == set(EXPECTED)
    for kind, outcomes in results.items():
        assert outcomes, kind
        for outcome in outcomes:
            expected = {"failed": EXPECTED[kind], "next": "trained", "unsharded": []}
            assert outcome == expected, kind


def test_failures_raise_torchs_exceptions(run_worker: Any) -> None:
    results = run_worker("failures", "torch", "fsdp")
    for kind, outcomes in results.items():
        assert {outcome["failed"] for outcome in outcomes} == {EXPECTED[kind]}, kind
