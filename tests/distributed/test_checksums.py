"""The guard mode "hash": ranks compare checksums of gathered parameters and reduced gradients."""

from __future__ import annotations

import os

import corrupted_data
import pytest
from launch import run_ranks

FLIPS = int(os.environ.get("FSDP_C_FLIPS") or 100)
"""Flipped bits per transport and number of ranks."""
HASH = {"FSDP_C_GUARD": "hash"}


@pytest.mark.timeout(300 + FLIPS)
@pytest.mark.parametrize("transport", ["gloo", "direct"])
@pytest.mark.parametrize("world", [2, 3, 4])
def test_each_flipped_bit_raises_in_its_step_and_training_continues(
    transport: str, world: int
) -> None:
    env = {**HASH, "FSDP_C_TRANSPORT": transport}
    results = run_ranks(corrupted_data.flip_bits, world, (FLIPS,), env=env, timeout=200 + FLIPS)
    for flips in zip(*(outcomes for outcomes, _ in results)):
        place, _ = flips[0]
        operation, changed = place.split(" of rank ")
        texts = [text for _, text in flips if text]
        # With HSDP, the ranks of the changed rank's process group raise.
        assert len(texts) == (world if world < 4 else 2)
        assert all(f"different data after the {operation} of '" in text for text in texts)
        assert all("call reset_iter_state() and zero_grad()" in text for text in texts)
        if world == 3:
            assert all(f": rank {changed} has checksum" in text for text in texts)
            assert all("2 of 3 ranks have" in text for text in texts)
    assert all(is_equal for _, is_equal in results)


@pytest.mark.parametrize("world", [2, 3])
def test_corrupted_message_of_a_chunk_raises_and_training_continues(world: int) -> None:
    env = {**HASH, "FSDP_C_TRANSPORT": "direct"}
    for texts in run_ranks(corrupted_data.corrupt_message, world, env=env):
        assert "different data after the all-gather of '0' (step 2, outside of a pass)" in texts[0]
        assert texts[1] == ""


def test_guard_mode_on_compares_no_checksums() -> None:
    for outcomes, _ in run_ranks(corrupted_data.flip_bits, 2, (5,), env={"FSDP_C_GUARD": "on"}):
        assert [text for _, text in outcomes] == [""] * 5


def test_different_guard_modes_of_ranks_raise_and_name_the_variable() -> None:
    for text in run_ranks(corrupted_data.train_with_modes, 2, (("hash", "on"),)):
        assert "FSDP_C_GUARD: rank 0 has hash; rank 1 has on" in text


def test_rank_with_the_guard_off_is_not_compared() -> None:
    assert run_ranks(corrupted_data.train_with_modes, 2, (("hash", "off"),)) == ["", ""]


@pytest.mark.parametrize("transport", ["gloo", "direct"])
def test_ranks_that_waited_for_different_gathers_continue_after_a_reset(transport: str) -> None:
    env = {**HASH, "FSDP_C_TRANSPORT": transport}
    assert run_ranks(corrupted_data.reset_after_different_waits, 2, env=env) == ["", ""]


@pytest.mark.parametrize("mode", ["on", "hash"])
@pytest.mark.parametrize("transport", ["gloo", "direct"])
@pytest.mark.parametrize("steps_before", [0, 1])
def test_rank_that_uses_functions_of_torch_has_no_checksum_mismatch(
    transport: str, mode: str, steps_before: int
) -> None:
    """If the rank uses them from the first step on, the ranks compare no checksums."""
    env = {"FSDP_C_TRANSPORT": transport}
    arguments = (mode, steps_before)
    assert run_ranks(corrupted_data.fall_back_on_one_rank, 2, arguments, env=env) == ["", ""]
