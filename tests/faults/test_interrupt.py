"""Ctrl-C while a rank waits for a late peer: it is handled at once, and training continues."""

from __future__ import annotations

import functools
from typing import Any

import interrupt
import pytest
from launch import run_ranks

pytestmark = pytest.mark.xdist_group("interrupt")  # the tests share launches


@functools.cache
def outcomes(name: str) -> list[dict[str, dict[str, Any]]]:
    """Returns the results of both ranks, by case."""
    return run_ranks(interrupt.interrupt_all, 2, (name,), timeout=240)


@pytest.mark.parametrize("case", interrupt.CASES)
def test_signal_during_a_collective_is_handled_before_the_peer_joins(case: str) -> None:
    waiting, late = outcomes("fsdp_c")
    assert waiting[case]["interrupted"]
    assert late[case]["handled"]


@pytest.mark.torch("2.13")  # reset_iter_state() is new in 2.13
@pytest.mark.parametrize("case", interrupt.CASES)
def test_signal_during_a_collective_of_torch_is_handled_after_the_peer_joins(case: str) -> None:
    waiting, late = outcomes("torch")
    assert waiting[case]["interrupted"]
    assert not late[case]["handled"]


@pytest.mark.parametrize("case", interrupt.CASES)
def test_reset_before_the_late_peer_joins_keeps_bits(case: str) -> None:
    waiting, late = outcomes("fsdp_c")
    assert late[case]["reset"]
    assert (
        waiting[case]["equal to a run without signal"]
        and late[case]["equal to a run without signal"]
    )


@pytest.mark.parametrize("case", interrupt.CASES)
def test_buffers_of_an_interrupted_collective_live_until_the_late_peer_joins(case: str) -> None:
    found = outcomes("fsdp_c")[0][case]
    assert found["pending"] == 1
    assert found["overwritten"] == 0
    assert found["pending at the end"] == 0


@pytest.mark.parametrize("case", interrupt.RESET_IN_HANDLER_CASES)
def test_signal_handler_that_resets_the_model_and_returns_ends_the_collective(case: str) -> None:
    for rank, found in enumerate(outcomes("fsdp_c")):
        result = found[f"handler: {case}"]
        # The reset abandons the gather that rank 0 waits for, so the wait raises.
        raises = rank == 0 and case.startswith("gather")
        assert rank == 0 or (result["handled"] and result["reset"])
        assert ("reset while" in result["error"]) == raises
        assert result["equal to a run without signal"]
