"""Training: evaluation, reductions, optimizers, checkpointing, compile and containers."""

from __future__ import annotations

import pytest
import torch
from behavior import assert_same, differences, get_exceptions, get_results

# ---- an evaluation between backward and the optimizer's step ----


def test_evaluation_before_the_optimizer_step_leaves_no_stale_weights() -> None:
    """The weights are written by optimizers of several kinds, or directly by user code."""
    for result in get_results("evaluation_before_step", "fsdp_c"):
        stale = [case for case, losses in result.items() if losses["with"] != losses["without"]]
        assert stale == []


def test_torch_uses_stale_weights_after_an_evaluation_before_the_optimizer_step() -> None:
    """If this test fails, torch has changed; update tests/TORCH_BUGS.md and docs."""
    for result in get_results("evaluation_before_step", "torch"):
        stale = [case for case, losses in result.items() if losses["with"] != losses["without"]]
        assert stale == [case for case in result if case != "reshard True"]


def test_evaluation_after_the_step_uses_the_new_weights() -> None:
    """A further evaluation before the step ("around") changes no result. With torch it does."""
    for by_fsdp_c, by_torch in zip(
        get_results("evaluations_around_a_step", "fsdp_c"),
        get_results("evaluations_around_a_step", "torch"),
    ):
        assert by_fsdp_c["after"] == by_fsdp_c["around"] == by_torch["after"]
        assert by_torch["after"] != by_torch["around"]


def test_gather_counts_of_evaluations_match_torch() -> None:
    for result in assert_same("gathers_of_evaluations"):
        assert result["reshard False"] == [4, 0, 0, 4, 0, 0]


def test_training_after_first_forward_in_inference_mode_matches_no_grad() -> None:
    """torch fails, because the first forward allocates inference tensors that it reuses."""
    for result, (expected,) in zip(
        get_results("first_forward_in_inference_mode", "fsdp_c"),
        get_results("first_forward_without_grad", "torch"),
    ):
        for results in result:
            assert differences(expected, results) == []
    for error in get_exceptions("first_forward_in_inference_mode", "torch"):
        assert "inference tensor" in error.text.lower()


# ---- the arithmetic of reductions ----


@pytest.mark.parametrize("factor", [1, 3, 4])
def test_divide_factor_divides_the_sum_on_gloo(factor: int) -> None:
    for result in get_results("divide_factor", "fsdp_c"):
        first, second = result["local"]
        expected = {name: first[name] / factor + second[name] / factor for name in first}
        assert differences(expected, result[factor]) == []


def test_torch_raises_for_a_divide_factor_on_gloo() -> None:
    for error in get_exceptions("divide_factor", "torch"):
        assert error.kind == "RuntimeError"
        assert "PREMUL_SUM" in error.text


@pytest.mark.parametrize(
    "name", ["divide_factor_of_the_world_size", "forced_sums", "reductions_in_fp16"]
)
def test_reduction_scenario_matches_torch(name: str) -> None:
    assert_same(name)


def test_reduction_settings_give_different_results() -> None:
    """If they had no effect, test_reduction_scenario_matches_torch would pass without them."""
    for fp16 in get_results("reductions_in_fp16", "fsdp_c"):
        assert differences(fp16[0], fp16[1]) and differences(fp16[1], fp16[2])
    for sums in get_results("forced_sums", "fsdp_c"):
        assert differences(sums[0], sums[1]) and differences(sums[0], sums[2])


# ---- optimizers ----


@pytest.mark.parametrize("name", ["optimizers", "clipped_gradients"])
def test_optimizer_scenario_matches_torch(name: str) -> None:
    assert_same(name)


def test_optimizer_in_backward_steps_each_parameter_once() -> None:
    for result in assert_same("optimizer_in_backward"):
        names = list(result["weights"])
        assert sorted(result["calls"]) == sorted(3 * names)
        assert all(gradient is not None for gradient in result["grads"].values())


# ---- activation checkpointing, several forwards, graphs kept ----


def test_activation_checkpointing_matches_torch() -> None:
    for result in assert_same("activation_checkpointing"):
        assert len(result) == 12
        # Neither the recomputed region nor the position of the hooks changes a bit.
        first, *rest = [[v for v in run if isinstance(v, float)] for run in result.values()]
        assert all(losses == first for losses in rest)


@pytest.mark.parametrize("name", ["several_forwards", "forwards_without_backward"])
def test_non_alternating_forwards_and_backwards_match_torch(name: str) -> None:
    assert_same(name)


def test_repeated_backwards_with_retain_graph_accumulate_gradients() -> None:
    for result in assert_same("kept_graphs"):
        assert len(result) == 3
        for results in result.values():
            once, _, thrice = results["gradients"]
            for name, gradient in once.items():
                assert torch.equal(thrice[name], gradient + gradient + gradient)


def test_autograd_grad_of_inputs_leaves_states_idle() -> None:
    for result in assert_same("gradients_of_inputs"):
        assert set(result["states"]) == {"IDLE", "IDLE SHARDED"}
        assert all(gradient is None for gradient in result["grads"].values())


# ---- torch.compile, containers ----


@pytest.mark.parametrize("name", ["compiled_blocks", "compiled_model"])
def test_compiled_models_match_uncompiled_ones(name: str) -> None:
    for by_fsdp_c, by_torch, expected in zip(
        get_results(name, "fsdp_c"), get_results(name, "torch"), get_results("uncompiled", "torch")
    ):
        assert by_fsdp_c["graphs"] > 0 and by_torch["graphs"] > 0
        for result in (by_fsdp_c, by_torch):
            assert differences(expected, result["eager"]) == []
            assert differences(expected, result["counted"]) == []


@pytest.mark.torch("2.13")
def test_containers_as_inputs_and_outputs_match_torch() -> None:
    for result in assert_same("containers"):
        assert len(result) == 14
        for case in result.values():
            assert case["input gradient"] is not None
            assert all(gradient is not None for gradient in case["grads"].values())


def test_casts_of_inputs_and_outputs_keep_tensor_subclasses_as_in_torch() -> None:
    for result in assert_same("tensor_subclasses_as_inputs_and_outputs"):
        assert len(result) == 16
        for case, (seen, output, _, calls, *_) in result.items():
            kind, *_ = case.split()
            assert kind in dict(seen) and output == kind
            assert bool(calls) == (kind == "Recorded" and "None, None" not in case)


@pytest.mark.torch("2.13")
def test_view_outputs_warn_as_in_torch() -> None:
    for first, second, unwanted, _ in assert_same("views_as_outputs"):
        assert len(first) == 2 and first == second
        assert all("(FSDPView) returned a view tensor" in message for _, message in first)
        assert unwanted == 0


def test_registered_forward_method_unshards_and_reshards() -> None:
    for steps in assert_same("registered_forward_method"):
        assert [weight_type for weight_type, _, _ in steps] == ["DTensor"] * 2
