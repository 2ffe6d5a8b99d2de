"""Groups of several modules that run in part, nested units, and other composable functions."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from behavior import assert_same, differences

# torch 2.13 completes partial groups and supports recomputation.
pytestmark = pytest.mark.torch("2.13")


def assert_equal_transitions(steps: dict[str, Any]) -> None:
    first, *others = steps["transitions"]
    assert others == [first, first]


def test_chunked_losses_of_a_head_match_torch() -> None:
    for result in assert_same("losses_of_chunks"):
        hidden_dtype, *_ = result["output cast"]["results"][0]
        assert hidden_dtype == torch.bfloat16
        # Two chunks, then the remaining backward.
        transitions = result["resharded"]["transitions"][0]
        assert transitions.count("P norm, head POST_BACKWARD") == 3
        for steps in result.values():
            assert_equal_transitions(steps)
            assert all(gradient is not None for gradient in steps["gradients"][0].values())


def test_parameters_stay_unsharded_between_chunks() -> None:
    for result in assert_same("parameters_kept_for_chunks"):
        for steps in result.values():
            assert len(steps) == 3
            for (_, *chunks), unsharded_after, gradients in steps:
                assert [is_unsharded for _, _, is_unsharded in chunks] == [True, True]
                assert unsharded_after is False
                assert all(gradient is not None for gradient in gradients.values())


@pytest.mark.parametrize("name", ["accumulated_chunks", "two_forwards_without_the_head"])
def test_partial_forwards_match_torch(name: str) -> None:
    assert_same(name)


def test_module_run_alone_is_not_counted_in_the_next_forward() -> None:
    for result in assert_same("group_member_run_alone_between_forwards"):
        counts = Counter(result["transitions"][1])
        assert counts["P middle, last POST_BACKWARD"] == 1
        assert sum(count for event, count in counts.items() if event.startswith("U middle")) == 2


def test_recomputed_modules_are_not_counted_in_the_next_forward() -> None:
    for result in assert_same("recomputed_group_members"):
        for steps in result.values():
            assert_equal_transitions(steps)


def test_units_inside_checkpoints_are_prefetched_in_torchs_order() -> None:
    for result in assert_same("prefetched_within_checkpoints"):
        default, by_lists = result["without lists"], result["with lists"]
        assert default["transitions"][0] != by_lists["transitions"][0]
        assert differences(default["gradients"], by_lists["gradients"]) == []


@pytest.mark.parametrize("name", ["composable_checkpoints", "within_composable_ddp"])
def test_composable_functions_match_torch(name: str) -> None:
    assert_same(name)
