"""Known bugs of stock FSDP2 (tests/TORCH_BUGS.md): each test shows stock failing, and ours right.

Not a wish about stock: the day one of its assertions fails, torch has changed and the README must
too. Some bugs are mended in 2.14 or 2.15: there stock has to be right as ours is on all releases.
What is right is said in ``stock_bugs.py``; equal means equal in bits, unless a test says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import behaviour
import pytest
import torch
from behaviour import Raised, differences
from releases import has

BUGS = ("stock_bugs", "stock_bugs_failures", "stock_bugs_meshes")
MENDED = has("2.15")
"""Whether the installed torch has mended B1, B2 and resets; what came sooner says so itself."""


Runs = Callable[[str, int], list[Any]]


def ours(name: str, world: int = 2) -> list[Any]:
    return behaviour.returned(name, "fsdp_c", world, BUGS)


def stocks(name: str, world: int = 2) -> list[Any]:
    return behaviour.returned(name, "torch", world, BUGS)


def stocks_errors(name: str, world: int = 2) -> list[Raised]:
    return behaviour.raised(name, "torch", world, BUGS)


def stocks_errors_until(release: str, name: str, world: int = 2) -> list[Raised]:
    """Stock's errors below that release; none from there on, where stock is right in bits."""
    if has(release):
        assert_right(name, world, stocks)
        return []
    return stocks_errors(name, world)


def assert_right(name: str, world: int = 2, whose: Runs = ours) -> None:
    for rank, found in enumerate(whose(name, world)):
        wrong = differences(found["expected"], found["found"], f"rank {rank}")
        assert not wrong, "\n".join(wrong[:20])


def apart(expected: Any, found: Any, where: str = "") -> list[str]:
    """Like ``differences``, but tensors may differ by what the order of a sum does to them."""
    if isinstance(expected, torch.Tensor) and isinstance(found, torch.Tensor):
        if not differences(expected, found, where):
            return []
        if expected.dtype != found.dtype or expected.shape != found.shape:
            return differences(expected, found, where)
        limit = 16 * torch.finfo(expected.dtype).eps * max(1.0, expected.abs().max().item())
        off = (expected - found).abs().max().item()
        return [f"{where}: values differ by {off}"] if off > limit else []
    if isinstance(expected, (dict, list)) and len(expected) == len(found):
        keys = expected if isinstance(expected, dict) else range(len(expected))
        return [line for key in keys for line in apart(expected[key], found[key], f"{where}.{key}")]
    return differences(expected, found, where)


def assert_near(name: str, whose: Runs = ours) -> None:
    """``assert_right`` for four ranks, whose sum in another order has other last bits."""
    for rank, found in enumerate(whose(name, 4)):
        wrong = apart(found["expected"], found["found"], f"rank {rank}")
        assert not wrong, "\n".join(wrong[:20])


# ---- groups that are skipped ----


def test_b2_a_group_skipped_in_accumulation_keeps_the_gradients_of_the_others() -> None:
    for error in stocks_errors_until("2.15", "group_skipped_in_accumulation"):
        assert error.kind == "AttributeError"
        assert "_unsharded_param" in error.text
    assert_right("group_skipped_in_accumulation")


def test_b7_replicas_may_use_other_groups() -> None:
    """Stock's replicas would wait for each other: see the counts of the next test."""
    assert_right("replicas_that_use_other_groups", 4)


@pytest.mark.torch("2.13")
def test_b7_groups_that_never_ran_are_reduced_where_unused_ones_are_to_be() -> None:
    for found in stocks("unused_groups_are_reduced"):
        assert found["counts"] == [2, 3, 3]
    for found in ours("unused_groups_are_reduced"):
        assert found == {"counts": [3, 3, 3], "all there": True}


# ---- one rank ----


INFERENCE = (
    "Inplace update to inference tensor outside InferenceMode"  # the step after it
    if MENDED
    else "Inference tensors do not track version counter"  # the forward in inference mode
)


