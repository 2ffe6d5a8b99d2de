"""Groups of several modules that run in part, nested units, and other composable functions."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from behavior import assert_same

# torch 2.13 completes partial groups and supports recomputation.
pytestmark = pytest.mark.torch("2.13")


def test_chunked_losses_of_a_head_match_torch() -> None:
    for result in assert_same("losses_of_chunks"):
        assert result["output cast"][0][0] == torch.bfloat16
        transitions = result["resharded"][1]
        # Two chunks, then the remaining backward.
        assert transitions.count("P norm, head POST_BACKWARD") == 3
        for steps in result.values():
            assert steps[1] == steps[4] == steps[7]  # all steps are equal
            assert all(gradient is not None for gradient in steps[2].values())


def test_parameters_stay_unsharded_between_chunks() -> None:
    for result in assert_same("parameters_kept_for_chunks"):
        for log in result.values():
            for step in range(3):
                chunks, after, gradients = log[3 * step : 3 * step + 3]
                assert chunks[3] is True and chunks[6] is True
                assert after is False
                assert all(gradient is not None for gradient in gradients.values())


@pytest.mark.parametrize("name", ["accumulated_chunks", "two_forwards_without_the_head"])
def test_partial_forwards_match_torch(name: str) -> None:
    assert_same(name)


def test_module_run_alone_is_not_counted_in_the_next_forward() -> None:
    for result in assert_same("group_member_run_alone_between_forwards"):
        counts = Counter(result[4])
        assert counts["P middle, last POST_BACKWARD"] == 1
        assert sum(count for event, count in counts.items() if event.startswith("U middle")) == 2


def test_recomputed_modules_are_not_counted_in_the_next_forward() -> None:
    for result in assert_same("recomputed_group_members"):
        for name, steps in result.items():
            assert steps[1] == steps[4] == steps[7], name


def test_units_inside_checkpoints_are_prefetched_in_torchs_order() -> None:
    for result in assert_same("prefetched_within_checkpoints"):
        assert result["without lists"][1] != result["with lists"][1]
        assert result["without lists"][2].keys() == result["with lists"][2].keys()


@pytest.mark.parametrize("name", ["composable_checkpoints", "within_composable_ddp"])
def test_composable_functions_match_torch(name: str) -> None:
    assert_same(name)
