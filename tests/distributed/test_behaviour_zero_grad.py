"""``zero_grad`` after a microbatch without synchronisation drops what that has left."""

from __future__ import annotations

from behaviour import differences, returned


def test_zero_grad_drops_gradients_that_wait() -> None:
    for found in returned("dropped_microbatches", "fsdp_c"):
        alone = found.pop("alone")
        kept = [case for case, grads in found.items() if differences(alone, grads)]
        assert kept == []


def test_stocks_come_back_with_the_next_reduction() -> None:
    """Not a wish: the day it fails, torch has changed and our README must too."""
    for found in returned("dropped_microbatches", "torch"):
        alone = found.pop("alone")
        kept = [case for case, grads in found.items() if differences(alone, grads)]
        assert kept == [
            case for case in found if case not in ("module, staying", "parent, staying")
        ]


def test_only_the_parameters_that_were_meant_lose_their_gradients() -> None:
    for found in returned("microbatches_of_other_parameters", "fsdp_c"):
        for name in found["nothing"]:
            meant = {"block": name.startswith("0."), "linear": name.startswith("0.linear")}
            for case, dropped in meant.items():
                expected = found["all" if dropped else "nothing"][name]
                assert differences(expected, found[case][name]) == [], (case, name)
            assert differences(found["all"][name], found["nothing"][name]) != []
