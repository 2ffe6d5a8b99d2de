"""A rank that an exception ends: in forward, between steps, or after the time limit.

    python ending_ranks.py RANK FOLDER CASE

Run by ``test_stalled_ranks.py`` in new interpreters, because an exception ends them.
"""

from __future__ import annotations

import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

import fsdp_c

CASES = {"raises": 1, "raises between steps": 1, "exceeds the limit": 0}
"""Case -> the rank that ends by its exception. In other cases no rank does."""


def main(rank: int, folder: Path, case: str) -> None:
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    group = dist.new_group(timeout=timedelta(seconds=60))
    mesh = dist.DeviceMesh.from_group(group, "cpu")
    model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fsdp_c.fully_shard(layer, mesh=mesh)
    fsdp_c.fully_shard(model, mesh=mesh)
    model(torch.ones(2, 4)).sum().backward()
    if case == "exceeds the limit":
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=1.5), group)

    def fail(*unused: Any) -> None:
        raise ValueError("raised in forward")

    if rank == 1 and case == "raises":
        model[1].register_forward_pre_hook(fail)
    if rank == 1 and case == "exceeds the limit":
        while not any((folder / "records").glob("*rank0.records")):
            time.sleep(0.05)
        return
    if rank == 1 and case == "raises between steps":
        raise ValueError("raised between steps")
    if case in ("raises between steps", "no exception"):
        return
    model(torch.ones(2, 4)).sum().backward()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
