"""Trials of failing and of different ranks; scripts of ``workers`` run more of them."""

from __future__ import annotations

import divergence_trials
import failure_trials
import pytest
from failure_trials import Options, Survivor, Trial

TRIALS = 2
SLACK = 3.0
"""Seconds that are added to each time limit, because other tests use the processors."""


@pytest.mark.parametrize("transport", failure_trials.TRANSPORTS)
@pytest.mark.parametrize("fault", failure_trials.FAULTS)
def test_survivors_of_a_failing_rank_name_it_and_end(fault: str, transport: str) -> None:
    options = Options(transport, fault, seed=1, slack=SLACK)
    row, misses = failure_trials.run_trials(options, TRIALS)
    print(f"{failure_trials.HEADER}\n{row}")
    assert misses == []


def test_each_rank_is_polled_while_an_earlier_rank_runs() -> None:
    polled: list[str] = []

    def has_ended(rank: str) -> bool:
        polled.append(rank)
        return rank == "second"

    assert not failure_trials.wait_for(["first", "second"], has_ended, 0.0)  # type: ignore[list-item]
    assert polled == ["first", "second"]


@pytest.mark.parametrize(("waited", "is_early"), [("0.5", True), ("1.2", False)])
def test_survivor_may_raise_early_only_if_its_wait_began_before_the_fault(
    waited: str, is_early: bool
) -> None:
    options = Options("gloo", "stop", seed=1)
    report = f"rank 0 has waited {waited} s for all-gather\n  rank 1: is stopped by a signal"
    text = "Timed out: parameter group '0', forward"
    survivor = Survivor(0, raised=1.8, text=text, exited=0.1, reports=[(0.5, report)])
    misses = failure_trials.find_misses(
        Trial("gloo", "stop", 1, "is stopped by a signal", [survivor], ""), options
    )
    assert misses == (["rank 0: raised early, 1.80 s after the fault"] if is_early else [])


@pytest.mark.parametrize("begin", divergence_trials.KINDS)
@pytest.mark.parametrize("transport", divergence_trials.TRANSPORTS)
def test_ranks_of_a_random_model_raise_and_name_the_rank_that_differs(
    transport: str, begin: str
) -> None:
    options = divergence_trials.Options(transport, 3, begin)
    score = divergence_trials.run_trials(options, range(1, 2))
    print(f"{divergence_trials.HEADER}\n{score.format(options)}")
    assert score.misses == []
