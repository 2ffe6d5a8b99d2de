"""State dicts, checkpoints, meta devices: what torch's FSDP2 writes ours reads, and vice versa."""

from __future__ import annotations

import pytest
import torch
from behaviour import assert_same, differences, raised, returned


@pytest.mark.parametrize(
    "name",
    [
        "state_dict_of_a_model",
        "loaded_state_dict",
        "converted_model",
        "full_state_dicts",
        "sharded_state_dicts",
    ],
)
def test_as_stock(name: str) -> None:
    assert_same(name)


def test_a_state_dict_taken_before_training_shows_the_weights_after_it() -> None:
    for now, then, equal, same_memory, _ in assert_same("state_dict_stays_aliased"):
        assert differences(now, then) == []
        assert all(equal) and all(same_memory)


def test_assigned_tensors_are_trained() -> None:
    for found in assert_same("assigned_state_trains_the_assigned_tensors"):
        assert all(found)


def test_a_full_state_dict_continues_where_it_was_taken() -> None:
    for name, first in (("full_state_dicts", "broadcast"), ("sharded_state_dicts", "loaded")):
        for found in returned(name, "fsdp_c"):
            assert differences(found[first], found["continued"]) == []


def test_a_model_made_on_the_meta_device() -> None:
    for found in assert_same("meta_device"):
        assert differences(found["assigned"], found["broadcast"]) == []


def test_a_forward_on_the_meta_device_is_refused_and_can_be_made_good() -> None:
    """Stock refuses it too, but the model stays broken."""
    for ours, theirs, expected in zip(
        returned("forward_on_the_meta_device", "fsdp_c"),
        returned("forward_on_the_meta_device", "torch"),
        returned("meta_device", "fsdp_c"),
    ):
        assert ours["message"].startswith("FSDP parameters should be materialized")
        assert ours["message"] == theirs["message"]
        assert differences(ours["trained"], expected["trained"]) == []
        assert "param_dtype" in theirs["broken"]


def test_a_trained_model_can_change_its_dtype() -> None:
    """Stock gathers into the buffers of the old dtype, and fails."""
    for output, expected, gradients in returned("converted_after_training", "fsdp_c"):
        assert differences(expected, output) == []
        assert all(gradient.dtype == torch.float64 for gradient in gradients.values())
    for error in raised("converted_after_training", "torch"):
        assert "dtype double, but got float" in error.text


def test_parameters_whose_content_is_swapped() -> None:
    for found in assert_same("swapped_parameters"):
        assert all(found["same objects"])
        assert differences(found["loaded"], found["assigned"]) == []


def test_a_trained_model_can_be_converted_by_swaps() -> None:
    """Stock gathers into the buffers of the old dtype, and fails."""
    for swapped, expected in returned("swapped_after_training", "fsdp_c"):
        assert differences(expected, swapped) == []
        assert all(gradient.dtype == torch.float64 for gradient in swapped.values())
    for error in raised("swapped_after_training", "torch"):
        assert "dtype double, but got float" in error.text


def test_checkpoints_are_exchanged_with_stock() -> None:
    for found in returned("checkpoints", "fsdp_c"):
        assert len(found) == 6
        expected = found["torch went on"]
        for case, results in found.items():
            assert differences(expected, results) == [], case


def test_shared_and_uneven_parameters() -> None:
    for found in assert_same("shared_and_uneven_parameters"):
        assert found["same object"]
