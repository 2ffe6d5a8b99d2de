"""Checkpoints of FSDP1 and DDP are loaded by the README's recipes; training goes on as there."""

from __future__ import annotations

from pathlib import Path

import moving_in
import pytest
from launch import run_ranks


@pytest.mark.parametrize("recipe", [moving_in.fsdp1, moving_in.ddp], ids=["fsdp1", "ddp"])
def test_training_goes_on_from_an_old_checkpoint(recipe: object, tmp_path: Path) -> None:
    run_ranks(recipe, 2, (str(tmp_path),))  # type: ignore[arg-type]


def test_stock_fsdp1_loses_half_of_adamws_state_on_the_cpu(tmp_path: Path) -> None:
    """Not a wish: the day it fails, our own test can use AdamW and the README drop its warning."""
    run_ranks(moving_in.fsdp1_saves_one_tensor_for_two, 2, (str(tmp_path),))
