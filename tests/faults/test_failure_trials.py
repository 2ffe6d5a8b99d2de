"""Trials of failing and of different ranks; scripts of ``workers`` run more of them."""

from __future__ import annotations

import divergence_trials
import failure_trials
import pytest
from failure_trials import Options

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


@pytest.mark.parametrize("begin", divergence_trials.KINDS)
@pytest.mark.parametrize("transport", divergence_trials.TRANSPORTS)
def test_ranks_of_a_random_model_raise_and_name_the_rank_that_differs(
    transport: str, begin: str
) -> None:
    options = divergence_trials.Options(transport, 3, begin)
    score = divergence_trials.run_trials(options, range(1, 2))
    print(f"{divergence_trials.HEADER}\n{score.format(options)}")
    assert score.misses == []
