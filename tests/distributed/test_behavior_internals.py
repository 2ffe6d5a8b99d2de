"""FSDP2 internals that torch's tests use, functorch transforms, and further bugs of torch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from behavior import assert_same, get_results

pytestmark = pytest.mark.torch("2.13")  # foreach_reduce and hooks within transforms differ before


def test_torchs_collectives_accept_fsdp_c_parameters() -> None:
    for result in assert_same("collectives_called_directly"):
        assert result["types, unsharded by group"] == ["Parameter"] * 5
        assert result["states, unsharded by group"][0] == "UNSHARDED"
        assert result["values by group"] == result["values by parameter"] == [True] * 5
        assert set(result["bytes of outputs"]) == {0}
        assert len(result["gradients"]) == 4
        assert all(torch.all(gradient == 1.5) for gradient in result["gradients"])


def test_param_group_of_torch_can_be_constructed_directly() -> None:
    for result in assert_same("group_constructed_directly"):
        assert result["unsharded"] == ["Parameter"] * 3
        assert result["values"] == [True] * 3
        assert result["constructed"] == result["resharded"] == ["DTensor"] * 3


def test_live_model_after_uninstall_trains_with_the_bits_of_torch() -> None:
    for result in assert_same("training_after_uninstall"):
        assert result["calls of the patch"] > 0, "a patch of torch's class has no effect"


@pytest.mark.parametrize("name", ["event_of_the_optimizer", "hooks_on_unsharded_gradients"])
def test_internals_scenario_matches_torch(name: str) -> None:
    assert_same(name)


def test_shared_comm_context_reports_no_pending_work() -> None:
    for steps in assert_same("roots_that_share_a_context"):
        for step in steps:
            assert step["pending"] == {"events": 0, "reductions": 0, "all-gather": None}


def test_functorch_transforms_and_their_backwards_match_torch() -> None:
    for result in assert_same("transformed_functions"):
        for reshard in (True, False):
            for name in ("jvp", "vmap"):
                gradients = result[f"reshard {reshard}, {name}, backward"]
                assert all(gradient is not None for gradient in gradients.values())


def test_jvp_as_first_forward_matches_torch() -> None:
    for _, tangent, *gradients in assert_same("jvp_as_the_first_forward"):
        assert torch.count_nonzero(tangent) == 0
        assert all(torch.count_nonzero(gradient) > 0 for gradient in gradients)


# ---- bugs of torch ----


def test_parameters_unfrozen_while_unsharded_are_trained() -> None:
    for result in get_results("unfrozen_while_unsharded", "fsdp_c"):
        assert result["loss requires grad"] == [True, True]
        assert result["has gradient"] == [[True] * 6] * 2
        assert result["requires grad"] == [True] * 6


def test_torch_trains_parameters_unfrozen_while_unsharded_for_one_step() -> None:
    for result in get_results("unfrozen_while_unsharded", "torch"):
        assert result["loss requires grad"] == [True, False]
        assert result["has gradient"][0] == [True] * 6


def test_parameters_frozen_while_unsharded_stay_frozen() -> None:
    for gradients, required in get_results("frozen_while_unsharded_and_stepped", "fsdp_c"):
        assert gradients == required == [False] * 4 + [True] * 2


def fp16_matches_fp32(result: dict[str, Any]) -> list[bool]:
    """Returns per gradient whether fp16 and fp32 agree within the precision of fp16."""
    exact, rounded = result["torch.float32"], result["torch.float16"]
    return [torch.allclose(exact[name], rounded[name], rtol=0.01, atol=1e-4) for name in exact]


def test_divide_factor_divides_fp16_gradients_once() -> None:
    for result in get_results("half_precision_with_a_divide_factor", "fsdp_c"):
        assert all(fp16_matches_fp32(result))


def test_torch_divides_fp16_gradients_twice() -> None:
    for result in get_results("half_precision_with_a_divide_factor", "torch"):
        assert not any(fp16_matches_fp32(result))
