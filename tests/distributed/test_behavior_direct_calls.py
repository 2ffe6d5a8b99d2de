"""Methods of groups and states behave as in torch when a program calls them directly."""

from __future__ import annotations

import pytest
from behavior import assert_same, differences, get_exceptions, get_results
from releases import has

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
    "direct_calls_after_lazy_init",
)


@pytest.mark.parametrize("name", SCENARIOS)
def test_direct_calls_of_private_methods_match_torch(name: str) -> None:
    assert_same(name)


def test_direct_calls_of_private_methods_on_four_ranks_match_torch() -> None:
    assert_same("group_post_backward_called_directly_hsdp_on_four_ranks", 4)


def test_backward_without_module_hooks_is_ended_by_a_direct_private_call() -> None:
    """From 2.15 on, torch refuses the end of a backward that no module hook has begun."""
    name = "post_backward_hook_registered_directly"
    if not has("2.15"):
        assert_same(name)
        return
    assert all(
        "manual backward finalization" in rank.text for rank in get_exceptions(name, "torch")
    )
    for _, _, _, gradients in get_results(name, "fsdp_c"):
        assert gradients["0.linear.weight"] is not None


# Earlier releases raise for another missing attribute.
@pytest.mark.torch("2.13")
@pytest.mark.parametrize(("suffix", "world"), [("", 2), ("_on_one_rank", 1)])
def test_direct_calls_before_the_first_forward_raise_errors_of_torch(
    suffix: str, world: int
) -> None:
    """fsdp_c raises the exceptions of torch before 2.15 for ``finalize_backward`` and the callback.

    From 2.15 on, torch's ``finalize_backward`` of a group does nothing there. The callback at the
    end of backward raises an AssertionError, because no backward has begun.
    """
    name = f"direct_calls_before_the_first_forward{suffix}"
    if not has("2.15"):
        assert_same(name, world)
        return
    for torch_calls, calls in zip(
        get_results(name, "torch", world), get_results(name, "fsdp_c", world)
    ):
        assert torch_calls.pop("end of backward")[0] == "AssertionError"
        assert torch_calls.pop("finalize_backward") is None
        for call in ("end of backward", "finalize_backward"):
            assert calls.pop(call)[0] == "AttributeError"
        assert not differences(torch_calls, calls)
