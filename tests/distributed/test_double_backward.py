"""Double backward through units that reshard: torch fails (B8), ours has the plain model's numbers.

The list of torch's bugs is tests/TORCH_BUGS.md.

Equal means equal in bits on one and two ranks; see ``double_backward.py`` for what is right.
"""

from __future__ import annotations

from typing import Any

import behaviour
import pytest
import torch
from behaviour import differences
from launch import RanksFailed, run_ranks
from releases import has
from test_stock_bugs import apart

SCENARIOS = ("double_backward",)
IN_BITS = [
    "gradient_penalty",
    "penalty_alone",
    "penalty_that_always_reshards",
    "penalty_that_reshards_after_backward_only",
    "penalty_that_never_reshards",
    "penalty_through_nested_units",
    "penalty_in_mixed_precision",
    "penalty_with_a_reduce_dtype_and_accumulation",
    "penalty_with_checkpointing_inside",
    "penalty_with_checkpointing_outside",
    "penalty_on_activations",
    "third_derivatives",
    "an_error_between_both_backwards",
    "penalty_in_a_backward_that_is_finished_by_hand",
]
SUMMED_IN = {
    "penalty_in_mixed_precision": torch.bfloat16,
    "penalty_with_a_reduce_dtype_and_accumulation": torch.float32,
}
"""What ours adds up gradients of a norm in, which come from both backwards; stock, with which these
are compared, takes the wider dtype of the reduction from 2.15 on (test_behaviour_dtypes.py)."""
SEVERAL_REDUCTIONS = ["penalty_of_critics", "backward_that_keeps_its_graph"]


def assert_same_but_sums(expected: Any, found: Any, summed_in: torch.dtype) -> None:
    """Bits, but for the norms' weights: these within two roundings of the narrower sum."""
    sums = [name for name in expected if name.endswith("norm.weight")]
    for name in sums:
        right = expected.pop(name)
        limit = 2 * torch.finfo(summed_in).eps * right.abs().max().item()
        torch.testing.assert_close(found.pop(name), right, rtol=0, atol=limit)
    assert sums and differences(expected, found) == []


def ours(name: str, world: int = 2) -> list[Any]:
    """Ours alone: torch's ranks would die (see the first test)."""
    return behaviour.returned(name, "fsdp_c", world, SCENARIOS)


def assert_freed(results: list[Any]) -> None:
    assert [result["held"] for result in results] == [0] * len(results)


def run_stock(rank: int, world: int) -> None:
    import double_backward

    double_backward.gradient_penalty(
        behaviour.Api("torch", rank, world, None)  # type: ignore[arg-type]  # writes no files
    )


def test_b8_torch_reads_freed_parameters() -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(run_stock, 2)
    ends = [report.status + report.output for report in failed.value.reports]
    assert any("SIGSEGV" in end or "storage of size 0" in end for end in ends)


@pytest.mark.parametrize("name", IN_BITS)
def test_gradients_are_those_of_the_plain_model(name: str) -> None:
    for rank, result in enumerate(ours(name)):
        if has("2.15") and name in SUMMED_IN:
            assert_same_but_sums(dict(result["expected"]), dict(result["found"]), SUMMED_IN[name])
            continue
        wrong = differences(result["expected"], result["found"], f"rank {rank}")
        assert not wrong, "\n".join(wrong[:20])
    if name != "penalty_that_never_reshards":
        assert_freed(ours(name))


@pytest.mark.parametrize("name", SEVERAL_REDUCTIONS)
def test_gradients_that_are_reduced_in_parts_add_up(name: str) -> None:
    for rank, result in enumerate(ours(name)):
        wrong = apart(result["expected"], result["found"], f"rank {rank}")
        assert not wrong, "\n".join(wrong[:20])
    assert_freed(ours(name))


@pytest.mark.parametrize("name", ["penalty_with_a_smaller_group", "penalty_with_replicas"])
def test_on_four_ranks(name: str) -> None:
    for rank, result in enumerate(ours(name, 4)):
        wrong = apart(result["expected"], result["found"], f"rank {rank}")
        assert not wrong, "\n".join(wrong[:20])
    assert_freed(ours(name, 4))


def test_replicated_units() -> None:
    for result in ours("penalty_of_replicated_units"):
        assert not apart(result["expected"], result["found"])


def test_on_one_rank() -> None:
    (result,) = ours("penalty_on_one_rank", 1)
    assert not differences(result["expected"], result["found"])


def test_each_unit_is_reduced_once_and_gathered_once() -> None:
    for result in ours("one_reduction_for_each_unit"):
        assert result["first"] == {"_allgather_base_": 3}
        assert result["second"] == {"_allgather_base_": 4, "_reduce_scatter_base_": 4}


def test_a_backward_that_keeps_its_graph_reduces_like_any_other() -> None:
    assert [result["reduced"] for result in ours("backward_that_keeps_its_graph")] == [8, 8]


def test_shards_are_in_no_graph() -> None:
    for result in ours("gradients_of_shards"):
        assert "appears to not have been used in the graph" in result["error"]


def test_the_penalty_matters() -> None:
    """The scenarios could not fail if the penalty's gradient were nothing."""
    import double_backward

    model = double_backward.curved()
    double_backward.penalty(model, behaviour.batch(0)).backward()
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    assert torch.stack(norms).max() > 1e-3
