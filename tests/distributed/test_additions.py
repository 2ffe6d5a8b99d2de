"""torch 2.15's additions on the torch that is installed: see ``additions.py``.

On a torch that has them, torch's methods are the modules' own and these tests are about ours no
more; the README names the releases.
"""

from __future__ import annotations

from typing import Any

import behaviour
import pytest
import torch
from behaviour import differences
from test_stock_bugs import apart
from torch.distributed.fsdp import FSDPModule

pytestmark = pytest.mark.skipif(
    hasattr(FSDPModule, "finalize_backward"), reason="this torch has the methods itself"
)


def ours(name: str, world: int = 2) -> list[Any]:
    return behaviour.returned(name, "fsdp_c", world, ("additions",))


def assert_equal(result: Any) -> None:
    wrong = differences(result["expected"], result["found"])
    assert not wrong, "\n".join(wrong[:20])


# ---- set_keep_unsharded_storage ----


def test_unsharded_parameters_stay_at_their_addresses_where_storage_is_kept() -> None:
    for result in ours("kept_storage"):
        assert_equal(result)
        assert result["stays"]
        assert result["kept"] > 0
        assert result["freed"] == result["others"]


def test_one_unit_alone_keeps_its_storage() -> None:
    for result in ours("kept_storage_of_one_unit"):
        assert result == {"first": True, "rest": True}


# ---- set_manual_backward_finalization ----


def test_deferred_gradients_are_reduced_by_finalization_only() -> None:
    for result in ours("deferred_reductions"):
        assert_equal(result)
        assert result["counts"] == [[0, 4], [0, 4]]
        assert result["held"] == 0


def test_gradients_that_were_reduced_are_only_waited_for() -> None:
    for result in ours("synchronised_backwards_are_not_reduced_again"):
        assert_equal(result)
        assert result["counts"] == [4, 4]
        assert result["in flight"] == 0


def test_microbatches_may_be_reduced_one_by_one() -> None:
    for result in ours("microbatches_that_are_reduced_one_by_one"):
        assert not apart(result["expected"], result["found"])


def test_what_is_not_to_be_reduced_stays() -> None:
    for result in ours("units_that_do_not_reduce_keep_their_gradients"):
        assert_equal(result)
        assert result["early"] == [n for n in result["expected"] if n.startswith("0.")]


def test_finalization_is_refused_where_it_makes_no_sense() -> None:
    for result in ours("finalization_is_refused"):
        assert "requires manual backward finalization" in result["automatic"]
        assert "must be called on the root" in result["below"]
        assert "must be called on the root" in result["below, manual"]
        assert "while a backward is running" in result["running"]
        assert "call wait()" in result["pending"]
        assert "call wait()" in result["pending mode"]
        assert result["afterwards"] == ""


def test_a_reset_forgets_a_pending_finalization() -> None:
    for result in ours("finalization_after_a_reset"):
        assert_equal(result)


def test_partial_reductions_are_refused_and_completed() -> None:
    for result in ours("finalization_with_replicas", 4):
        assert "set_requires_all_reduce(True)" in result["refused"]
        assert not apart(result["expected"], result["found"])


# ---- param_dtype_override_fn ----


def test_single_parameters_compute_in_their_own_dtype() -> None:
    for result in ours("dtypes_of_single_parameters"):
        assert_equal(result)
        assert result["dtypes"] == [torch.float32, torch.bfloat16]
        assert result["calls"] == {1: 4, 2: 4}


def test_other_dtypes_are_refused_and_nothing_is_changed() -> None:
    for result in ours("dtypes_that_are_refused"):
        assert result["other"].startswith("ValueError")
        assert "float64" in result["other"]
        assert result["none"].startswith("ValueError")
        assert "torch.dtype or None" in result["none"]
