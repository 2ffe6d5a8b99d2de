"""A training job on torch's FSDP2 that does not use fsdp_c; it writes a report per rank.

The job imports only from torch, as unmodified user jobs do.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

SHUTDOWN = Path(__file__).resolve().parents[3] / "fsdp_c/_compat/shutdown.py"


class Block(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(5) for _ in range(3)))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    assert isinstance(model, FSDPModule)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        x = torch.randn(4, 5, generator=torch.Generator().manual_seed(10 * step + rank))
        loss = model(x).float().square().mean()
        loss.backward()
        losses.append(loss.item().hex())
        total = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        losses.append(total.full_tensor().item().hex())
        optimizer.step()
        optimizer.zero_grad()
    state = fully_shard.state(model)
    code = " ".join(torch.nn.utils.clip_grad_norm_.__code__.co_names)
    report = {"state": type(state).__module__, "losses": losses, "argv": sys.argv[2:], "clip": code}
    with open(os.path.join(sys.argv[1], f"rank{rank}.json"), "w") as file:
        json.dump(report, file)
    dist.destroy_process_group()
    runpy.run_path(str(SHUTDOWN))["wait_for_threads"]()  # see wait_for_gloo_threads in launch.py


if __name__ == "__main__":
    main()
