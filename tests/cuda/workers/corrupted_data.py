"""Trains with the guard mode "hash" on ranks of the simulated NCCL that get different data.

``python corrupted_data.py RANK FILE CASE...`` is one of two ranks. It prints a JSON object.
``messages`` maps each case to the message of the exception, or to an empty string. ``findings`` are
those of the device. A process group cannot be used after an exception, so only the last case may
raise one. FILE is the rendezvous file.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import data
import stub_runtime
from label_pace import LabelPace

RANKS = 2
STEPS = 120
"""Steps of a case with equal data. The ranks compare twelve times or more."""
STEPS_UNTIL_EXCEPTION = 1200
"""The most steps of a case with a fault."""
LONGEST_WAIT_FOR_EXIT = timedelta(seconds=60)
"""Each rank waits for the other one, which NCCL would end at the exit of this rank."""
CASES = {
    # case: the shape of the mesh, and the fault of the device of rank 0 from its eleventh step on
    "sharded, equal": ((2,), {}),
    "replicated, equal": ((2, 1), {}),
    "captured": ((2,), {}),
    "all-gather": ((2,), {"wrong_shard": 2}),
    "all-reduce": ((2, 1), {"missing_rank": 1}),
}


def build(shape: tuple[int, ...]) -> Any:
    import torch
    import torch.nn as nn
    from torch.distributed.device_mesh import init_device_mesh

    import fsdp_c

    torch.manual_seed(0)
    fsdp_c.set_guard("hash")
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cuda", shape, mesh_dim_names=names)
    model: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3))).cuda()
    for layer in model:
        fsdp_c.fully_shard(layer, mesh=mesh)
    return fsdp_c.fully_shard(model, mesh=mesh)


def capture(step: Callable[[], None]) -> Callable[[], None]:
    """Returns the replay of a graph of the step."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def train(device: stub_runtime.Device, pace: LabelPace, case: str, rank: int) -> str:
    """Returns the message of the exception that ends the training, or an empty string."""
    import torch

    shape, fault = CASES[case]
    model = build(shape)
    inputs = torch.ones(2, 8, device="cuda")

    def run_step() -> None:
        model(inputs).sum().backward()

    steps = STEPS_UNTIL_EXCEPTION if fault else STEPS
    step_functions = dict.fromkeys(range(steps), run_step)
    for step in range(steps):
        if step == 10 and rank == 0:
            torch.cuda.synchronize()  # the host may be ahead of the device
            device.set(**fault)
        if step == 20 and case == "captured":
            replay = capture(run_step)
            step_functions.update(dict.fromkeys(range(20, 60), replay))
        try:
            step_functions[step]()
        except RuntimeError as error:
            return str(error)
        model.zero_grad()
        pace.end_step(step)
    return ""


def wait_for_other_rank(rank: int) -> None:
    """Returns when the other rank calls this function, too."""
    from torch.distributed import distributed_c10d

    store = distributed_c10d._get_default_store()
    store.set(f"end/{rank}", "")
    store.wait([f"end/{1 - rank}"], LONGEST_WAIT_FOR_EXIT)


def main(rank: int, file: str, cases: list[str]) -> dict[str, Any]:
    device = data.join(rank, RANKS, file)
    pace = LabelPace()
    messages = {case: train(device, pace, case, rank) for case in cases}
    wait_for_other_rank(rank)
    return {"messages": messages, "findings": device.findings()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])), flush=True)
    os._exit(0)
