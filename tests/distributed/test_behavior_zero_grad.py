"""``zero_grad`` after a microbatch without gradient synchronization drops its gradients."""

from __future__ import annotations

from behavior import differences, get_results


def test_zero_grad_of_module_or_optimizer_drops_deferred_gradients() -> None:
    """torch's ``zero_grad`` of a parent module does not reach deferred gradients."""
    for result in get_results("microbatches_dropped_by_zero_grad", "fsdp_c"):
        expected = result.pop("without microbatch")
        kept = [case for case, grads in result.items() if differences(expected, grads)]
        assert kept == ["parent", "parent, replicas"]


def test_torch_reduces_gradients_that_zero_grad_has_dropped() -> None:
    """If this test fails, torch has changed; update tests/TORCH_BUGS.md and docs."""
    for result in get_results("microbatches_dropped_by_zero_grad", "torch"):
        expected = result.pop("without microbatch")
        kept = [case for case, grads in result.items() if differences(expected, grads)]
        assert kept == [
            case
            for case in result
            if case not in ("module, without reshard", "parent, without reshard")
        ]


def test_zero_grad_of_optimizer_drops_gradients_of_its_parameters_only() -> None:
    """``linear`` has torch's ``zero_grad``, because it is not a sharded module itself."""
    for result in get_results("zero_grad_of_some_parameters", "fsdp_c"):
        for name in result["nothing"]:
            for case, dropped in {"block": name.startswith("0."), "linear": False}.items():
                expected = result["all" if dropped else "nothing"][name]
                assert differences(expected, result[case][name]) == [], (case, name)
            assert differences(result["all"][name], result["nothing"][name]) != []
