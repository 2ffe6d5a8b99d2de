"""Ranks of one host move rows in shared memory, with the same bits; else all of them do without."""

from __future__ import annotations

import functools
import sys

import pytest
import shared_memory
from launch import RanksFailed, run_ranks

pytestmark = [
    pytest.mark.xdist_group("shared memory"),  # they share launches
    pytest.mark.skipif(sys.platform != "linux", reason="there is no such memory"),
]


@functools.cache
def moved(world: int) -> list[dict[str, tuple[int, bool]]]:
    return run_ranks(shared_memory.moved, world)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("case", [case.__name__ for case in shared_memory.MOVED])
def test_shared_memory_in_each_case_gives_the_bits_of_gloo(case: str, world: int) -> None:
    assert [found[case] for found in moved(world)] == [(world, True)] * world


def test_rows_of_both_groups_of_hybrid_sharding_are_moved_so() -> None:
    assert run_ranks(shared_memory.hybrid, 4) == [(4, True)] * 4


@functools.cache
def hindered() -> list[dict[str, tuple[int, bool]]]:
    return run_ranks(shared_memory.hindered, 3)


@pytest.mark.parametrize("obstacle", shared_memory.OBSTACLES)
def test_what_hinders_one_rank_lets_all_fall_back(obstacle: str) -> None:
    mapped = 3 if obstacle == "nothing" else 0
    assert [found[obstacle] for found in hindered()] == [(mapped, True)] * 3


def test_a_child_of_fork_leaves_its_parents_exchanges_alone() -> None:
    for (trained, ended), goes_on in run_ranks(shared_memory.forked, 2):
        assert "a child of fork() cannot exchange rows" in trained
        assert ended == ""
        assert goes_on


def test_reductions_that_outgrow_a_board_are_waited_for_unless_asked_otherwise() -> None:
    """Rows for both ranks of 1 and of 4.8 MB; a board has 4 MiB."""
    found, _ = run_ranks(shared_memory.overlapping, 2)
    assert found == {
        "None 500": True,
        "None 1100": False,
        "True 500": True,
        "True 1100": True,
        "False 500": False,
        "False 1100": False,
    }


def test_gathers_that_outgrow_a_board_are_not_prefetched() -> None:
    """Rows of 0.5 and of 4.5 MB; a board has 4 MiB. All ranks do the same, whoever looks."""
    for found in run_ranks(shared_memory.prefetching, 2):
        assert found == {500: ([True] * 3, True), 1500: ([False] * 3, True)}


def test_an_all_reduce_waits_for_nobody_where_it_is_issued() -> None:
    """Neither for the answers to the questions of the first ones, nor for the others' rows."""
    assert run_ranks(shared_memory.ahead, 2) == [8] * 2


@functools.cache
def failing() -> list[dict[str, str]]:
    return run_ranks(shared_memory.failing, 2)


@pytest.mark.parametrize(
    "case", ["_sizes_differ", "_lengths_differ", "_one_has_replicas", "_one_evaluates"]
)
def test_ranks_at_odds_are_told_what_each_of_them_does(case: str) -> None:
    for found in failing():
        assert "ranks are at odds: where rank" in found[case]


def test_a_rank_that_ends_the_group_ends_the_others_waits() -> None:
    ended, waited = failing()
    assert ended["_one_ends_the_group"] == ""
    assert "Connection closed by peer" in waited["_one_ends_the_group"]


def test_a_killed_rank_ends_the_others_waits() -> None:
    with pytest.raises(RanksFailed) as raised:
        run_ranks(shared_memory.killed, 3)
    *others, dead = raised.value.reports
    assert dead.status == "killed by SIGKILL"
    for report in others:
        assert "Connection closed by peer" in report.output


def test_a_rank_that_was_stopped_goes_on() -> None:
    assert run_ranks(shared_memory.stopped, 2) == [True] * 2


def test_memory_and_descriptors_go_with_the_group() -> None:
    for found in run_ranks(shared_memory.groups_come_and_go, 2):
        assert set(found.values()) == {(0, 0)}, found


def test_processes_may_end_without_a_word() -> None:
    for said in run_ranks(shared_memory.__file__, 2):
        assert "2" in said.splitlines()  # some libraries warn in front of it, or count their leaks
