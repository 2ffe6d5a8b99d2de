"""Backwards that begin and end elsewhere than at the root: gradients are there when they return."""

from __future__ import annotations

import pytest
from behaviour import assert_same, returned


@pytest.mark.torch("2.13")  # torch itself fails in most of them before
@pytest.mark.parametrize(
    "scenario",
    [
        "chunked_losses",
        "chunked_losses_of_all_kinds",
        "chunked_losses_on_other_meshes",
        "only_the_head_is_trained_by_chunks",
        "a_child_of_a_list_called_alone",
        "outputs_that_nobody_looks_into",
        "backwards_inside_a_backward",
        "reentrant_checkpoints_of_a_part",
        "gradients_with_respect_to_the_hidden_state",
        "gradients_over_an_array_that_is_used_again",
    ],
)
def test_gradients_are_there_when_backward_returns(scenario: str) -> None:
    assert_same(scenario)


def test_a_chunk_trains_the_head_at_once() -> None:
    """What stock and ours agree on is not that there is nothing."""
    for found in returned("only_the_head_is_trained_by_chunks", "fsdp_c"):
        assert all(step[1]["head.weight"] is not None for step in found[:-1])
