"""Trials of failing ranks; ``workers/failure_trials.py`` runs more of them."""

from __future__ import annotations

import failure_trials
import pytest
from failure_trials import Options

TRIALS = 2
SLACK = 3.0
"""Seconds that are added to each time limit, because other tests use the processors."""


@pytest.mark.parametrize("transport", failure_trials.TRANSPORTS)
@pytest.mark.parametrize("fault", failure_trials.FAULTS)
def test_survivors_of_a_failing_rank_raise_name_the_rank_and_exit(
    fault: str, transport: str
) -> None:
    options = Options(transport, fault, seed=1, slack=SLACK)
    row, misses = failure_trials.run_trials(options, TRIALS)
    print(f"{failure_trials.HEADER}\n{row}")
    assert misses == []
