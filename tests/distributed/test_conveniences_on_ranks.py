"""Everyday conveniences on real ranks: clipping, full parameters, loading, averages, generation."""

from __future__ import annotations

from pathlib import Path

import conveniences
import pytest
from launch import run_ranks
from safetensors_writer import write


@pytest.mark.parametrize("world", [2, 4])
def test_clipping_gives_torchs_totals_and_gradients_in_one_collective(world: int) -> None:
    run_ranks(conveniences.clip, world)


@pytest.mark.parametrize("world", [2, 3])
def test_full_weights_are_loaded_from_a_rank_or_a_file(world: int, tmp_path: Path) -> None:
    write(tmp_path / "model.safetensors", conveniences.full_values())
    run_ranks(conveniences.load, world, (str(tmp_path),))


def test_nothing_needs_numpy() -> None:
    run_ranks(conveniences.without_numpy, 2)


def test_embeddings_and_heads_of_their_own_train_to_the_same_bits() -> None:
    run_ranks(conveniences.separate_ends, 2)


def test_full_parameters_averages_generation_and_old_checkpoints() -> None:
    run_ranks(conveniences.everyday, 2)