def test_b3_one_rank_runs_in_inference_mode() -> None:
    for error in stocks_errors("one_rank_in_inference_mode"):
        assert error.kind == "RuntimeError"
        assert INFERENCE in error.text
    assert_right("one_rank_in_inference_mode")
    assert all(found["output"] for found in ours("one_rank_in_inference_mode"))


def test_b3_one_rank_runs_extensions_that_send_several_tensors() -> None:
    for error in stocks_errors("one_rank_with_an_extension"):
        assert error.kind == "ValueError"
        assert "not enough values to unpack" in error.text
    for found in ours("one_rank_with_an_extension"):
        assert found["equal"] == [True, True]


# ---- evaluation ----


def test_b6_evaluations_leave_nothing_behind() -> None:
    for found in stocks("training_after_evaluations"):
        assert found["order"] == 3 * 3
        assert (found["before"], found["after"]) == (6, 7)
    for found in ours("training_after_evaluations"):
        assert (found["before"], found["after"]) == (6, 6)


def test_a_first_forward_in_inference_mode_leaves_a_model_that_trains() -> None:
    for error in stocks_errors("first_forward_in_inference_mode"):
        assert "inference tensor" in error.text.lower()
    assert_right("first_forward_in_inference_mode")


# ---- two roots ----


@pytest.mark.parametrize(
    "name", ["two_roots_that_share_at_first", "two_roots_that_share_after_lazy_init"]
)
def test_b15_two_roots_with_one_context_run_backward_separately(name: str) -> None:
    for error in stocks_errors(name):
        assert error.kind == "IndexError"
    assert_right(name)


# ---- messages and waits ----


@pytest.mark.torch("2.13")
def test_b13_a_refusal_prints_nothing() -> None:
    for found in stocks("a_refusal_is_raised_only"):
        assert found["error"] in found["printed"] and found["error"]
    for found in ours("a_refusal_is_raised_only"):
        assert found["printed"] == ""
        assert "Expects size" in found["error"]


def test_b14_one_wait_for_all_offloaded_gradients_of_a_group() -> None:
    for found in stocks("waits_for_offloaded_gradients"):
        assert found["waited"] == found["params"] == 4
    for found in ours("waits_for_offloaded_gradients"):
        assert found["waited"] == 1
        assert found["left"] == 4


# ---- dtypes ----


def test_parameters_frozen_at_first_are_trained_later_under_mixed_precision() -> None:
    for error in stocks_errors_until("2.14", "frozen_at_first"):
        assert error.kind == "RuntimeError"
        assert "assign a gradient with dtype 'c10::BFloat16'" in error.text
    assert_right("frozen_at_first")


def test_a_model_may_change_its_dtype_between_steps() -> None:
    for error in stocks_errors("another_dtype_in_the_middle"):
        assert error.kind == "RuntimeError"
        assert "Expected out tensor to have dtype" in error.text
    assert_right("another_dtype_in_the_middle")


@pytest.mark.parametrize(
    "name",
    [
        "several_original_dtypes",
        "several_original_dtypes_in_accumulation",
        "several_original_dtypes_with_a_custom_reduce_scatter",
    ],
)
def test_parameters_of_one_group_may_have_several_dtypes(name: str) -> None:
    for error in stocks_errors(name):
        assert error.kind == "AssertionError"
        assert "uniform original parameter dtype" in error.text
    assert_right(name)


# ---- offload, reset ----


def test_offload_to_the_cpu_needs_no_accelerator() -> None:
    for error in stocks_errors("offload_without_an_accelerator"):
        assert error.kind == "RuntimeError"
        assert "accelerator" in error.text
    assert_right("offload_without_an_accelerator")


@pytest.mark.torch("2.13")
def test_a_reset_drops_what_was_accumulated() -> None:
    """The scenario also calls ``zero_grad()``: from 2.15 on stock's reset does that by itself."""
    for found in stocks("reset_in_accumulation"):
        assert bool(differences(found["expected"], found["found"])) != MENDED
    assert_right("reset_in_accumulation")


