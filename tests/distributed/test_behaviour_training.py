"""How training behaves: evaluation, reductions, optimizers, checkpointing, compile, containers."""

from __future__ import annotations

import pytest
import torch
from behaviour import assert_same, differences, raised, returned

# ---- an evaluation between backward and the optimizer's step ----


def test_an_evaluation_before_the_step_leaves_no_stale_weights() -> None:
    """Whoever writes the weights: optimizers of every kind, or the user by hand."""
    for found in returned("evaluation_before_step", "fsdp_c"):
        stale = [case for case, losses in found.items() if losses["with"] != losses["without"]]
        assert stale == []


def test_stock_trains_on_stale_weights_after_such_an_evaluation() -> None:
    """Not a wish: the day it fails, torch has changed and our README must too."""
    for found in returned("evaluation_before_step", "torch"):
        stale = [case for case, losses in found.items() if losses["with"] != losses["without"]]
        assert stale == [case for case in found if case != "reshard True"]


def test_an_evaluation_after_the_step_sees_it_even_if_one_before_gathered() -> None:
    for ours, theirs in zip(
        returned("evaluations_around_a_step", "fsdp_c"),
        returned("evaluations_around_a_step", "torch"),
    ):
        assert ours["after"] == ours["around"] == theirs["after"]
        assert theirs["after"] != theirs["around"]


def test_evaluations_gather_as_often_as_stocks() -> None:
    for found in assert_same("gathers_of_evaluations"):
        assert found["False"] == [4, 0, 0, 4, 0, 0]


def test_a_model_trains_after_a_first_forward_in_inference_mode() -> None:
    """In stock what that forward has allocated are inference tensors for ever."""
    for found, (expected,) in zip(
        returned("first_forward_in_inference_mode", "fsdp_c"),
        returned("first_forward_without_grad", "torch"),
    ):
        for results in found:
            assert differences(expected, results) == []
    for error in raised("first_forward_in_inference_mode", "torch"):
        assert "inference tensor" in error.text.lower()


# ---- the arithmetic of reductions ----


@pytest.mark.parametrize("factor", [1, 3, 4])
def test_a_divide_factor_divides_the_sum_on_gloo(factor: int) -> None:
    for found in returned("divide_factor", "fsdp_c"):
        first, second = found["local"]
        expected = {name: first[name] / factor + second[name] / factor for name in first}
        assert differences(expected, found[factor]) == []


def test_stock_cannot_divide_by_a_factor_on_gloo() -> None:
    for error in raised("divide_factor", "torch"):
        assert error.kind == "RuntimeError"
        assert "PREMUL_SUM" in error.text


@pytest.mark.parametrize(
    "name", ["divide_factor_of_the_world_size", "forced_sums", "reductions_in_fp16"]
)
def test_reductions_have_stocks_bits(name: str) -> None:
    assert_same(name)


def test_reductions_of_different_kinds_differ() -> None:
    """So that the comparisons above do not compare one kind with itself."""
    for fp16 in returned("reductions_in_fp16", "fsdp_c"):
        assert differences(fp16[0], fp16[1]) and differences(fp16[1], fp16[2])
    for sums in returned("forced_sums", "fsdp_c"):
        assert differences(sums[0], sums[1]) and differences(sums[0], sums[2])


# ---- optimizers ----


@pytest.mark.parametrize("name", ["optimizers", "clipped_gradients"])
def test_optimizers_have_stocks_results(name: str) -> None:
    assert_same(name)


def test_an_optimizer_in_backward_steps_every_parameter_once() -> None:
    for found in assert_same("optimizer_in_backward"):
        names = list(found["weights"])
        assert sorted(found["calls"]) == sorted(3 * names)
        assert all(gradient is not None for gradient in found["grads"].values())


# ---- activation checkpointing, several forwards, graphs kept ----


def test_activation_checkpointing_of_every_kind() -> None:
    for found in assert_same("activation_checkpointing"):
        assert len(found) == 12
        # What is recomputed, and where the hooks are, changes no bit.
        first, *rest = [[v for v in run if isinstance(v, float)] for run in found.values()]
        assert all(losses == first for losses in rest)


@pytest.mark.parametrize("name", ["several_forwards", "forwards_without_backward"])
def test_forwards_and_backwards_that_do_not_alternate(name: str) -> None:
    assert_same(name)


def test_a_graph_may_be_kept_for_more_backwards() -> None:
    for seen in assert_same("kept_graphs"):
        once, thrice = seen[0], seen[4]
        for name, gradient in once.items():
            assert torch.equal(thrice[name], gradient + gradient + gradient)


def test_gradients_of_inputs_leave_the_states_idle() -> None:
    for found in assert_same("gradients_of_inputs"):
        assert set(found["states"]) == {"IDLE", "IDLE SHARDED"}
        assert all(gradient is None for gradient in found["grads"].values())


# ---- torch.compile, containers ----


@pytest.mark.parametrize("name", ["compiled_blocks", "compiled_model"])
def test_compiled_models_train_as_they_do_uncompiled(name: str) -> None:
    for ours, theirs, expected in zip(
        returned(name, "fsdp_c"), returned(name, "torch"), returned("uncompiled", "torch")
    ):
        assert ours["graphs"] > 0 and theirs["graphs"] > 0
        for found in (ours, theirs):
            assert differences(expected, found["eager"]) == []
            assert differences(expected, found["counted"]) == []


@pytest.mark.torch("2.13")
def test_containers_go_in_and_out() -> None:
    for found in assert_same("containers"):
        assert len(found) == 14
        for case in found.values():
            assert case["input gradient"] is not None
            assert all(gradient is not None for gradient in case["grads"].values())


@pytest.mark.torch("2.13")
def test_views_as_outputs_warn() -> None:
    for first, second, evaluating, _ in assert_same("views_as_outputs"):
        assert first == second == [True, True]
        assert evaluating == 0


def test_a_registered_method_is_a_forward() -> None:
    for seen in assert_same("registered_forward_method"):
        assert seen[0] == seen[3] == "DTensor"
