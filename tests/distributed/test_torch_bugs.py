"""Known bugs of torch's FSDP2 (tests/TORCH_BUGS.md): torch fails, and fsdp_c gives right results.

If an assertion about torch fails, torch has changed: update tests/TORCH_BUGS.md and docs.
Some bugs are fixed in 2.14 or 2.15; on these releases torch must be right as well. The scenarios in
``workers/torch_bugs*.py`` compute the expected results. Results must have equal bits, unless a test
uses ``differences_beyond_rounding``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import behavior
import pytest
import torch
from behavior import Raised, differences
from releases import has

BUGS = ("torch_bugs", "torch_bugs_failures", "torch_bugs_meshes", "torch_bugs_steps")
FIXED_IN_2_15 = has("2.15")
"""Whether the installed torch has the fixes of release 2.15: B1, B2, and gradients after resets.

Tests name the releases of earlier fixes.
"""


RunScenario = Callable[[str, int], list[Any]]


def run_fsdp_c(name: str, world: int = 2) -> list[Any]:
    return behavior.get_results(name, "fsdp_c", world, BUGS)


def run_torch(name: str, world: int = 2) -> list[Any]:
    return behavior.get_results(name, "torch", world, BUGS)


def torch_errors(name: str, world: int = 2) -> list[Raised]:
    return behavior.get_exceptions(name, "torch", world, BUGS)


def torch_errors_until(release: str, name: str, world: int = 2) -> list[Raised]:
    """Returns torch's errors before ``release``. From there on asserts that torch is right."""
    if has(release):
        assert_right(name, world, run_torch)
        return []
    return torch_errors(name, world)


def assert_right(name: str, world: int = 2, run: RunScenario = run_fsdp_c) -> None:
    for rank, result in enumerate(run(name, world)):
        mismatches = differences(result["expected"], result["found"], f"rank {rank}")
        assert not mismatches, "\n".join(mismatches[:20])


def differences_beyond_rounding(expected: Any, result: Any, where: str = "") -> list[str]:
    """Returns ``differences`` beyond the rounding errors of another summation order."""
    if isinstance(expected, torch.Tensor) and isinstance(result, torch.Tensor):
        if not differences(expected, result, where):
            return []
        if expected.dtype != result.dtype or expected.shape != result.shape:
            return differences(expected, result, where)
        limit = 16 * torch.finfo(expected.dtype).eps * max(1.0, expected.abs().max().item())
        error = (expected - result).abs().max().item()
        return [f"{where}: values differ by {error}"] if error > limit else []
    if isinstance(expected, (dict, list)) and len(expected) == len(result):
        keys = expected if isinstance(expected, dict) else range(len(expected))
        return [
            line
            for key in keys
            for line in differences_beyond_rounding(expected[key], result[key], f"{where}.{key}")
        ]
    return differences(expected, result, where)


def assert_near(name: str, run: RunScenario = run_fsdp_c) -> None:
    """Checks as ``assert_right`` on four ranks, up to the rounding of another summation order."""
    for rank, result in enumerate(run(name, 4)):
        mismatches = differences_beyond_rounding(
            result["expected"], result["found"], f"rank {rank}"
        )
        assert not mismatches, "\n".join(mismatches[:20])


# ---- groups that are skipped ----


def test_group_skipped_in_accumulation_keeps_gradients() -> None:
    for error in torch_errors_until("2.15", "group_skipped_in_accumulation"):
        assert error.kind == "AttributeError"
        assert "_unsharded_param" in error.text
    assert_right("group_skipped_in_accumulation")


def test_replicas_may_use_different_parameter_groups() -> None:
    """torch's replicas would deadlock.

    test_reduce_scatter_unused_params_includes_groups_that_never_ran shows the reason.
    """
    assert_right("replicas_using_different_groups", 4)


@pytest.mark.torch("2.13")
def test_reduce_scatter_unused_params_includes_groups_that_never_ran() -> None:
    for result in run_torch("unused_groups_are_reduced"):
        assert result["counts"] == [2, 3, 3]
    for result in run_fsdp_c("unused_groups_are_reduced"):
        assert result == {"counts": [3, 3, 3], "all have gradients": True}


# ---- one rank ----


INFERENCE = (
    "Inplace update to inference tensor outside InferenceMode"  # the step after it
    if FIXED_IN_2_15
    else "Inference tensors do not track version counter"  # the forward in inference mode
)


def test_one_rank_runs_in_inference_mode() -> None:
    for error in torch_errors("one_rank_in_inference_mode"):
        assert error.kind == "RuntimeError"
        assert INFERENCE in error.text
    assert_right("one_rank_in_inference_mode")
    assert all(result["output"] for result in run_fsdp_c("one_rank_in_inference_mode"))


