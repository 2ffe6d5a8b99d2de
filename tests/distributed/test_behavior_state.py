"""State dicts, conversions and the meta device match torch, or work where torch fails."""

from __future__ import annotations

import pytest
import torch
from behavior import assert_same, differences, get_exceptions, get_results


@pytest.mark.parametrize(
    "name",
    [
        "state_dict_of_a_model",
        "loaded_state_dict",
        "converted_model",
        "converted_between_backwards",
        "full_state_dicts",
        "sharded_state_dicts",
    ],
)
def test_state_scenario_matches_torch(name: str) -> None:
    assert_same(name)


def test_state_dict_aliases_the_trained_weights() -> None:
    for weights, state_dict, equal, same_memory, _ in assert_same(
        "state_dict_aliases_trained_weights"
    ):
        assert differences(weights, state_dict) == []
        assert all(equal) and all(same_memory)


def test_tensors_assigned_by_load_state_dict_are_trained() -> None:
    for result in assert_same("state_assigned_by_load_state_dict"):
        assert all(result)


def test_training_from_a_loaded_state_dict_continues_with_equal_bits() -> None:
    for name, first in (("full_state_dicts", "broadcast"), ("sharded_state_dicts", "loaded")):
        for result in get_results(name, "fsdp_c"):
            assert differences(result[first], result["continued"]) == []


def test_model_from_the_meta_device_trains_as_in_torch_and_equally_after_assign_and_broadcast() -> (
    None
):
    for result in assert_same("meta_device"):
        assert differences(result["assigned"], result["broadcast"]) == []


def test_forward_on_the_meta_device_raises_and_the_model_trains_after_to_empty() -> None:
    """torch raises the same error, but its model cannot train afterwards."""
    for by_fsdp_c, by_torch, expected in zip(
        get_results("forward_on_the_meta_device", "fsdp_c"),
        get_results("forward_on_the_meta_device", "torch"),
        get_results("meta_device", "fsdp_c"),
    ):
        assert by_fsdp_c["message"].startswith("FSDP parameters should be materialized")
        assert by_fsdp_c["message"] == by_torch["message"]
        assert differences(by_fsdp_c["trained"], expected["trained"]) == []
        assert "param_dtype" in by_torch["broken"]


def test_trained_model_can_be_converted_to_double() -> None:
    """torch fails, because it gathers into buffers of the old dtype."""
    for output, expected, gradients in get_results("converted_after_training", "fsdp_c"):
        assert differences(expected, output) == []
        assert all(gradient.dtype == torch.float64 for gradient in gradients.values())
    for error in get_exceptions("converted_after_training", "torch"):
        assert "dtype double, but got float" in error.text


def test_dtype_conversion_of_model_between_backwards_casts_unreduced_gradients() -> None:
    """torch fails, because it gathers into buffers of the old dtype."""
    for once, twice in get_results("converted_for_good_between_backwards", "fsdp_c"):
        for name, gradient in twice.items():
            assert gradient.dtype == torch.bfloat16
            torch.testing.assert_close(gradient, 2 * once[name], rtol=0.1, atol=0.01)
    get_exceptions("converted_for_good_between_backwards", "torch")


def test_dtype_conversion_of_model_before_the_all_reduce_raises() -> None:
    get_exceptions("converted_before_the_all_reduce", "torch")
    for error in get_exceptions("converted_before_the_all_reduce", "fsdp_c"):
        assert "parameter '3.weight' was converted" in error.text


def test_swap_tensors_keeps_parameter_objects() -> None:
    for result in assert_same("swapped_parameters"):
        assert all(result["same objects"])
        assert differences(result["loaded"], result["assigned"]) == []


def test_trained_model_can_be_converted_by_swap_tensors() -> None:
    """torch fails, because it gathers into buffers of the old dtype."""
    for swapped, expected in get_results("swapped_after_training", "fsdp_c"):
        assert differences(expected, swapped) == []
        assert all(gradient.dtype == torch.float64 for gradient in swapped.values())
    for error in get_exceptions("swapped_after_training", "torch"):
        assert "dtype double, but got float" in error.text


def test_checkpoints_are_interchangeable_with_torch() -> None:
    for result in get_results("checkpoints", "fsdp_c"):
        assert len(result) == 6
        expected = result["torch continued"]
        for case, results in result.items():
            assert differences(expected, results) == [], case


def test_state_dicts_of_shared_and_uneven_parameters_match_torch() -> None:
    for result in assert_same("shared_and_uneven_parameters"):
        assert result["same object"]
