"""A training script for the tests of ``compare``. It does not import fsdp_c.

    compare_job.py CASE [FOLDER]

The function ``case_<CASE>`` changes the job: it raises, ends early, or trains in another way.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

UNDER_FSDP_C = os.environ.get("FSDP_C") == "1"
RANK = int(os.environ["RANK"])
STEPS = 6


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x)


def make_model() -> Any:
    model = Net()
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def train(
    steps: int = STEPS, model: Any = None, scale: Any = lambda step: 1.0, batches: Any = None
) -> None:
    model = make_model() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(1, steps + 1):
        x = torch.randn(2, 4) if batches is None else next(batches)
        loss = model(x).square().mean() * scale(step)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    print("trained to the end")


def case_equal() -> None:
    train()


def case_scaled_loss() -> None:
    train(scale=lambda step: 1.5 if UNDER_FSDP_C and step >= 2 else 1.0)


def case_one_gradient_bit() -> None:
    """Under fsdp_c, changes the last bit of one gradient in step 2, on the last rank."""
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(1, 4):
        model(torch.randn(2, 4)).square().mean().backward()
        if UNDER_FSDP_C and step == 2 and dist.get_world_size() - 1 == RANK:
            model.blocks[1].bias.grad._local_tensor.view(torch.int32)[-1] ^= 1
        optimizer.step()
        optimizer.zero_grad()


def case_random_loss() -> None:
    """Scales the loss from step 2 on by a random factor, so no two runs are equal."""
    noise = int.from_bytes(os.urandom(4), "big") / 2**32
    train(scale=lambda step: 1.0 + noise if step >= 2 else 1.0)


def case_raises() -> None:
    train(steps=1)
    if dist.get_world_size() - 1 == RANK:
        raise ValueError("raised by the script")
    dist.barrier()


def case_raises_under_fsdp_c() -> None:
    train(steps=1)
    if UNDER_FSDP_C:
        raise ValueError("raised by the script")


def case_exits_early() -> None:
    train(steps=2)
    if UNDER_FSDP_C:
        os._exit(0)
    sys.exit(0)


def case_killed() -> None:
    train(steps=1)
    if dist.get_world_size() - 1 == RANK:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


class Samples(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.randn(4) + index


def case_loader_workers_and_endless_thread() -> None:
    """Runs loader workers and an endless thread.

    ``compare`` ends the script with an exception, which a ``finally`` block replaces.
    """
    threading.Thread(target=time.sleep, args=(1000,)).start()
    loader = torch.utils.data.DataLoader(Samples(), batch_size=2, num_workers=2)
    Path(sys.argv[2], f"pid-{RANK}-{UNDER_FSDP_C}").write_text(str(os.getpid()))
    try:
        train(steps=32, batches=iter(loader))
    finally:
        raise RuntimeError("a finally block that fails")


def case_hangs() -> None:
    path = Path(sys.argv[2], f"pid-{RANK}")
    path.with_suffix(".part").write_text(str(os.getpid()))
    path.with_suffix(".part").rename(path)  # the test reads complete files only
    time.sleep(1000)


def main() -> None:
    dist.init_process_group("gloo")
    print("arguments", *sys.argv[1:])
    globals()[f"case_{sys.argv[1]}"]()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