def test_one_rank_runs_extensions_that_send_several_tensors() -> None:
    for error in torch_errors("one_rank_with_an_extension"):
        assert error.kind == "ValueError"
        assert "not enough values to unpack" in error.text
    for result in run_fsdp_c("one_rank_with_an_extension"):
        assert result["equal"] == [True, True]


# ---- evaluation ----


def test_evaluations_add_no_gathers_to_later_steps() -> None:
    for result in run_torch("training_after_evaluations"):
        assert result["recorded forwards"] == 3 * 3  # of three units in three evaluations
        assert (result["before"], result["after"]) == (6, 7)
    for result in run_fsdp_c("training_after_evaluations"):
        assert (result["before"], result["after"]) == (6, 6)


def test_model_trains_after_first_forward_in_inference_mode() -> None:
    for error in torch_errors("first_forward_in_inference_mode"):
        assert "inference tensor" in error.text.lower()
    assert_right("first_forward_in_inference_mode")


# ---- two roots ----


@pytest.mark.parametrize(
    "name", ["two_roots_sharing_before_lazy_init", "two_roots_sharing_after_lazy_init"]
)
def test_roots_with_a_shared_context_run_backward_separately(name: str) -> None:
    for error in torch_errors(name):
        assert error.kind == "IndexError"
    assert_right(name)


# ---- messages and waits ----


@pytest.mark.torch("2.13")
def test_assertion_of_to_sharded_dtensor_prints_nothing() -> None:
    for result in run_torch("assertion_of_to_sharded_dtensor"):
        assert result["error"] in result["printed"] and result["error"]
    for result in run_fsdp_c("assertion_of_to_sharded_dtensor"):
        assert result["printed"] == ""
        assert "Expects size" in result["error"]


def test_group_waits_once_for_all_offloaded_gradients() -> None:
    for result in run_torch("waits_for_offloaded_gradients"):
        assert result["waited"] == result["params"] == 4
    for result in run_fsdp_c("waits_for_offloaded_gradients"):
        assert result["waited"] == 1
        assert result["cleared"] == 4


# ---- dtypes ----


def test_parameters_frozen_in_first_forward_train_later_in_mixed_precision() -> None:
    for error in torch_errors_until("2.14", "frozen_in_first_forward"):
        assert error.kind == "RuntimeError"
        assert "assign a gradient with dtype 'c10::BFloat16'" in error.text
    assert_right("frozen_in_first_forward")


def test_model_dtype_may_change_between_steps() -> None:
    for error in torch_errors("dtype_changed_between_steps"):
        assert error.kind == "RuntimeError"
        assert "Expected out tensor to have dtype" in error.text
    assert_right("dtype_changed_between_steps")


@pytest.mark.parametrize(
    "name",
    [
        "several_original_dtypes",
        "several_original_dtypes_in_accumulation",
        "several_original_dtypes_with_a_custom_reduce_scatter",
    ],
)
def test_one_group_may_have_parameters_of_several_dtypes(name: str) -> None:
    for error in torch_errors(name):
        assert error.kind == "AssertionError"
        assert "uniform original parameter dtype" in error.text
    assert_right(name)


# ---- offload, reset ----


def test_cpu_offload_works_without_an_accelerator() -> None:
    for error in torch_errors("offload_without_an_accelerator"):
        assert error.kind == "RuntimeError"
        assert "accelerator" in error.text
    assert_right("offload_without_an_accelerator")


@pytest.mark.torch("2.13")
def test_reset_iter_state_drops_accumulated_gradients() -> None:
    """The scenario also calls ``zero_grad()``, as both resets do from 2.15 on."""
    for result in run_torch("reset_in_accumulation"):
        assert bool(differences(result["expected"], result["found"])) != FIXED_IN_2_15
    assert_right("reset_in_accumulation")


@pytest.mark.parametrize(
    "name",
    [
        "batch_skipped",
        "batch_skipped_in_mixed_precision",
        "batch_skipped_without_reshard",
        "batch_skipped_with_recomputation",
        "batch_skipped_before_an_evaluation",
    ],
)
def test_model_trains_after_a_backward_that_raised(name: str) -> None:
    """Without a reset, torch treats the next forwards as recomputations within the backward."""
    try:
        by_torch = [differences(result["expected"], result["found"]) for result in run_torch(name)]
    except AssertionError:  # the scenario raised under torch
        by_torch = [["an exception"]]
    assert all(by_torch)
    assert_right(name)


