"""Recipes of docs/migrate.md load FSDP1 and DDP checkpoints, and training gives equal losses."""

from __future__ import annotations

from pathlib import Path

import checkpoint_migration
import pytest
from launch import run_ranks


@pytest.mark.parametrize(
    "recipe", [checkpoint_migration.fsdp1, checkpoint_migration.ddp], ids=["fsdp1", "ddp"]
)
def test_training_continues_from_fsdp1_and_ddp_checkpoints(recipe: object, tmp_path: Path) -> None:
    run_ranks(recipe, 2, (str(tmp_path),))  # type: ignore[arg-type]


def test_torch_fsdp1_checkpoint_on_cpu_loses_exp_avg(tmp_path: Path) -> None:
    """If this test fails, torch is fixed: use AdamW in the recipe, and edit docs/migrate.md."""
    run_ranks(checkpoint_migration.fsdp1_saves_exp_avg_aliased_to_exp_avg_sq, 2, (str(tmp_path),))
