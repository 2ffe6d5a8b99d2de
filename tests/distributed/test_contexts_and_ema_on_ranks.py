"""Clipping, full parameters, loading, weight averages and generation on several ranks."""

from __future__ import annotations

from pathlib import Path

import contexts_and_ema
import pytest
from launch import run_ranks
from safetensors_writer import write


@pytest.mark.parametrize("world", [2, 4])
def test_clip_grad_norm_matches_torch_with_one_collective(world: int) -> None:
    run_ranks(contexts_and_ema.clip, world)


@pytest.mark.parametrize("world", [2, 3])
def test_full_state_dict_of_a_rank_or_a_file_is_loaded_on_all_ranks(
    world: int, tmp_path: Path
) -> None:
    write(tmp_path / "model.safetensors", contexts_and_ema.full_values())
    run_ranks(contexts_and_ema.load, world, (str(tmp_path),))


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_with_different_models_load_their_own_values(world: int) -> None:
    run_ranks(contexts_and_ema.load_stages, world)


def test_load_full_state_dict_with_unequal_bucket_sizes_raises_on_all_ranks() -> None:
    run_ranks(contexts_and_ema.load_with_other_buckets, 2)


def test_load_full_state_dict_without_extra_state_on_rank_0_raises_on_all_ranks() -> None:
    run_ranks(contexts_and_ema.load_without_extra_state, 2)


def test_load_and_trace_work_without_numpy() -> None:
    run_ranks(contexts_and_ema.without_numpy, 2)


def test_auto_shard_with_units_of_embedding_and_head_keeps_bits() -> None:
    run_ranks(contexts_and_ema.separate_ends, 2)


def test_full_params_ema_generation_and_old_checkpoints_work_on_two_ranks() -> None:
    run_ranks(contexts_and_ema.contexts_ema_and_checkpoints, 2)