@pytest.mark.parametrize(
    "name",
    ["forward_on_the_meta_device_before_to_empty", "functional_call_before_the_first_forward"],
)
def test_model_trains_after_a_first_forward_that_raised(name: str) -> None:
    """torch's states keep the failed lazy init and do not repeat it."""
    for error in torch_errors(name):
        assert "object has no attribute 'param_dtype'" in error.text
    assert_right(name)


# ---- stale weights ----


def test_step_while_all_units_stay_unsharded_leaves_no_stale_weights() -> None:
    for result in run_torch("steps_without_reshard_after_backward"):
        assert differences(result["expected"], result["found"])
    assert_right("steps_without_reshard_after_backward")


def test_uneven_parameters_tied_after_sharding_leave_no_stale_weights() -> None:
    """Each unit reduces its own gradient of the weight, so sums are rounded in another order."""
    name = "parameters_tied_after_sharding"
    for result in run_torch(name):
        assert differences_beyond_rounding(result["expected"], result["found"])
    for result in run_fsdp_c(name):
        assert not differences_beyond_rounding(result["expected"], result["found"])


# ---- partial reductions with replicas (B1) ----


def test_microbatches_may_use_parameters_of_different_sizes() -> None:
    for error in torch_errors_until("2.15", "other_sizes_in_the_next_microbatch", 4):
        assert error.kind == "RuntimeError"
        assert "must match the size of tensor" in error.text
    assert_right("other_sizes_in_the_next_microbatch", 4)


def test_partial_gradients_of_equal_sizes_stay_separate() -> None:
    """Before 2.15, torch silently adds the partial gradient of one parameter to another's."""
    name = "equal_sizes_in_the_next_microbatch"
    assert_right(name, 4)
    if FIXED_IN_2_15:
        assert_right(name, 4, run_torch)
        return
    for result in run_torch(name, 4):
        first, second = result["found"].values()
        right_first, right_second = result["expected"].values()
        assert first is None and right_first is not None
        assert differences_beyond_rounding(right_first + right_second, second) == []


def test_several_orders_of_used_parameters_give_right_gradients() -> None:
    assert_near("several_orders_of_use")


@pytest.mark.parametrize(
    "name", ["group_unused_in_the_last_microbatch", "custom_group_unused_in_the_last_microbatch"]
)
def test_group_unused_in_the_last_microbatch_keeps_gradients(name: str) -> None:
    assert_near(name)
    if FIXED_IN_2_15:
        assert_near(name, run_torch)
        return
    for result in run_torch(name, 4):
        missing = [name for name, grad in result["found"].items() if grad is None]
        assert missing == [name for name in result["expected"] if name.startswith("blocks.1.")]
        assert all(result["expected"][name] is not None for name in missing)


def test_partial_gradients_of_unit_run_twice_match_torch() -> None:
    """Before 2.15, torch adds in another order, so results are equal up to rounding only.

    It adds the partial gradients to the new ones and all-reduces the sum.
    """
    name = "unit_run_twice_in_the_last_microbatch"
    assert_near(name, run_torch)
    assert_near(name)
    if FIXED_IN_2_15:
        for by_torch, by_fsdp_c in zip(run_torch(name, 4), run_fsdp_c(name, 4)):
            assert differences(by_torch["found"], by_fsdp_c["found"]) == []


def test_several_dtypes_with_partial_reductions_give_right_gradients() -> None:
    for error in torch_errors("several_dtypes_on_replicas", 4):
        assert "uniform original parameter dtype" in error.text
    assert_near("several_dtypes_on_replicas")


# ---- smaller reshard groups (B4, B5) ----


def test_shard_1_parameter_resharded_to_a_smaller_group_has_the_right_columns() -> None:
    assert all(run_torch("backward_with_shard_1_and_smaller_reshard_group", 4))
    assert not any(run_fsdp_c("backward_with_shard_1_and_smaller_reshard_group", 4))
    assert_near("columns_between_forward_and_backward")


def test_parameter_resharded_to_a_smaller_group_has_the_right_rows() -> None:
    for result in run_torch("rows_between_forward_and_backward", 4):
        assert differences_beyond_rounding(result["expected"][0], result["found"][0])
    assert_near("rows_between_forward_and_backward")


def test_evaluation_on_a_smaller_group_leaves_no_stale_weights() -> None:
    for result in run_torch("evaluation_on_a_smaller_group", 4):
        assert not differences_beyond_rounding(result["expected"][0], result["found"][0])
        assert differences_beyond_rounding(result["expected"][1], result["found"][1])
    assert_near("evaluation_on_a_smaller_group")


def test_reentrant_checkpoints_of_two_forwards_leave_no_stale_weights() -> None:
    for result in run_torch("reentrant_checkpoints_of_two_forwards"):
        assert not torch.equal(result["expected"], result["found"])
    assert_right("reentrant_checkpoints_of_two_forwards")
