"""Checkpoints saved on 2, 3 or 4 ranks load on any of these numbers, under both implementations.

Each case names the ranks that save and those that load. A checkpoint that torch saved and one that
fsdp_c saved must load under both, hold the state that was saved, and continue with the same bits.
FSDP_C_PARITY_WHOLE=1 adds a mesh of replicas and crosses precisions with formats. Without it each
case has one of them.
"""

from __future__ import annotations

import functools
import itertools
import os
import tempfile
from typing import Any

import checkpoint_resharding as resharding
import pytest
from behaviour import differences
from checkpoint_resharding import FORMATS, PRECISIONS, Checkpoint
from launch import run_ranks

WHOLE = os.environ.get("FSDP_C_PARITY_WHOLE") == "1"
IMPLEMENTATIONS = ("torch", "fsdp_c")
MESHES = ((2,), (3,), (4,), (2, 2)) if WHOLE else ((2,), (3,), (4,))
PAIRS = [(saved, loaded) for saved, loaded in itertools.product(MESHES, MESHES) if saved != loaded]

pytestmark = [pytest.mark.xdist_group("checkpoint_resharding"), pytest.mark.timeout(600)]


def kinds_of(origin: tuple[int, ...], mesh: tuple[int, ...]) -> list[tuple[str, str]]:
    """Precisions and formats that a case tests."""
    if WHOLE:
        return list(itertools.product(PRECISIONS, FORMATS))
    at = PAIRS.index((origin, mesh))
    return [(PRECISIONS[at % len(PRECISIONS)], FORMATS[at % len(FORMATS)])]


def checkpoints_of(
    implementation: str, origin: tuple[int, ...], mesh: tuple[int, ...]
) -> list[Checkpoint]:
    return [Checkpoint(implementation, origin, *kind) for kind in kinds_of(origin, mesh)]


def size_of(mesh: tuple[int, ...]) -> int:
    return mesh[0] * (mesh[1] if len(mesh) > 1 else 1)


@functools.cache
def folder() -> tempfile.TemporaryDirectory[str]:
    """Holds the checkpoints until this process ends."""
    return tempfile.TemporaryDirectory(prefix="fsdp_c_checkpoints_")


@functools.cache
def saved(implementation: str, world: int) -> list[dict[str, Any]]:
    """One launch for all checkpoints of a number of ranks."""
    checkpoints = {
        checkpoint: None
        for origin, mesh in PAIRS
        if size_of(origin) == world
        for checkpoint in checkpoints_of(implementation, origin, mesh)
    }
    arguments = (implementation, folder().name, list(checkpoints))
    return run_ranks(resharding.save_all, world, arguments, timeout=300)


@functools.cache
def loaded(implementation: str, world: int) -> list[dict[Any, Any]]:
    """One launch for all checkpoints that a number of ranks loads."""
    for one, size in itertools.product(IMPLEMENTATIONS, (2, 3, 4)):
        saved(one, size)
    loads = [
        (checkpoint, mesh)
        for origin, mesh in PAIRS
        if size_of(mesh) == world
        for one in IMPLEMENTATIONS
        for checkpoint in checkpoints_of(one, origin, mesh)
    ]
    arguments = (implementation, folder().name, loads)
    return run_ranks(resharding.load_all, world, arguments, timeout=300)


def named(mesh: tuple[int, ...]) -> str:
    return "x".join(map(str, mesh))


@pytest.mark.parametrize("world", sorted({size_of(mesh) for mesh in MESHES}))
def test_training_around_a_save_has_torchs_bits(world: int) -> None:
    for stock, ours in zip(saved("torch", world), saved("fsdp_c", world), strict=True):
        wrong = differences(list(stock.values()), list(ours.values()), f"{list(stock)}")
        assert not wrong, "\n".join(wrong[:20])


@pytest.mark.parametrize(
    ("origin", "mesh"), PAIRS, ids=[f"{named(a)}-to-{named(b)}" for a, b in PAIRS]
)
@pytest.mark.parametrize("writer", IMPLEMENTATIONS)
def test_a_checkpoint_of_another_world_size_continues_with_torchs_bits(
    writer: str, origin: tuple[int, ...], mesh: tuple[int, ...]
) -> None:
    world = size_of(mesh)
    written = saved(writer, size_of(origin))[0]
    for rank, (stock, ours) in enumerate(
        zip(loaded("torch", world), loaded("fsdp_c", world), strict=True)
    ):
        for checkpoint in checkpoints_of(writer, origin, mesh):
            key, where = (checkpoint.name, mesh), f"rank {rank} of {checkpoint.name}"
            wrong = differences(written[checkpoint.name]["saved"], ours[key]["loaded"], where)
            wrong += differences(stock[key], ours[key], where)
            assert not wrong, "\n".join(wrong[:20])
            assert len(stock[key]["loaded"]) == 9 + 3 * 8
