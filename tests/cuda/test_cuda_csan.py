"""The step csan of the GPU check: torch's CUDA sanitizer, over the simulated CUDA device."""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = [pytest.mark.xdist_group("cuda checks"), pytest.mark.timeout(900)]


def test_cuda_sanitizer_reports_most_dropped_waits_and_no_other_error(run_worker: Any) -> None:
    result = run_worker("csan_step")
    assert set(result["errors"]) == {"torch", "fsdp_c"}
    for implementation, errors in result["errors"].items():
        assert len(errors) == 5
        assert not any(errors.values()), implementation
        assert result["operations"][implementation] > 1000
    assert result["waits"]["observed"] > 20
    assert result["waits"]["detected"] > result["waits"]["dropped"] / 2
