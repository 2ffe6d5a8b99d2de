"""The step that the ranks of test_trace.py run: one rank is late."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fsdp_c

LATE = 2.0  # seconds; longer than the delays of a busy machine


class Late(nn.Linear):
    """A layer that delays rank 1 if ``is_late``."""

    is_late = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_late and dist.get_rank() == 1:
            time.sleep(LATE)
        return super().forward(x)


def trace_late_rank(rank: int, world_size: int, impl: str, folder: str) -> tuple[Any, str]:
    """Returns all ranks' spans and the summary of the second step, in which rank 1 is late.

    Rank 0 writes the diagram and the Chrome trace.
    """
    fully_shard = fsdp_c.fully_shard if impl == "fsdp_c" else torch_fully_shard
    model: Any = nn.Sequential(Late(8, 8), nn.Linear(8, 8))
    for unit in model:
        fully_shard(unit)
    fully_shard(model)
    for is_late in (False, True):
        model[0].is_late = is_late
        with fsdp_c.trace(model) as timeline:
            model(torch.ones(2, 8)).sum().backward()
    timeline.plot(f"{folder}/{rank}.png")
    timeline.save(f"{folder}/{rank}.json")
    return timeline.ranks, timeline.summary()
