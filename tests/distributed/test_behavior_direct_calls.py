"""Methods of groups and states behave as in torch when a program calls them directly."""

from __future__ import annotations

import pytest
from behavior import assert_same

SCENARIOS = (
    "group_post_backward_called_directly_fp32",
    "group_post_backward_called_directly_bf16",
    "group_post_backward_called_directly_hsdp",
    "group_post_backward_called_directly_offload",
    "group_post_backward_called_directly_all_reduce_hook",
    "group_post_backward_called_directly_gradient_hooks",
    "group_post_backward_called_directly_then_end_of_backward",
    "group_post_backward_called_directly_then_finalize_backward",
    "group_post_backward_called_directly_twice",
    "group_post_backward_called_directly_before_other_collectives",
    "end_of_backward_callback_called_directly",
    "post_backward_called_directly_between_forward_and_backward",
    "backward_of_one_group_called_directly",
    "post_backward_hook_registered_directly",
    "direct_calls_after_lazy_init",
)


@pytest.mark.parametrize("name", SCENARIOS)
def test_direct_calls_of_private_methods_match_torch(name: str) -> None:
    assert_same(name)


def test_direct_calls_of_private_methods_on_four_ranks_match_torch() -> None:
    assert_same("group_post_backward_called_directly_hsdp_on_four_ranks", 4)


@pytest.mark.torch("2.13")  # the attribute that is missing first differs between releases
def test_direct_calls_before_the_first_forward_raise_errors_of_torch() -> None:
    assert_same("direct_calls_before_the_first_forward")


@pytest.mark.torch("2.13")
def test_direct_calls_before_the_first_forward_on_one_rank_raise_errors_of_torch() -> None:
    assert_same("direct_calls_before_the_first_forward_on_one_rank", 1)
