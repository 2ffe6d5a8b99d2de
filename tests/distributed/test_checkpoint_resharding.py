"""Checkpoints saved on 2, 3 or 4 ranks load on any of these numbers, under both implementations.

Each case names the ranks that save and those that load. Checkpoints of torch and of fsdp_c must
load under both. They must hold the state that was saved, and training must continue with the same
bits. By default each case has one precision and one format. FSDP_C_PARITY_WHOLE=1 runs every case
with each precision in each format, and adds a mesh of replicas.
"""

from __future__ import annotations

import functools
import itertools
import os
import tempfile
from typing import Any

import checkpoint_resharding as resharding
import pytest
from behavior import differences
from checkpoint_resharding import FORMATS, PRECISIONS, Checkpoint
from launch import run_ranks

FULL_MATRIX = os.environ.get("FSDP_C_PARITY_WHOLE", "") not in ("", "0")
IMPLEMENTATIONS = ("torch", "fsdp_c")
MESHES = ((2,), (3,), (4,), (2, 2)) if FULL_MATRIX else ((2,), (3,), (4,))
PAIRS = [(saved, loaded) for saved, loaded in itertools.product(MESHES, MESHES) if saved != loaded]

pytestmark = [pytest.mark.xdist_group("checkpoint_resharding"), pytest.mark.timeout(600)]


def settings_of(origin: tuple[int, ...], mesh: tuple[int, ...]) -> list[tuple[str, str]]:
    """Returns the precisions and formats that a case tests."""
    if FULL_MATRIX:
        return list(itertools.product(PRECISIONS, FORMATS))
    index = PAIRS.index((origin, mesh))
    return [(PRECISIONS[index % len(PRECISIONS)], FORMATS[index % len(FORMATS)])]


def checkpoints_of(
    implementation: str, origin: tuple[int, ...], mesh: tuple[int, ...]
) -> list[Checkpoint]:
    return [Checkpoint(implementation, origin, *setting) for setting in settings_of(origin, mesh)]


def size_of(mesh: tuple[int, ...]) -> int:
    return mesh[0] * (mesh[1] if len(mesh) > 1 else 1)


@functools.cache
def folder() -> tempfile.TemporaryDirectory[str]:
    """Holds the checkpoints until this process ends."""
    return tempfile.TemporaryDirectory(prefix="fsdp_c_checkpoints_")


@functools.cache
def save_checkpoints(implementation: str, world: int) -> list[dict[str, Any]]:
    """Saves all checkpoints of ``world`` ranks in one launch; returns each rank's results."""
    checkpoints = {
        checkpoint: None
        for origin, mesh in PAIRS
        if size_of(origin) == world
        for checkpoint in checkpoints_of(implementation, origin, mesh)
    }
    arguments = (implementation, folder().name, list(checkpoints))
    return run_ranks(resharding.save_all, world, arguments, timeout=300)


@functools.cache
def load_checkpoints(implementation: str, world: int) -> list[dict[Any, Any]]:
    """Loads all checkpoints for ``world`` ranks in one launch; returns each rank's results."""
    for writer, size in itertools.product(IMPLEMENTATIONS, (2, 3, 4)):
        save_checkpoints(writer, size)
    loads = [
        (checkpoint, mesh)
        for origin, mesh in PAIRS
        if size_of(mesh) == world
        for writer in IMPLEMENTATIONS
        for checkpoint in checkpoints_of(writer, origin, mesh)
    ]
    arguments = (implementation, folder().name, loads)
    return run_ranks(resharding.load_all, world, arguments, timeout=300)


def mesh_name(mesh: tuple[int, ...]) -> str:
    return "x".join(map(str, mesh))


@pytest.mark.parametrize("world", sorted({size_of(mesh) for mesh in MESHES}))
def test_training_before_and_after_a_save_matches_torch(world: int) -> None:
    for by_torch, by_fsdp_c in zip(
        save_checkpoints("torch", world), save_checkpoints("fsdp_c", world), strict=True
    ):
        mismatches = differences(
            list(by_torch.values()), list(by_fsdp_c.values()), f"{list(by_torch)}"
        )
        assert not mismatches, "\n".join(mismatches[:20])


@pytest.mark.parametrize(
    ("origin", "mesh"), PAIRS, ids=[f"{mesh_name(a)}-to-{mesh_name(b)}" for a, b in PAIRS]
)
@pytest.mark.parametrize("writer", IMPLEMENTATIONS)
def test_checkpoint_of_another_world_size_continues_as_in_torch(
    writer: str, origin: tuple[int, ...], mesh: tuple[int, ...]
) -> None:
    world = size_of(mesh)
    written = save_checkpoints(writer, size_of(origin))[0]
    for rank, (by_torch, by_fsdp_c) in enumerate(
        zip(load_checkpoints("torch", world), load_checkpoints("fsdp_c", world), strict=True)
    ):
        for checkpoint in checkpoints_of(writer, origin, mesh):
            key, label = (checkpoint.name, mesh), f"rank {rank} of {checkpoint.name}"
            mismatches = differences(
                written[checkpoint.name]["saved"], by_fsdp_c[key]["loaded"], label
            )
            mismatches += differences(by_torch[key], by_fsdp_c[key], label)
            assert not mismatches, "\n".join(mismatches[:20])
            # 8 parameters, each with 3 values of AdamW, and a buffer.
            assert len(by_torch[key]["loaded"]) == 8 * (1 + 3) + 1
