"""Dtypes of parameters and gradients match torch where torch's FSDP2 supports them."""

from __future__ import annotations

import pytest
import releases
import torch
from behavior import assert_same, differences, get_exceptions, get_results


def test_complex_parameters_match_torch() -> None:
    by_fsdp_c, by_torch = (get_results("complex_parameters", name) for name in ("fsdp_c", "torch"))
    for result, expected_by_torch in zip(by_fsdp_c, by_torch, strict=True):
        if releases.has("2.15"):  # torch's sum of microbatches is inexact: TORCH_BUGS.md
            case = "reduced in complex128"
            torch.testing.assert_close(
                result[case], expected_by_torch.pop(case), rtol=1e-5, atol=1e-6
            )
        assert (
            differences(expected_by_torch, {case: result[case] for case in expected_by_torch}) == []
        )
        for results in result.values():
            assert all(part.is_complex() and part.imag.abs().sum() > 0 for part in results)


def test_complex_parameters_on_replicas_match_torch() -> None:
    assert_same("complex_parameters_of_replicas", world=4)


def test_complex_parameters_on_one_rank_match_plain_model() -> None:
    (result,) = assert_same("complex_parameters_on_one_rank", world=1)
    for case, (plain, sharded) in result.items():
        assert differences(plain, sharded) == [], case


def test_real_reduce_dtype_applies_to_components_of_complex_gradients() -> None:
    """complex64 is the complex dtype of the reduce dtypes float32 and bfloat16."""
    for by_fsdp_c, default in zip(
        get_results("complex_parameters_reduced_in_real_dtypes", "fsdp_c"),
        get_results("complex_parameters", "fsdp_c"),
    ):
        wide = by_fsdp_c["torch.complex128"]
        assert differences(wide, by_fsdp_c["torch.float64"]) == []
        for case in ("torch.float32", "torch.bfloat16", "computed in bfloat16"):
            assert differences(default["complex64"], by_fsdp_c[case]) == [], case
    if releases.has("2.15"):  # torch drops the imaginary parts silently
        for expected_by_torch in get_results("complex_parameters_reduced_in_real_dtypes", "torch"):
            gradient, *_ = expected_by_torch["torch.float32"]
            assert not gradient.is_complex() or not gradient.imag.any()
        return
    for error in get_exceptions("complex_parameters_reduced_in_real_dtypes", "torch"):
        assert "can't be cast to the desired output type Float" in error.text


def test_complex_and_real_parameters_share_one_unit() -> None:
    for result in get_results("complex_beside_real_parameters", "fsdp_c"):
        for case in ("lazy False", "lazy True"):
            for by_fsdp_c, expected in zip(result[case], result[f"{case}, expected"], strict=True):
                assert by_fsdp_c.dtype == expected.dtype
                torch.testing.assert_close(by_fsdp_c, expected.resolve_neg())
    for error in get_exceptions("complex_beside_real_parameters", "torch"):
        assert "FSDP expects uniform original parameter dtype" in error.text


def test_complex32_gradients_are_reduced() -> None:
    for halves, singles in get_results("complex32_parameters", "fsdp_c"):
        for by_fsdp_c, expected in zip(halves, singles, strict=True):
            torch.testing.assert_close(by_fsdp_c, expected, rtol=2e-2, atol=2e-2)


def test_frozen_parameters_of_dtypes_unsupported_by_gloo_are_gathered() -> None:
    for result in get_results("frozen_parameters_of_one_dtype", "fsdp_c"):
        assert len(result) == 9 and all(result.values()), result


def test_gradients_of_parameters_used_twice_match_torch() -> None:
    """Below 2.15, torch adds the gradients of one backward in the compute dtype.

    From 2.15 on, it adds those of a first backward without sync in the reduce dtype.
    """
    results = assert_same("parameters_used_twice")
    for result in results:
        assert all(grad.dtype == torch.float32 for grads in result.values() for grad in grads)


@pytest.mark.torch("2.15")
def test_grad_dtype_of_parameters_is_followed_as_in_torch() -> None:
    for result in assert_same("parameters_with_grad_dtype"):
        assert result["wider"][0].dtype == torch.float32
        assert result["narrower"][0].dtype == torch.bfloat16
        assert result["any, reduced in float32"][0].dtype == torch.float32
        assert len(result) == 9


@pytest.mark.torch("2.15")
def test_grad_dtype_of_unsharded_parameters_matches_torch() -> None:
    assert_same("grad_dtype_during_a_step")


@pytest.mark.torch("2.15")
def test_unused_parameter_without_grad_dtype_and_reduce_dtype_raises_error_of_torch() -> None:
    for result in assert_same("unused_parameters_with_any_grad_dtype"):
        assert set(result) == {"reduce None, raised", "reduce torch.float32"}


def test_unreduced_gradients_in_reduce_dtype_are_visible_as_in_torch() -> None:
    (result,) = assert_same("unreduced_gradients_read_before_reduction", world=1)
    assert result["torch.bfloat16 waits"]
    assert bool(result["torch.float32 waits"]) == releases.has("2.15")
