"""Methods of groups and states that a program calls directly do what they do under torch."""

from __future__ import annotations

import pytest
from behavior import assert_same

SCENARIOS = (
    "group_post_backward_by_hand_fp32",
    "group_post_backward_by_hand_bf16",
    "group_post_backward_by_hand_hsdp",
    "group_post_backward_by_hand_offload",
    "group_post_backward_by_hand_all_reduce_hook",
    "group_post_backward_by_hand_gradient_hooks",
    "group_post_backward_by_hand_then_end_of_backward",
    "group_post_backward_by_hand_then_finalize_backward",
    "group_post_backward_by_hand_twice",
    "group_post_backward_by_hand_before_other_collectives",
    "end_of_backward_by_hand",
    "post_backward_by_hand_between_forward_and_backward",
    "backward_of_one_group_by_hand",
    "post_backward_hook_registered_by_hand",
    "direct_calls_after_lazy_init",
)


@pytest.mark.parametrize("name", SCENARIOS)
def test_direct_calls_match_torch(name: str) -> None:
    assert_same(name)


def test_direct_calls_on_four_ranks_match_torch() -> None:
    assert_same("group_post_backward_by_hand_hsdp_on_four_ranks", 4)


@pytest.mark.torch("2.13")  # the attribute that is missing first differs between releases
def test_direct_calls_before_the_first_forward_raise_as_torch() -> None:
    assert_same("direct_calls_before_the_first_forward")


@pytest.mark.torch("2.13")
def test_direct_calls_before_the_first_forward_on_one_rank_raise_as_torch() -> None:
    assert_same("direct_calls_before_the_first_forward_on_one_rank", 1)
