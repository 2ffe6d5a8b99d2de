"""CPU time of an optimizer step over sharded parameters and over plain tensors of the same sizes.

Method. One process with one thread and a fake process group of 8 ranks, ``--params`` parameters of
16 x 16 elements. Three optimizers take turns: over plain tensors, over sharded parameters, and over
sharded parameters after ``fsdp_c.optim.accelerate``. The script reports the minimum of each over
the rounds.

    python benchmarks/optim.py [--params 500] [--rounds 20] [--json FILE]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from report import format_table, make_fake_mesh, parse_positive, write_json
from torch.distributed.tensor import DTensor

import fsdp_c
from fsdp_c import optim

WORLD_SIZE = 8
WIDTH = 16

KINDS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "AdamW": torch.optim.AdamW,
    "AdamW foreach": lambda params: torch.optim.AdamW(params, foreach=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, fused=True),
    "SGD momentum": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9),
}


def make_parameters(count: int) -> list[nn.Parameter]:
    """Returns ``count`` sharded parameters with gradients."""
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(count))
    params = list(fsdp_c.fully_shard(nn.Sequential(*layers)).parameters())
    for param in params:
        assert isinstance(param, DTensor)
        local = torch.randn_like(param._local_tensor)
        param.grad = DTensor(local, param._spec, requires_grad=False)
    return params


def make_shards(params: list[nn.Parameter]) -> list[nn.Parameter]:
    """Returns plain parameters with the shards' values and random gradients."""
    shards = [nn.Parameter(param._local_tensor.clone()) for param in params]  # type: ignore[attr-defined]
    for shard in shards:
        shard.grad = torch.randn_like(shard)
    return shards


def measure(make: Callable[[Any], torch.optim.Optimizer], count: int, rounds: int) -> list[float]:
    """Returns milliseconds per step over plain tensors, over DTensors, and accelerated."""
    sharded = [make_parameters(count), make_parameters(count)]
    optimizers = [make(make_shards(sharded[0])), *map(make, sharded)]
    optim.accelerate(optimizers[2])
    best = [float("inf")] * len(optimizers)
    for _ in range(rounds):
        for index, optimizer in enumerate(optimizers):
            begin = time.thread_time_ns()
            optimizer.step()
            best[index] = min(best[index], (time.thread_time_ns() - begin) / 1e6)
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description="Optimizer steps over sharded parameters.")
    parser.add_argument("--params", type=parse_positive, default=500)
    parser.add_argument("--rounds", type=parse_positive, default=20)
    parser.add_argument("--json", help="write the results to this file as well")
    options = parser.parse_args()
    make_fake_mesh(WORLD_SIZE)
    results = {kind: measure(make, options.params, options.rounds) for kind, make in KINDS.items()}
    print(f"optimizer steps: ms of CPU time over {options.params} parameters")
    rows = [
        [kind, plain, torch_value, fsdp_c_value, torch_value / plain, fsdp_c_value / plain]
        for kind, (plain, torch_value, fsdp_c_value) in results.items()
    ]
    titles = ["optimizer", "plain", "torch", "accelerated", "torch/plain", "accelerated/plain"]
    print(format_table(titles, rows))
    write_json(options.json, "optim", {"params": options.params, "ms": results})


if __name__ == "__main__":
    main()
