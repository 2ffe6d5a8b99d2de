"""Methods that torch 2.15 adds to FSDP2, as fsdp_c provides them on earlier releases.

``workers/torch215_methods.py`` has the scenarios. torch 2.15 has the methods itself,
so the tests are skipped there. docs/compatibility.md names the releases.
"""

from __future__ import annotations

from typing import Any

import behavior
import pytest
import torch
from behavior import differences
from test_torch_bugs import differences_beyond_rounding
from torch.distributed.fsdp import FSDPModule

pytestmark = pytest.mark.skipif(
    hasattr(FSDPModule, "finalize_backward"), reason="this torch has the methods itself"
)


def run_scenario(name: str, world: int = 2) -> list[Any]:
    return behavior.returned(name, "fsdp_c", world, ("torch215_methods",))


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
    for result in run_scenario("kept_storage_of_one_unit"):
        assert result == {"first": True, "rest": True}


# ---- set_manual_backward_finalization ----


def test_deferred_gradients_are_reduced_by_finalize_backward_only() -> None:
    for result in run_scenario("deferred_reductions"):
        assert_equal(result)
        assert result["counts"] == [[0, 4], [0, 4]]
        assert result["unsharded bytes"] == 0


def test_finalize_backward_only_waits_for_issued_reductions() -> None:
    for result in run_scenario("synchronized_backwards_are_not_reduced_again"):
        assert_equal(result)
        assert result["counts"] == [4, 4]
        assert result["in flight"] == 0


def test_finalize_backward_after_several_reduced_microbatches_matches_plain_model() -> None:
    for result in run_scenario("microbatches_reduced_separately"):
        assert not differences_beyond_rounding(result["expected"], result["found"])


def test_finalize_backward_keeps_gradients_of_units_without_sync() -> None:
    for result in run_scenario("units_without_sync_keep_gradients"):
        assert_equal(result)
        assert result["early"] == [n for n in result["expected"] if n.startswith("0.")]


def test_finalize_backward_raises_in_invalid_states() -> None:
    for result in run_scenario("invalid_finalizations"):
        assert "requires manual backward finalization" in result["automatic mode"]
        assert "must be called on the root" in result["mode of child"]
        assert "must be called on the root" in result["finalization of child"]
        assert "while a backward is running" in result["during backward"]
        assert "call wait()" in result["pending"]
        assert "call wait()" in result["mode while pending"]
        assert result["mode after wait"] == ""


def test_reset_iter_state_drops_a_pending_finalization() -> None:
    for result in run_scenario("finalization_after_a_reset"):
        assert_equal(result)


def test_finalize_backward_requires_all_reduce_on_replicas() -> None:
    for result in run_scenario("finalization_with_replicas", 4):
        assert "set_requires_all_reduce(True)" in result["refused"]
        assert not differences_beyond_rounding(result["expected"], result["found"])


# ---- param_dtype_override_fn ----


def test_param_dtype_override_sets_the_compute_dtype_of_one_parameter() -> None:
    for result in run_scenario("dtype_overrides_of_single_parameters"):
        assert_equal(result)
        assert result["dtypes"] == [torch.float32, torch.bfloat16]
        assert result["calls"] == {1: 4, 2: 4}


def test_invalid_param_dtype_override_raises_and_leaves_the_model() -> None:
    for result in run_scenario("invalid_dtype_overrides"):
        assert result["float64"].startswith("ValueError")
        assert "float64" in result["float64"]
        assert result["string"].startswith("ValueError")
        assert "torch.dtype or None" in result["string"]
