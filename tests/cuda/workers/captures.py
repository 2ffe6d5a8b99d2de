"""Captures training steps in CUDA graphs, with the capture rules of the CUDA manual.

``python captures.py IMPLEMENTATION [CASE...]`` prints a JSON object: for each case "captured" or
the error, the findings of the device, and the MiB that the graph's pool holds.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import warnings
from typing import Any

import stub_runtime

CASES = (
    "fsdp",
    "fsdp, float32",
    "fsdp, kept after forward",
    "fsdp, checkpointing",
    "fsdp, 4 microbatches without sync",
    "fsdp, grouped head",
    "fsdp, smaller group after forward",
    "hsdp",
    "hsdp, 4 microbatches without all-reduce",
    "replicate",
)


def warm_up(training: Any) -> None:
    """Runs steps on a side stream, as the documentation of CUDA graphs requires."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            training.accumulate()
            training.model.zero_grad(set_to_none=True)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    gc.collect()


def capture(training: Any) -> Any:
    """Captures the microbatches of one step, replays them, then trains eagerly."""
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.accumulate()
    for _ in range(3):
        graph.replay()
    training.optimizer.step()
    torch.cuda.synchronize()
    return graph


def run_case(implementation: str, name: str) -> dict[str, Any]:
    import jobs
    import torch

    device = stub_runtime.start()
    training = jobs.Training(implementation, jobs.JOBS[name])
    warm_up(training)
    device.reset()
    device.observe()
    pool = 0
    try:
        graph = capture(training)
        segments = torch.cuda.memory.memory_snapshot(graph.pool())
        pool = sum(segment["total_size"] for segment in segments)
        outcome = "captured"
    except Exception as error:
        first: BaseException = error  # leaving the capture raises another exception
        while first.__context__ is not None:
            first = first.__context__
        outcome = f"{type(first).__name__}: {str(first).splitlines()[0]}"
    device.observe(False)
    return {
        "outcome": outcome,
        "findings": device.findings(),
        "replays": device.counts().get("graph launch", 0),
        "pool MiB": pool / 2**20,
    }


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    stub_runtime.start()
    import jobs

    jobs.join_group()
    cases = sys.argv[2:] or CASES
    print(json.dumps({name: run_case(sys.argv[1], name) for name in cases}), flush=True)
    os._exit(0)
