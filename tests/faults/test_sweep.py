"""An exception anywhere leaves nothing wrong: boundary calls and user code fail in turn."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "distributed")]

import sweep  # noqa: E402
from launch import run_ranks  # noqa: E402

ENV = {"PYTHONPATH": f"{HERE}:{HERE.parent.parent}"}


@pytest.mark.parametrize("kind", ["boundary", "user"])
@pytest.mark.parametrize("accumulate", [False, True], ids=["sync", "accumulate"])
@pytest.mark.parametrize(
    ("mixed", "reshard"),
    [(False, None), (True, True), (False, False), (False, "replicate"), (True, "replicate")],
    ids=["fp32", "mixed", "keep", "buckets", "mixed-buckets"],
)
def test_training_after_a_failure_equals_training_without(
    kind: str, accumulate: bool, mixed: bool, reshard: sweep.Reshard
) -> None:
    results = run_ranks(sweep.sweep, 2, (kind, mixed, accumulate, reshard), env=ENV, timeout=300)
    expected_type = "RuntimeError" if kind == "boundary" else "UserError"
    for result in results:
        assert result["wrong"] == []
        assert result["same"]
        assert result["failures"] == {expected_type}
        assert result["points"] >= (60 if kind == "boundary" else 6)
    assert results[0]["points"] == results[1]["points"]
