"""Replicas with different models: ``replicate``, and HSDP."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from divergence import LIMIT_SECONDS, SIZE, Block, Model
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import fsdp_c

KINDS = {
    "rows": "'blocks.1.first.weight' [24, 12]",
    "order of parameters": "'blocks.1.second.weight' [12, 12]",
    "dtype": "torch.float64",
    "frozen parameter": "frozen",
    "number of units": "unit",
}
"""Difference -> part of the message about the model that differs."""


def make_model(kind: str, shard: Callable[[Any], Any]) -> Any:
    """Returns a sharded model. ``kind``: its difference, "": none."""
    torch.manual_seed(0)
    rows = 2 * SIZE if kind == "rows" else SIZE
    blocks = [Block(), Block(rows, swapped=kind == "order of parameters"), Block()]
    model = Model(blocks)
    if kind == "dtype":
        model.double()
    if kind == "frozen parameter":
        blocks[1].first.weight.requires_grad_(False)
    for block in blocks[: -1 if kind == "number of units" else None]:
        shard(block)
    return shard(model)


def train(model: Any) -> str:
    """Returns the message of the RuntimeError of two steps, or "no error"."""
    dtype = next(model.parameters()).dtype
    try:
        for _ in range(2):
            model(torch.ones(2, SIZE, dtype=dtype)).sum().backward()
    except RuntimeError as error:
        return str(error)
    return "no error"


def run_replicas(rank: int, world_size: int) -> dict[str, str]:
    """The model of the last rank differs."""
    messages = {}
    for kind in ("", *KINDS):
        group = dist.new_group(timeout=timedelta(seconds=LIMIT_SECONDS))
        mesh = DeviceMesh.from_group(group, "cpu")
        model = make_model(
            kind if rank == world_size - 1 else "",
            lambda module, mesh=mesh: fsdp_c.replicate(module, mesh=mesh),
        )
        messages[kind] = train(model)
        dist.barrier()
    return messages


def run_hsdp(rank: int, world_size: int) -> dict[str, str]:
    """The models of the second replica, ranks 2 and 3, differ from those of ranks 0 and 1."""
    messages = {}
    for kind in ("", *KINDS):
        # No group of an earlier case, because a group is not used after a mismatch.
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        for dim in ("replicate", "shard"):
            dist.distributed_c10d._set_pg_timeout(
                timedelta(seconds=LIMIT_SECONDS), mesh.get_group(dim)
            )
        model = make_model(
            kind if rank >= 2 else "",
            lambda module, mesh=mesh: fsdp_c.fully_shard(module, mesh=mesh),
        )
        messages[kind] = train(model)
        dist.barrier()
    return messages
