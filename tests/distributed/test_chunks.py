"""Collectives on large parameters' own memory have the results of packed buffers."""

from __future__ import annotations

import chunks
import pytest
from launch import run_ranks


@pytest.mark.parametrize("world", [2, 3, 4])
def test_bits_of_chunked_collectives_match_packed_buffers(world: int) -> None:
    assert run_ranks(chunks.differences, world) == [[]] * world


def test_chunks_need_fewer_buffers_than_packed_buffers() -> None:
    """If the worker's setting had no effect, the other tests would compare equal runs."""
    for packed, chunked in run_ranks(chunks.count_buffers, 2):
        assert chunked < packed


def test_packed_buffers_on_one_rank_work_with_chunks_on_its_peer() -> None:
    expected = dict.fromkeys(chunks.SPECIAL_SETTINGS, True)
    assert run_ranks(chunks.train_with_special_rank, 2) == [expected] * 2


def test_gather_inside_a_gather_keeps_the_layout_of_the_outer_one() -> None:
    assert run_ranks(chunks.unshard_inside_a_gather, 2, timeout=60) == [True] * 2
