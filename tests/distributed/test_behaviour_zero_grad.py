"""``zero_grad`` after a microbatch without gradient synchronization drops its gradients."""

from __future__ import annotations

from behaviour import differences, returned


def test_zero_grad_of_module_or_optimizer_drops_deferred_gradients() -> None:
    """A module around the sharded module has torch's ``zero_grad``, which does not reach them."""
    for found in returned("dropped_microbatches", "fsdp_c"):
        alone = found.pop("alone")
        kept = [case for case, grads in found.items() if differences(alone, grads)]
        assert kept == ["parent", "parent, replicas"]


def test_stocks_come_back_with_the_next_reduction() -> None:
    """Not a wish: the day it fails, torch has changed and our README must too."""
    for found in returned("dropped_microbatches", "torch"):
        alone = found.pop("alone")
        kept = [case for case, grads in found.items() if differences(alone, grads)]
        assert kept == [
            case for case in found if case not in ("module, staying", "parent, staying")
        ]


def test_zero_grad_of_optimizer_drops_gradients_of_its_parameters_only() -> None:
    """``linear`` is inside a unit and is no sharded module itself, so it has torch's method."""
    for found in returned("microbatches_of_other_parameters", "fsdp_c"):
        for name in found["nothing"]:
            for case, dropped in {"block": name.startswith("0."), "linear": False}.items():
                expected = found["all" if dropped else "nothing"][name]
                assert differences(expected, found[case][name]) == [], (case, name)
            assert differences(found["all"][name], found["nothing"][name]) != []
