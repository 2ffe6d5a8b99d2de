"""Trials of failing and of different ranks; scripts of ``workers`` run more of them."""

from __future__ import annotations

from dataclasses import replace

import divergence
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
    options = divergence_trials.Options(transport, 3, begin, SLACK)
    score = divergence_trials.run_trials(options, range(1, 2))
    print(f"{divergence_trials.HEADER}\n{score.format(options)}")
    assert score.misses == []


@pytest.mark.parametrize("transport", divergence_trials.TRANSPORTS)
def test_all_ranks_of_hsdp_raise_and_name_two_ranks_that_differ(transport: str) -> None:
    options = divergence_trials.Options(transport, 4, divergence_trials.FIRST, SLACK, hsdp=True)
    kinds = ("another dtype", "another model", "another order of blocks", "explicit unshard")
    score = divergence_trials.Score()
    divergence_trials.run_seed(options, 0, kinds, score)
    assert (score.trials, score.misses) == (len(kinds), [])


OPTIONS = divergence_trials.Options("gloo", 2, "a later step")
BOTH = "RuntimeError: collective mismatch: rank 0 gathers 'a', rank 1 gathers 'b'"
OWN_ERROR = f"RuntimeError: {divergence.OWN_ERROR}out of bounds"


@pytest.mark.parametrize(
    ("kind", "rank", "is_miss"),
    [(divergence.OWN_ERROR_KIND, 1, False), (divergence.OWN_ERROR_KIND, 0, True)]
    + [("frozen later", 1, True)],
)
def test_divergence_trial_allows_torchs_exception_for_one_kind_and_the_rank_that_differs(
    kind: str, rank: int, is_miss: bool
) -> None:
    score = divergence_trials.Score()
    outcomes = [(OWN_ERROR if i == rank else BOTH, 0.1) for i in range(2)]
    score.add("trial", kind, outcomes, differing_rank=1, options=OPTIONS)
    assert (score.unnamed, len(score.misses)) == (int(is_miss), int(is_miss))


@pytest.mark.parametrize(("slack", "is_miss"), [(0.0, True), (0.5, False)])
def test_divergence_trial_that_is_later_than_a_second_is_a_miss(
    slack: float, is_miss: bool
) -> None:
    score = divergence_trials.Score()
    score.add(
        "trial",
        "frozen later",
        [(BOTH, 0.1), (BOTH, 1.2)],
        differing_rank=1,
        options=replace(OPTIONS, slack=slack),
    )
    assert len(score.misses) == int(is_miss)
    row = score.format(OPTIONS)
    cells = dict(zip(divergence_trials.COLUMNS, row.strip("| ").split(" | "), strict=True))
    assert cells["later than 1 s"] == "1"