@pytest.mark.parametrize(
    "name",
    [
        "batch_left_out",
        "batch_left_out_in_mixed_precision",
        "batch_left_out_where_nothing_is_resharded",
        "batch_left_out_where_forward_runs_again",
        "batch_left_out_before_an_evaluation",
    ],
)
def test_a_backward_that_raised_leaves_a_model_that_trains(name: str) -> None:
    """Nobody resets it: torch's units take the next forwards for recomputations within it."""
    try:
        stock = [differences(found["expected"], found["found"]) for found in stocks(name)]
    except AssertionError:  # it raised
        stock = [["an exception"]]
    assert all(stock)
    assert_right(name)


# ---- partial reductions with replicas (B1) ----


def test_b1_other_parameters_may_be_active_in_the_next_microbatch() -> None:
    for error in stocks_errors_until("2.15", "other_sizes_in_the_next_microbatch", 4):
        assert error.kind == "RuntimeError"
        assert "must match the size of tensor" in error.text
    assert_right("other_sizes_in_the_next_microbatch", 4)


def test_b1_gradients_of_equal_sizes_are_not_mixed_up() -> None:
    """Stock adds one parameter's partial gradient to the other's, in silence, below 2.15."""
    if MENDED:
        assert_right("equal_sizes_in_the_next_microbatch", 4, stocks)
    for found in [] if MENDED else stocks("equal_sizes_in_the_next_microbatch", 4):
        first, second = found["found"].values()
        right_first, right_second = found["expected"].values()
        assert first is None and right_first is not None
        assert apart(right_first + right_second, second) == []
    assert_right("equal_sizes_in_the_next_microbatch", 4)


def test_b1_whatever_is_used_in_each_microbatch() -> None:
    assert_near("every_order_of_use")


@pytest.mark.parametrize(
    "name", ["group_unused_in_the_last_microbatch", "custom_group_unused_in_the_last_microbatch"]
)
def test_b1_a_group_unused_in_the_last_microbatch_keeps_its_gradients(name: str) -> None:
    if MENDED:
        assert_near(name, stocks)
    for found in [] if MENDED else stocks(name, 4):
        lost = [name for name, grad in found["found"].items() if grad is None]
        assert lost == [name for name in found["expected"] if name.startswith("blocks.1.")]
        assert all(found["expected"][name] is not None for name in lost)
    assert_near(name)


def test_several_dtypes_with_partial_reductions() -> None:
    for error in stocks_errors("several_dtypes_on_replicas", 4):
        assert "uniform original parameter dtype" in error.text
    assert_near("several_dtypes_on_replicas")


# ---- smaller reshard groups (B4, B5) ----


def test_b4_columns_are_gathered_from_a_smaller_group() -> None:
    assert all(stocks("columns_alone", 4))
    assert not any(ours("columns_alone", 4))
    assert_near("columns_between_forward_and_backward")


def test_b5_the_parameter_on_a_smaller_group_holds_the_right_rows() -> None:
    for found in stocks("rows_between_forward_and_backward", 4):
        assert apart(found["expected"][0], found["found"][0])
    assert_near("rows_between_forward_and_backward")


def test_an_evaluation_on_a_smaller_group_leaves_no_stale_weights() -> None:
    for found in stocks("evaluation_on_a_smaller_group", 4):
        assert not apart(found["expected"][0], found["found"][0])
        assert apart(found["expected"][1], found["found"][1])
    assert_near("evaluation_on_a_smaller_group")


def test_reentrant_checkpoints_of_two_forwards_leave_no_stale_weights() -> None:
    for found in stocks("reentrant_checkpoints_of_two_forwards"):
        assert not torch.equal(found["expected"], found["found"])
    assert_right("reentrant_checkpoints_of_two_forwards")
