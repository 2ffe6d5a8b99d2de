"""Each boundary call and each user callback fails in turn. Later training must be unaffected."""

from __future__ import annotations

import pytest
import sweep
from launch import run_ranks


@pytest.mark.parametrize("kind", ["boundary", "user"])
@pytest.mark.parametrize("accumulate", [False, True], ids=["sync", "accumulate"])
@pytest.mark.parametrize(
    ("mixed", "reshard"),
    [(False, None), (True, True), (False, False), (False, "replicate"), (True, "replicate")],
    ids=["fp32", "mixed", "keep", "buckets", "mixed-buckets"],
)
def test_training_after_failure_matches_training_without_failure(
    kind: str, accumulate: bool, mixed: bool, reshard: sweep.Reshard
) -> None:
    results = run_ranks(sweep.sweep, 2, (kind, mixed, accumulate, reshard), timeout=300)
    expected_type = "RuntimeError" if kind == "boundary" else "UserError"
    for result in results:
        assert result["mismatches"] == []
        assert result["same"]
        assert result["failures"] == {expected_type}
        assert result["last failing call"] >= (60 if kind == "boundary" else 6)
    assert results[0]["last failing call"] == results[1]["last failing call"]
