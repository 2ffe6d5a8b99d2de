"""Large parameters are gathered into and reduced from their own memory: with the same bits."""

from __future__ import annotations

import pieces
import pytest
from launch import run_ranks


@pytest.mark.parametrize("world", [2, 3, 4])
def test_bits_are_those_of_whole_rows(world: int) -> None:
    assert run_ranks(pieces.differences, world) == [[]] * world


def test_a_rank_that_is_watched_goes_with_the_others() -> None:
    assert run_ranks(pieces.watched_on_one_rank, 2) == [[True] * 4] * 2


def test_a_gather_inside_of_a_gather_leaves_the_cuts_of_the_outer_one() -> None:
    assert run_ranks(pieces.gathered_inside_of_a_gather, 2, timeout=60) == [True] * 2
