"""Counts the graph breaks of compiled optimizer steps, in a process of one rank.

``compiled_steps.py torch`` uses torch's FSDP2 and imports nothing of fsdp_c. With ``fsdp_c`` the
program calls ``fsdp_c.install()``, and measures the accelerated optimizers too. It prints a JSON
object: case -> graph breaks by reason, number of graphs, and the parameters' bits.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.nn as nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import fully_shard

Run = Callable[[], None]

OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.1),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
}


def _step(optimizer: torch.optim.Optimizer) -> Run:
    return optimizer.step


def _step_and_zero_grad(optimizer: torch.optim.Optimizer) -> Run:
    def run() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return run


def _step_and_fill_with_zeros(optimizer: torch.optim.Optimizer) -> Run:
    def run() -> None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    return run


COMPILED: dict[str, Callable[[torch.optim.Optimizer], Run]] = {
    "step": _step,
    "step, zero_grad": _step_and_zero_grad,
    "step, zero_grad(set_to_none=False)": _step_and_fill_with_zeros,
}


CASES = [
    ("SGD", "step"),
    ("AdamW foreach", "step"),
    ("AdamW fused", "step"),
    ("AdamW", "step"),
    ("AdamW", "step, zero_grad"),
    ("AdamW", "step, zero_grad(set_to_none=False)"),
]
ACCELERATED = ("SGD", "AdamW")


def measure(optimizer_name: str, compiled: str, accelerated: bool) -> dict[str, Any]:
    """Runs three compiled steps of a sharded model."""
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0])
    fully_shard(model)
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    if accelerated:
        importlib.import_module("fsdp_c").optim.accelerate(optimizer)
    run = torch.compile(COMPILED[compiled](optimizer), backend="eager")
    for seed in range(3):
        torch.manual_seed(seed)
        model(torch.randn(3, 4)).square().mean().backward()
        run()
        optimizer.zero_grad()
    bits = [p.detach().to_local().view(torch.int32).tolist() for p in model.parameters()]
    return {
        "breaks": {reason.split("\n")[0]: n for reason, n in counters["graph_break"].items()},
        "graphs": counters["stats"]["unique_graphs"],
        "bits": bits,
    }


def main() -> None:
    """Measures each case, and under fsdp_c also with ``optim.accelerate()`` before compilation."""
    implementation = sys.argv[1]
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    results = {}
    if implementation == "fsdp_c":
        importlib.import_module("fsdp_c").install()
        for name in ACCELERATED:
            results[f"{name}: step, accelerated"] = measure(name, "step", True)
    for name, compiled in CASES:
        results[f"{name}: {compiled}"] = measure(name, compiled, False)
    print(json.dumps(results), flush=True)
    os._exit(0)  # without the shutdown of the interpreter


if __name__ == "__main__":
    main()
