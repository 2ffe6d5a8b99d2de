"""Tensor subclasses as parameters: what torch's FSDP2 makes of their gradients, ours makes, too."""

from __future__ import annotations

from behaviour import assert_same


def test_gradients_may_be_subclasses_without_memory_of_their_own() -> None:
    for found in assert_same("gradients_that_are_pairs"):
        for name, results in found.items():
            first_loss, first_gradient = results[0], results[1 if "acc" not in name else 2]
            assert len(first_loss) == 2, "the loss is a pair"
            assert first_gradient[0].abs().sum() > 0, name
