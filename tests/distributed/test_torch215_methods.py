"""Methods that torch 2.15 adds to FSDP2, as fsdp_c provides them on all releases.

``workers/torch215_methods.py`` has the scenarios. From torch 2.15 on, torch's own methods run, too.
"""

from __future__ import annotations

from typing import Any

import behavior
import torch
from behavior import differences
from test_torch_bugs import differences_beyond_rounding
from torch.distributed.fsdp import FSDPModule

HAS_METHODS = hasattr(FSDPModule, "finalize_backward")
BOTH = ("fsdp_c", "torch") if HAS_METHODS else ("fsdp_c",)
"""Implementations of scenarios that read nothing of fsdp_c's own interface."""


def run_scenario(
    name: str, world: int = 2, implementations: tuple[str, ...] = ("fsdp_c",)
) -> list[Any]:
    """Returns the results of a scenario on all ranks, by default under fsdp_c only."""
    modules = ("torch215_methods",)
    runs = (behavior.get_results(name, api, world, modules) for api in implementations)
    return [result for results in runs for result in results]


def assert_equal(result: Any) -> None:
    mismatches = differences(result["expected"], result["found"])
    assert not mismatches, "\n".join(mismatches[:20])


# ---- set_keep_unsharded_storage ----


def test_keep_unsharded_storage_keeps_parameter_addresses() -> None:
    for result in run_scenario("kept_storage"):
        assert_equal(result)
        assert result["are addresses equal"]
        assert result["bytes while kept"] > 0
        assert result["bytes after disabling"] == result["bytes of default model"]


def test_keep_unsharded_storage_without_recurse_affects_one_unit() -> None:
    for result in run_scenario("kept_storage_of_one_unit", implementations=BOTH):
        assert result == {"first is kept": True, "others are freed": True}


# ---- set_manual_backward_finalization ----


def test_deferred_gradients_are_reduced_by_finalize_backward_only() -> None:
    for result in run_scenario("deferred_reductions"):
        assert_equal(result)
        assert result["reductions"] == [{"backwards": 0, "finalization": 4}] * 2
        assert result["unsharded bytes"] == 0


def test_finalize_backward_after_reduced_backward_issues_no_reductions() -> None:
    for result in run_scenario("synchronized_backwards_are_not_reduced_again"):
        assert_equal(result)
        assert result["reductions of backward"] == result["reductions of both"] == 4
        assert result["in flight"] == 0


def test_finalize_backward_after_several_reduced_microbatches_matches_plain_model() -> None:
    for result in run_scenario("microbatches_reduced_separately", implementations=BOTH):
        assert not differences_beyond_rounding(result["expected"], result["found"])


def test_finalize_backward_keeps_gradients_of_units_without_sync() -> None:
    for result in run_scenario("units_without_sync_keep_gradients", implementations=BOTH):
        assert_equal(result)
        without_gradient = result["no gradient after first finalization"]
        assert without_gradient == [n for n in result["expected"] if n.startswith("0.")]


def test_finalize_backward_raises_in_invalid_states() -> None:
    for result in run_scenario("invalid_finalizations", implementations=BOTH):
        assert result["before the first forward"] == "None"
        assert "requires manual backward finalization" in result["automatic mode"]
        assert "must be called on the root" in result["mode of child"]
        assert "must be called on the root" in result["finalization of child"]
        assert "cannot change mode during backward" in result["during backward"]
        assert "must be waited on before finalizing backward again" in result["pending"]
        assert "cannot change mode after backward starts" in result["mode while pending"]
        assert result["mode after wait"] == ""


def test_manual_finalization_of_a_unit_raises_in_the_first_forward() -> None:
    for message in run_scenario(
        "manual_mode_of_a_unit_before_the_first_forward", implementations=BOTH
    ):
        assert "must be called on the root FSDP module" in message


def test_reset_iter_state_drops_a_pending_finalization() -> None:
    for result in run_scenario("finalization_after_a_reset", implementations=BOTH):
        assert "This gradient reduction handle was invalidated" in result["refused"]
        assert_equal(result)


def test_finalize_backward_on_replicas_without_all_reduce_raises() -> None:
    for result in run_scenario("finalization_with_replicas", world=4):
        assert "set_requires_all_reduce(True)" in result["refused"]
        assert not differences_beyond_rounding(result["expected"], result["found"])


# ---- param_dtype_override_fn ----


def test_param_dtype_override_sets_the_compute_dtype_of_one_parameter() -> None:
    for result in run_scenario("dtype_overrides_of_single_parameters", implementations=BOTH):
        assert_equal(result)
        assert result["dtypes"] == [torch.float32, torch.bfloat16]
        assert result["calls by ndim"] == {1: 4, 2: 4}  # one per model


def test_invalid_param_dtype_override_raises_and_leaves_the_model_unchanged() -> None:
    for result in run_scenario("invalid_dtype_overrides", implementations=BOTH):
        assert result["float64"].startswith("ValueError")
        assert "float64" in result["float64"]
        assert result["string"].startswith("ValueError")
        assert "torch.dtype or None" in result["string"]
