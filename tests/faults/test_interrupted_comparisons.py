"""An exception interrupts a rank over gloo while the ranks compare their collectives.

A rank departs when it is about to issue another collective than its sequence predicts.
"""

from __future__ import annotations

import interrupted_comparisons as programs
from launch import run_ranks

GLOO = {"FSDP_C_TRANSPORT": "gloo"}


def test_rank_interrupted_after_the_decision_of_a_departure_raises_and_its_peer_does_not_exit() -> (
    None
):
    own, other = run_ranks(programs.leave_departure, 2, (False,), env=GLOO)
    assert all(text.startswith("RuntimeError") for text in own + other)
    assert "another collective than before an exception interrupted it" in own[0]
    assert len(other) > 0


def test_rank_that_repeats_an_interrupted_departure_continues() -> None:
    assert run_ranks(programs.leave_departure, 2, (True,), env=GLOO) == [[], []]


def test_rank_interrupted_in_the_exchange_of_a_comparison_raises_and_its_peer_does_not_exit() -> (
    None
):
    own, other = run_ranks(programs.leave_exchange, 2, env=GLOO)
    assert own[0] == "Interrupt: "
    assert "another collective than before an exception interrupted it" in own[1]
    assert any(other)


def test_rank_interrupted_in_an_agreement_takes_part_in_the_search_for_the_difference() -> None:
    own, other = run_ranks(programs.leave_agreement, 2, env=GLOO)
    assert own[0] == "Interrupt: "
    expected = "collective mismatch: rank 0 gathers 'blocks.1' (step "
    assert expected in own[1]
    assert expected in other[0]
