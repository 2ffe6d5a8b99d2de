"""Runs models that differ between the ranks of an NCCL process group.

``python divergence.py RANK FILE PACE`` prints a JSON object, which maps each case to messages of
exceptions by name. A message is empty if no exception was raised. FILE is the rendezvous file of
two ranks. PACE is "paced", or "fast" for the case "fast order" alone.

The cases of ``CASES`` have three messages: ``first`` of the first forward, and ``repeated`` of a
second forward if the first one raised. ``equal`` is that of a forward of a model that is equal on
all ranks. The cases "equal order", "later order" and "fast order" have one message, ``raised``, of
any of many forwards.
"""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from typing import Any

import stub_runtime
from label_pace import LabelPace

RANKS = 2
CASES = ("equal", "order", "dtype", "frozen", "off on rank 1")


def build(case: str, rank: int) -> Any:
    """Returns a sharded model. On rank 1 it differs, unless the case is ``equal``."""
    import torch
    import torch.nn as nn
    from torch.distributed.device_mesh import init_device_mesh

    import fsdp_c

    torch.manual_seed(0)

    class Layers(nn.Sequential):
        """Runs its layers in the order of ``order``."""

        order: list[int]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for index in self.order:
                x = self[index](x)
            return x

    model: Any = Layers(*(nn.Linear(8, 8) for _ in range(3))).cuda()
    model.order = [0, 1, 2]
    names = ["weight", "bias"]
    if rank == 1 and case in ("order", "off on rank 1"):
        names.reverse()
    for layer in model:
        for name in names:
            layer.register_parameter(name, layer._parameters.pop(name))
    if rank == 1 and case == "dtype":
        model[1].to(torch.bfloat16)
    if rank == 1 and case == "frozen":
        model[0].bias.requires_grad_(False)
    fsdp_c.set_guard("off" if rank == 1 and case == "off on rank 1" else "on")
    mesh = init_device_mesh("cuda", (RANKS,))
    for layer in model:
        fsdp_c.fully_shard(layer, mesh=mesh)
    return fsdp_c.fully_shard(model, mesh=mesh)


def run(model: Any) -> str:
    """Returns the message of the exception of a forward, or an empty string."""
    import torch

    try:
        with torch.no_grad():
            model(torch.ones(2, 8, device="cuda", dtype=model[0].weight.dtype))
    except RuntimeError as error:
        return str(error)
    return ""


def run_steps(pace: LabelPace, rank: int, steps: int, other: int | None = None) -> str:
    """Returns the message of the exception that ends the steps, or an empty string.

    After three steps, rank ``other`` runs the layers in another order.
    """
    model = build("equal", rank)
    for step in range(steps):
        if step == 3 and rank == other:
            model.order.reverse()
        message = run(model)
        if message:
            return message
        pace.end_step(step)
    return ""


def run_fast_steps(pace: LabelPace, rank: int, seconds: float) -> str:
    """Like ``run_steps`` with ``other`` 1, without waits for comparisons.

    Between two comparisons the ranks issue more collectives than the negotiation keeps labels.
    """
    model = build("equal", rank)
    pace.set_interval(0.5)
    end = time.monotonic() + seconds
    steps = 0
    while time.monotonic() < end:
        if steps == 3 and rank == 1:
            model.order.reverse()
        message = run(model)
        if message:
            return message
        steps += 1
    return ""


def run_case(case: str, rank: int) -> dict[str, str]:
    model = build(case, rank)
    first = run(model)
    return {
        "first": first,
        "repeated": run(model) if first else "",
        "equal": run(build("equal", rank)),
    }


def main(rank: int, file: str, kind: str) -> dict[str, dict[str, str]]:
    stub_runtime.start()
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    store = dist.FileStore(file, RANKS)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=RANKS)
    pace = LabelPace()
    if kind == "fast":
        return {"fast order": {"raised": run_fast_steps(pace, rank, 30)}}
    return {case: run_case(case, rank) for case in CASES} | {
        "equal order": {"raised": run_steps(pace, rank, 100)},
        "later order": {"raised": run_steps(pace, rank, 1200, other=1)},
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main(int(sys.argv[1]), sys.argv[2], sys.argv[3])), flush=True)
    os._exit(0)
