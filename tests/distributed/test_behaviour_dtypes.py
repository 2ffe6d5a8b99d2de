"""Parameters that are no floats: torch's bits where torch's FSDP2 has any."""

from __future__ import annotations

import releases
import torch
from behaviour import assert_same, differences, raised, returned


def test_complex_parameters_have_torchs_bits() -> None:
    ours, theirs = (returned("complex_parameters", name) for name in ("fsdp_c", "torch"))
    for found, stock in zip(ours, theirs, strict=True):
        if releases.has("2.15"):  # stock's sum of microbatches is not exact there: TORCH_BUGS.md
            case = "reduced in complex128"
            torch.testing.assert_close(found[case], stock.pop(case), rtol=1e-5, atol=1e-6)
        assert differences(stock, {case: found[case] for case in stock}) == []
        for results in found.values():
            assert all(part.is_complex() and part.imag.abs().sum() > 0 for part in results)


def test_complex_parameters_of_replicas_have_torchs_bits() -> None:
    assert_same("complex_parameters_of_replicas", world=4)


def test_complex_parameters_on_one_rank_are_those_of_a_model_that_is_not_sharded() -> None:
    (found,) = assert_same("complex_parameters_alone", world=1)
    for case, (plain, sharded) in found.items():
        assert differences(plain, sharded) == [], case


def test_a_real_reduce_dtype_is_that_of_the_parts_of_complex_gradients() -> None:
    for ours, without in zip(
        returned("complex_parameters_reduced_in_real_types", "fsdp_c"),
        returned("complex_parameters", "fsdp_c"),
    ):
        wide = ours["torch.complex128"]
        assert differences(wide, ours["torch.float64"]) == []
        for case in ("torch.float32", "torch.bfloat16", "computed in bfloat16"):
            assert differences(without["complex64"], ours[case]) == [], case
    if releases.has("2.15"):  # which drops the imaginary parts, without a word
        for stock in returned("complex_parameters_reduced_in_real_types", "torch"):
            gradient, *_ = stock["torch.float32"]
            assert not gradient.is_complex() or not gradient.imag.any()
        return
    for error in raised("complex_parameters_reduced_in_real_types", "torch"):
        assert "can't be cast to the desired output type Float" in error.text


def test_complex_beside_real_parameters_in_one_unit() -> None:
    for found in returned("complex_beside_real_parameters", "fsdp_c"):
        for case in ("lazy False", "lazy True"):
            for ours, expected in zip(found[case], found[f"{case}, expected"], strict=True):
                assert ours.dtype == expected.dtype
                torch.testing.assert_close(ours, expected.resolve_neg())
    for error in raised("complex_beside_real_parameters", "torch"):
        assert "FSDP expects uniform original parameter dtype" in error.text


def test_pairs_of_halves_are_reduced() -> None:
    for halves, singles in returned("pairs_of_halves", "fsdp_c"):
        for ours, expected in zip(halves, singles, strict=True):
            torch.testing.assert_close(ours, expected, rtol=2e-2, atol=2e-2)


def test_parameters_of_types_that_gloo_does_not_know_are_gathered() -> None:
    for found in returned("frozen_parameters_of_one_dtype", "fsdp_c"):
        assert len(found) == 9 and all(found.values()), found


def test_what_a_parameter_gets_in_one_backward_is_added_up_in_the_dtype_of_computation() -> None:
    """From 2.15 on stock adds it up in that of the reduction, where it is not reduced at once."""
    ours, theirs = (returned("parameters_used_twice", name) for name in ("fsdp_c", "torch"))
    for found, stock in zip(ours, theirs, strict=True):
        assert differences(stock.pop(0), found.pop(0)) == []
        assert bool(differences(stock, found)) == releases.has("2.15")
        for waiting, grads in stock.items():
            torch.testing.assert_close(found[waiting], grads, rtol=2e-2, atol=2e-3)


def test_gradients_that_wait_in_the_reduce_dtype_are_seen_as_in_torch() -> None:
    (found,) = assert_same("gradients_that_wait_in_their_own_dtype", world=1)
    assert found["torch.bfloat16 waits"] and not found["torch.float32 waits"]
