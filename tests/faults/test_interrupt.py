"""Ctrl-C while a rank waits for a late peer: seen at once, and the model can be trained on."""

from __future__ import annotations

import functools
from typing import Any

import interrupt
import pytest
from launch import run_ranks

pytestmark = pytest.mark.xdist_group("interrupt")  # they share launches
ATTEMPTS = 2
"""The machine may be busy for a moment; a wait that does not see signals is late every time."""


@functools.cache
def outcomes(name: str) -> list[dict[str, list[Any]]]:
    attempts = ATTEMPTS if name == "fsdp_c" else 1
    return run_ranks(interrupt.interrupt_all, 2, (name, attempts), timeout=120)


def delays(name: str, case: str) -> list[float]:
    """Seconds from the signal to the KeyboardInterrupt."""
    waiting, late = outcomes(name)
    return [seen["seen"] - sent["sent"] for seen, sent in zip(waiting[case], late[case])]


@pytest.mark.parametrize("case", interrupt.CASES)
def test_a_signal_is_seen_within_a_fifth_of_a_second(case: str) -> None:
    assert min(delays("fsdp_c", case)) <= 0.2


@pytest.mark.torch("2.13")  # reset_iter_state
@pytest.mark.parametrize("case", interrupt.CASES)
def test_stock_sees_it_when_the_peer_has_come(case: str) -> None:
    assert min(delays("torch", case)) >= interrupt.LATE


@pytest.mark.parametrize("case", interrupt.CASES)
def test_the_model_is_reset_at_once_and_trains_as_if_nothing_had_been(case: str) -> None:
    for attempts in outcomes("fsdp_c"):
        assert min(found["reset took"] for found in attempts[case]) <= 0.2
        assert all(found["as without"] for found in attempts[case])


@pytest.mark.parametrize("case", interrupt.CASES)
def test_buffers_stay_until_the_late_peer_is_done_with_them(case: str) -> None:
    for found in outcomes("fsdp_c")[0][case]:
        assert found["parked"] == 1
        assert found["overwritten"] == 0
        assert found["parked in the end"] == 0


@pytest.mark.parametrize("case", interrupt.HANDLED)
def test_a_handler_may_reset_the_model_and_return(case: str) -> None:
    for rank, found in enumerate(outcomes("fsdp_c")):
        [result] = found[f"handler: {case}"]
        given_up = rank == 0 and case.startswith("gather")
        assert ("reset while" in result["error"]) == given_up
        assert result["as without"]
