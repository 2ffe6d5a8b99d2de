"""What ranks of test_trace.py run: a step in which one rank is late."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard as stock_fully_shard

import fsdp_c

LATE = 1.0  # seconds: longer than what a busy machine keeps the other rank waiting for


class Late(nn.Linear):
    """Rank 1 comes late to what follows it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 1:
            time.sleep(LATE)
        return super().forward(x)


def late_rank(rank: int, world_size: int, impl: str, folder: str) -> tuple[Any, str]:
    """All ranks' spans and the summary; rank 0 writes picture and Chrome trace."""
    fully_shard = fsdp_c.fully_shard if impl == "ours" else stock_fully_shard
    model: Any = nn.Sequential(Late(8, 8), nn.Linear(8, 8))
    for unit in model:
        fully_shard(unit)
    fully_shard(model)
    for _ in range(2):
        with fsdp_c.trace(model) as found:
            model(torch.ones(2, 8)).sum().backward()
    found.plot(f"{folder}/{rank}.png")
    found.save(f"{folder}/{rank}.json")
    return found.ranks, found.summary()
