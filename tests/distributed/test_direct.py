"""Rows that go through shared memory have the bits that torch's gloo backend gives them."""

from __future__ import annotations

import direct
import pytest
import torch
from launch import run_ranks

import fsdp_c


@pytest.mark.parametrize("world", [2, 3, 4, 8])
def test_bits_are_those_of_gloo(world: int) -> None:
    for *found, tried in run_ranks(direct.differences, world, timeout=300):
        assert tried > (300 if world < 8 else 230)
        assert found == []


def test_exchanges_are_told_apart() -> None:
    assert run_ranks(direct.several_at_once, 3) == [True] * 3


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("FSDP_C_TRANSPORT", "gloo"),
        ("TORCH_FR_BUFFER_SIZE", "100"),
        ("TORCH_NCCL_TRACE_BUFFER_SIZE", "100"),
    ],
)
def test_one_rank_that_does_not_want_them_is_enough(variable: str, value: str) -> None:
    assert run_ranks(direct.declined, 2, (variable, value)) == [True] * 2


def test_a_rank_that_is_patched_goes_the_same_way() -> None:
    (same, seen), (also, unseen) = run_ranks(direct.patched_on_one_rank, 2)
    assert same and also
    assert (seen, unseen) == (2 * (2 + 1) * 3, 0)  # a gather each way, and a reduction


def test_a_rank_that_is_observed_counts_torchs_collectives() -> None:
    (same, counts), (also, _) = run_ranks(direct.observed_on_one_rank, 2)
    assert same and also
    assert counts == {
        "c10d._allgather_base_": 6,
        "c10d._reduce_scatter_base_": 3,
        "gloo:all_gather": 6,
        "gloo:reduce_scatter": 3,
        "messages": 0,
    }


def test_the_first_gathers_wait_for_nobody() -> None:
    assert run_ranks(direct.sends_before_others_gather, 3, timeout=120) == [True] * 3


def test_ranks_may_have_sharded_different_numbers_of_models() -> None:
    assert run_ranks(direct.ranks_with_more_groups, 3) == [True] * 3


def test_a_time_limit_is_followed_that_was_set_later() -> None:
    text, closed = run_ranks(direct.shorter_time_limit, 2)
    assert "Timed out waiting 500ms" in text
    assert "failed on rank 1 of 2" in closed


def test_ranks_at_odds_end_in_an_error_and_not_in_wrong_gradients() -> None:
    for text in run_ranks(direct.evaluates_alone, 2):
        assert "failed on rank" in text


def test_a_choice_is_followed_and_has_the_same_bits() -> None:
    assert run_ranks(direct.by_both_ways, 2) == [[True] * 9] * 2


def test_a_wrong_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="transport should be"):
        fsdp_c.set_transport(torch.nn.Linear(2, 2), "nccl")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="set_transport"):
        fsdp_c.set_transport(torch.nn.Linear(2, 2), "gloo")
