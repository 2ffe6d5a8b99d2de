"""Backwards that start or end below the root set gradients before they return."""

from __future__ import annotations

import pytest
from behavior import assert_same, get_results


@pytest.mark.torch("2.13")  # earlier releases of torch fail in most scenarios
@pytest.mark.parametrize(
    "scenario",
    [
        "chunked_losses",
        "chunked_losses_with_other_settings",
        "chunked_losses_on_other_meshes",
        "chunked_losses_training_only_the_head",
        "group_members_called_directly",
        "opaque_root_outputs",
        "backwards_within_a_backward",
        "reentrant_checkpoint_of_the_head",
        "gradients_with_respect_to_the_hidden_state",
        "gradients_in_a_reused_array",
    ],
)
def test_gradients_of_partial_backward_match_torch(scenario: str) -> None:
    assert_same(scenario)


def test_chunked_head_backward_sets_gradients_immediately() -> None:
    """The comparison with torch would also pass if both left all gradients at None."""
    for *steps, _weights in get_results("chunked_losses_training_only_the_head", "fsdp_c"):
        assert len(steps) == 3
        for (_, gradients), _ in steps:
            assert gradients["head.weight"] is not None
