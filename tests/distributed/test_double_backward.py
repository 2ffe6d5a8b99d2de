"""Double backward through units that reshard: torch fails (B8), fsdp_c has the right results.

Expected are the results of the plain model. Scenarios that call ``compare_with_torch`` expect those
of torch's FSDP2 that never reshards. Results must have equal bits, except in the tests with "close"
in their names, and except for the gradients of ``SUMMED_IN`` from torch 2.15 on.
``workers/double_backward.py`` computes the expected results. tests/TORCH_BUGS.md lists the bugs of
torch.
"""

from __future__ import annotations

from typing import Any

import behavior
import pytest
import torch
from behavior import differences
from launch import RanksFailed, run_ranks
from releases import has
from test_torch_bugs import differences_beyond_rounding

MODULES = ("double_backward",)
BIT_EQUAL = [
    "gradient_penalty",
    "penalty_without_loss",
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
    "hessian_of_the_outputs",
    "error_between_the_two_backwards",
    "penalty_with_manual_finalization",
]
SUMMED_IN = {
    "penalty_in_mixed_precision": torch.bfloat16,
    "penalty_with_a_reduce_dtype_and_accumulation": torch.float32,
}
"""Dtype in which fsdp_c adds the gradients of a norm from both backwards.

The reference is torch, which uses the wider reduce dtype from 2.15 on (test_behavior_dtypes.py).
"""
SEVERAL_REDUCTIONS = ["penalty_of_wgan_gp", "backward_with_create_graph"]


def assert_same_except_norm_weights(expected: Any, found: Any, summed_in: torch.dtype) -> None:
    """Asserts equal bits; weights of norms may differ by two roundings in ``summed_in``."""
    sums = [name for name in expected if name.endswith("norm.weight")]
    for name in sums:
        expected_sum = expected.pop(name)
        limit = 2 * torch.finfo(summed_in).eps * expected_sum.abs().max().item()
        torch.testing.assert_close(found.pop(name), expected_sum, rtol=0, atol=limit)
    assert sums and differences(expected, found) == []


def run_scenario(name: str, world: int = 2) -> list[Any]:
    """Runs a scenario under fsdp_c only: torch's ranks would crash (see the first test)."""
    return behavior.get_results(name, "fsdp_c", world, MODULES)


def assert_freed(results: list[Any]) -> None:
    assert [result["unsharded_bytes"] for result in results] == [0] * len(results)


def run_torch(rank: int, world: int, name: str) -> None:
    import double_backward

    run: Any = getattr(double_backward, name)
    run(behavior.Api("torch", rank, world, None))  # type: ignore[arg-type]  # writes no files


@pytest.mark.parametrize(
    "name",
    ["gradient_penalty", "penalty_that_reshards_after_backward_only", "hessian_of_the_outputs"],
)
def test_torch_reads_freed_parameters_in_double_backward(name: str) -> None:
    with pytest.raises(RanksFailed) as failed:
        run_ranks(run_torch, 2, (name,))
    outputs = [report.status + report.output for report in failed.value.reports]
    assert any("SIGSEGV" in end or "storage of size 0" in end for end in outputs)


@pytest.mark.parametrize("name", BIT_EQUAL)
def test_double_backward_results_match_a_model_that_frees_no_parameters(name: str) -> None:
    for rank, result in enumerate(run_scenario(name)):
        if has("2.15") and name in SUMMED_IN:
            assert_same_except_norm_weights(
                dict(result["expected"]), dict(result["found"]), SUMMED_IN[name]
            )
            continue
        mismatches = differences(result["expected"], result["found"], f"rank {rank}")
        assert not mismatches, "\n".join(mismatches[:20])
    if name != "penalty_that_never_reshards":
        assert_freed(run_scenario(name))


@pytest.mark.parametrize("name", SEVERAL_REDUCTIONS)
def test_gradients_of_several_reductions_are_close_to_plain_model(name: str) -> None:
    for rank, result in enumerate(run_scenario(name)):
        mismatches = differences_beyond_rounding(
            result["expected"], result["found"], f"rank {rank}"
        )
        assert not mismatches, "\n".join(mismatches[:20])
    assert_freed(run_scenario(name))


@pytest.mark.parametrize("name", ["penalty_with_a_smaller_group", "penalty_with_replicas"])
def test_double_backward_on_four_ranks_is_close_to_plain_model(name: str) -> None:
    for rank, result in enumerate(run_scenario(name, 4)):
        mismatches = differences_beyond_rounding(
            result["expected"], result["found"], f"rank {rank}"
        )
        assert not mismatches, "\n".join(mismatches[:20])
    assert_freed(run_scenario(name, 4))


def test_double_backward_of_replicated_units_is_close_to_plain_model() -> None:
    for result in run_scenario("penalty_of_replicated_units"):
        assert not differences_beyond_rounding(result["expected"], result["found"])


def test_double_backward_on_one_rank_matches_plain_model() -> None:
    (result,) = run_scenario("penalty_on_one_rank", 1)
    assert not differences(result["expected"], result["found"])


def test_double_backward_gathers_and_reduces_each_unit_once() -> None:
    for result in run_scenario("one_reduction_for_each_unit"):
        assert result["first"] == {"_allgather_base_": 3}
        assert result["second"] == {"_allgather_base_": 4, "_reduce_scatter_base_": 4}


def test_backward_with_create_graph_reduces_in_both_backwards() -> None:
    assert [result["reduced"] for result in run_scenario("backward_with_create_graph")] == [8, 8]


def test_autograd_grad_of_sharded_parameters_raises() -> None:
    for result in run_scenario("gradients_of_shards"):
        assert "appears to not have been used in the graph" in result["error"]


def test_penalty_without_the_loss_has_nonzero_gradients() -> None:
    """If the penalty had no gradient, the other tests would pass without double backward."""
    import double_backward

    model = double_backward.curved_model()
    double_backward.penalty(model, behavior.batch(0)).backward()
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    assert torch.stack(norms).max() > 1e-3
