"""``replicate`` and ``fully_shard`` in one model: roots, collectives and numbers are torch's."""

from __future__ import annotations

from behaviour import assert_same


def test_fully_shard_is_the_root_of_what_is_replicated_below() -> None:
    for found in assert_same("replicated_below_fully_sharded"):
        assert found["roots"] == [True, False, False, False]
        assert found["names"] == ["", "0", "1", "2"]


def test_replicate_is_the_root_of_replicated_modules_only() -> None:
    for found in assert_same("fully_sharded_below_replicated"):
        assert found["roots"] == [True, False, True, False]
        assert found["names"] == ["", "0", "", "2"]
        assert found["members"] == [3, 3, 1, 3]


def test_a_sharded_part_of_a_replicated_model_can_run_by_itself_first() -> None:
    for found in assert_same("a_sharded_part_of_a_replicated_model_alone"):
        assert found["alone"].shape == (4, 5)
