"""Collectives over shared memory: bits equal to gloo's, fallback of all ranks, and errors."""

from __future__ import annotations

import functools
import sys

import pytest
import shared_memory
from launch import RanksFailed, run_ranks

pytestmark = [
    pytest.mark.xdist_group("shared memory"),  # the tests share launches
    pytest.mark.skipif(sys.platform != "linux", reason="needs memfd"),
]


@functools.cache
def compare_cases(world: int) -> list[dict[str, tuple[int, bool]]]:
    return run_ranks(shared_memory.compare_cases, world)


@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("case", [case.__name__ for case in shared_memory.CASES])
def test_shared_memory_collectives_match_gloo(case: str, world: int) -> None:
    assert [results[case] for results in compare_cases(world)] == [(world, True)] * world


def test_both_groups_of_hybrid_sharding_use_shared_memory() -> None:
    assert run_ranks(shared_memory.compare_hybrid_sharding, 4) == [(4, True)] * 4


@functools.cache
def compare_with_fallback_reasons() -> list[dict[str, tuple[int, bool]]]:
    return run_ranks(shared_memory.compare_with_fallback_reasons, 3)


def test_ranks_without_fallback_reason_use_shared_memory() -> None:
    assert [results["nothing"] for results in compare_with_fallback_reasons()] == [(3, True)] * 3


@pytest.mark.parametrize(
    "fallback_reason", [name for name in shared_memory.FALLBACK_REASONS if name != "nothing"]
)
def test_fallback_reason_on_one_rank_makes_all_ranks_use_gloo(fallback_reason: str) -> None:
    assert [results[fallback_reason] for results in compare_with_fallback_reasons()] == [
        (0, True)
    ] * 3


def test_training_in_forked_child_raises_and_does_not_affect_its_parent() -> None:
    for (train_error, destroy_error), parent_continues in run_ranks(
        shared_memory.train_in_forked_child, 2
    ):
        assert "a child of fork() cannot use its parent's process group" in train_error
        assert destroy_error == ""
        assert parent_continues


def test_reduction_larger_than_the_ring_overlaps_only_after_set_reduction_overlap() -> None:
    """Messages of 1 MB and 4.8 MB for both ranks. The ring has 4 MiB."""
    results, _ = run_ranks(shared_memory.record_overlap, 2)
    assert results == {
        "overlap None, width 500": True,
        "overlap None, width 1100": False,
        "overlap True, width 500": True,
        "overlap True, width 1100": True,
        "overlap False, width 500": False,
        "overlap False, width 1100": False,
    }


def test_gather_larger_than_the_ring_is_not_prefetched() -> None:
    """Rank shards of 0.5 MB and 4.5 MB. The ring has 4 MiB.

    A dispatch mode or a patch of torch's functions on the last rank does not change the decision.
    """
    for results in run_ranks(shared_memory.record_prefetches, 2):
        assert results == {500: ([True] * 3, True), 1500: ([False] * 3, True)}


def test_issuing_an_all_reduce_after_the_first_does_not_wait_for_peers() -> None:
    """Only the first all-reduce of a process group waits, until the models are compared."""
    run_ranks(shared_memory.train_steps_ahead, 2)


@functools.cache
def collect_errors() -> list[dict[str, str]]:
    return run_ranks(shared_memory.collect_errors, 2)


MODELS_DIFFER = (
    "rank 0 gathers '0' of another model (step 1, forward), "
    "rank 1 gathers '0' of another model (step 1, forward)"
)


@pytest.mark.parametrize(
    ("case", "collectives"),
    [
        ("_sizes_differ", MODELS_DIFFER),
        ("_lengths_differ", MODELS_DIFFER),
        (
            "_one_rank_replicates",
            "rank 0 gathers '0' (step 1, forward), "
            "rank 1 all-reduces the root's unit (step 1, backward)",
        ),
        (
            "_one_rank_evaluates",
            "rank 0 gathers '0' (step 2, forward), rank 1 gathers '2' (step 1, backward)",
        ),
    ],
)
def test_collective_mismatch_error_names_both_collectives(case: str, collectives: str) -> None:
    for results in collect_errors():
        assert f": collective mismatch: {collectives}" in results[case]
        text = results[case].partition("\nThe models differ: ")[0]
        assert text.endswith("or shard the model over a new process group")


@pytest.mark.parametrize(
    ("case", "shapes"),
    [
        ("_sizes_differ", ("[40, 40]", "[44, 44]")),
        ("_lengths_differ", ("[1024, 511]", "[1024, 1023]")),
    ],
)
def test_collective_of_another_model_raises_with_the_field_that_differs(
    case: str, shapes: tuple[str, str]
) -> None:
    texts = {results[case].partition("The models differ: ")[2] for results in collect_errors()}
    (text,) = texts
    first, second = (f"'0.0.weight' {shape} torch.float32" for shape in shapes)
    assert text.startswith(f"parameter 0 of unit '0': rank 0 has {first}")
    assert f"; rank 1 has {second}" in text


def test_wait_fails_when_a_peer_destroys_the_group() -> None:
    destroying_rank, waiting_rank = collect_errors()
    assert destroying_rank["_one_rank_ends_the_group"] == ""
    assert "Connection closed by peer" in waiting_rank["_one_rank_ends_the_group"]


def test_wait_fails_when_a_peer_is_killed() -> None:
    with pytest.raises(RanksFailed) as raised:
        run_ranks(shared_memory.train_until_last_rank_is_killed, 3)
    *others, dead = raised.value.reports
    assert dead.status == "killed by SIGKILL"
    for report in others:
        assert "Connection closed by peer" in report.output


def test_training_continues_after_sigstop_and_sigcont() -> None:
    assert run_ranks(shared_memory.train_with_stopped_rank, 2) == [True] * 2


def test_destroyed_group_releases_memory_and_descriptors() -> None:
    for results in run_ranks(shared_memory.count_resources_after_group_end, 2):
        assert set(results.values()) == {(0, 0)}, results


def test_process_exit_without_destroying_the_group_is_clean() -> None:
    for output in run_ranks(shared_memory.__file__, 2):
        assert "2" in output.splitlines()  # the number of rings; libraries may print other lines
