"""What torch's own tests reach for inside of FSDP2; functorch's transforms; more stock mistakes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from behaviour import assert_same, returned

pytestmark = pytest.mark.torch("2.13")  # arguments of foreach_reduce, hooks within transforms


def test_torchs_collectives_take_our_parameters() -> None:
    for seen in assert_same("collectives_by_hand"):
        assert seen[0] == [["Parameter"] * 5, "UNSHARDED"]
        assert seen[2] == seen[5] == [True] * 5
        assert set(seen[8]) == {0}
        assert all(torch.all(gradient == 1.5) for gradient in seen[10:])


def test_torchs_group_can_be_made_by_hand() -> None:
    for seen in assert_same("a_group_made_by_hand"):
        assert seen[1:3] == [["Parameter"] * 3, [True] * 3]
        assert seen[0] == seen[3] == ["DTensor"] * 3


def test_live_model_after_uninstall_trains_with_the_bits_of_torch() -> None:
    for seen in assert_same("training_after_uninstall"):
        calls = [entry for entry in seen if isinstance(entry, int)]
        assert len(calls) == 1 and calls[0] > 0, "a patch of torch's class has no effect"


@pytest.mark.parametrize("name", ["event_of_the_optimizer", "hooks_on_unsharded_gradients"])
def test_as_stock(name: str) -> None:
    assert_same(name)


def test_a_shared_context_shows_that_nothing_is_in_flight() -> None:
    for seen in assert_same("roots_that_share_a_context"):
        assert seen[1:4] == seen[5:8] == [0, 0, None]


def test_transforms_and_backwards_through_them() -> None:
    for found in assert_same("transformed_functions"):
        for reshard in (True, False):
            for name in ("jvp", "vmap"):
                gradients = found[f"{reshard} {name}, backward"]
                assert all(gradient is not None for gradient in gradients.values())


def test_a_jvp_may_be_the_first_forward() -> None:
    for _, tangent, *gradients in assert_same("jvp_as_the_first_forward"):
        assert torch.count_nonzero(tangent) == 0
        assert all(torch.count_nonzero(gradient) > 0 for gradient in gradients)


# ---- stock's mistakes ----


def test_parameters_unfrozen_while_unsharded_are_trained_from_then_on() -> None:
    for seen in returned("unfrozen_while_unsharded", "fsdp_c"):
        assert seen == [True, [True] * 6, True, [True] * 6, [True] * 6]


def test_stock_trains_them_for_one_step() -> None:
    for seen in returned("unfrozen_while_unsharded", "torch"):
        assert seen[:3] == [True, [True] * 6, False]


def test_parameters_frozen_while_unsharded_stay_frozen_when_gathered_again() -> None:
    for gradients, required in returned("frozen_while_unsharded_and_stepped", "fsdp_c"):
        assert gradients == required == [False] * 4 + [True] * 2


def halves(found: dict[str, Any]) -> list[bool]:
    """Whether each gradient in fp16 is that in fp32, as far as fp16 goes."""
    exact, rounded = found["torch.float32"], found["torch.float16"]
    return [torch.allclose(exact[name], rounded[name], rtol=0.01, atol=1e-4) for name in exact]


def test_gradients_in_fp16_are_divided_once() -> None:
    for found in returned("half_precision_with_a_divide_factor", "fsdp_c"):
        assert all(halves(found))


def test_stock_divides_them_twice() -> None:
    for found in returned("half_precision_with_a_divide_factor", "torch"):
        assert not any(halves(found))
