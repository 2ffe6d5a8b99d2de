"""Replicas with different models: ``replicate``, and HSDP."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from divergence import SIZE, Block, Model, make_mesh
from error_messages import error_message

import fsdp_c

KINDS = {
    "rows": "'blocks.1.first.weight' [24, 12]",
    "order of parameters": "'blocks.1.second.weight' [12, 12]",
    "dtype": "torch.float64",
    "frozen parameter": "frozen",
    "number of units": "rank 1 has '' with 4 parameters",
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


def train(model: Any) -> None:
    x = torch.ones(2, SIZE, dtype=next(model.parameters()).dtype)
    for _ in range(2):
        model(x).sum().backward()


def run_one_rank(rank: int, world_size: int) -> str:
    """Returns the message of the RuntimeError of HSDP. The model of the last rank differs."""
    shard = partial(fsdp_c.fully_shard, mesh=make_mesh(hsdp=True))
    model = make_model("frozen parameter" if rank == world_size - 1 else "", shard)
    message = error_message(partial(train, model))
    dist.barrier()
    return message


def run(rank: int, world_size: int, job: str) -> dict[str, str]:
    """Returns the message of the RuntimeError, or "", by difference.

    The models of the second half of the ranks differ. These ranks are a replica.
    """
    function = fsdp_c.replicate if job == "replicate" else fsdp_c.fully_shard
    messages = {}
    for kind in ("", *KINDS):
        shard = partial(function, mesh=make_mesh(hsdp=job == "HSDP"))
        model = make_model(kind if rank >= world_size // 2 else "", shard)
        messages[kind] = error_message(partial(train, model))
        dist.barrier()
    return messages
