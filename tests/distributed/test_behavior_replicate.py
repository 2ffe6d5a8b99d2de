"""``replicate`` and ``fully_shard`` in one model: roots, collectives and bits match torch."""

from __future__ import annotations

from behavior import assert_same


def test_fully_shard_root_includes_replicated_children() -> None:
    for result in assert_same("replicated_below_fully_sharded"):
        assert result["roots"] == [True, False, False, False]
        assert result["names"] == ["", "0", "1", "2"]


def test_replicate_root_excludes_fully_sharded_children() -> None:
    for result in assert_same("fully_sharded_below_replicated"):
        assert result["roots"] == [True, False, True, False]
        assert result["names"] == ["", "0", "", "2"]
        assert result["states in context"] == [3, 3, 1, 3]


def test_sharded_child_of_replicated_model_can_run_first() -> None:
    for result in assert_same("sharded_child_of_replicated_model_run_first"):
        assert result["output of child"].shape == (4, 5)
