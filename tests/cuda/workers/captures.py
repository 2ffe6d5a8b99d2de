"""Captures training steps in CUDA graphs, with the capture rules of the CUDA manual.

``python captures.py IMPLEMENTATION [CASE...]`` prints a JSON object: for each case "captured" or
the error, the findings of the device, the number of replays, and the MiB that the graph's pool
holds. With ``--size LLAMA_8B --blocks 8`` the model has the sizes of Llama 8B; then no access is
checked.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import warnings
from collections.abc import Callable
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
    "hsdp, checkpointing",
    "replicate, 4 microbatches without all-reduce",
    "fsdp, capturable optimizer",
    "fsdp, resharded after forward",
    "hsdp, resharded after forward",
    # these call methods that torch has since 2.15
    "fsdp, kept storage",
    "fsdp, 4 microbatches, finalize_backward",
    "hsdp, 4 microbatches, finalize_backward, checkpointing",
)


def first_error(error: BaseException) -> str:
    """Returns type and first line of the exception that caused ``error``."""
    while error.__context__ is not None:  # leaving a capture raises another exception
        error = error.__context__
    return f"{type(error).__name__}: {str(error).splitlines()[0]}"


def warm_up(step: Callable[[], None]) -> None:
    """Runs three steps on a side stream, as the documentation of CUDA graphs requires."""
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    gc.collect()


def capture(training: Any) -> Any:
    """Captures the microbatches of one step, replays the graph, then runs an optimizer step.

    The graph also includes the optimizer's step if that can be captured.
    """
    import torch

    if training.job.capturable:
        training.step()  # makes the state of the optimizer
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        training.accumulate()
        if training.job.capturable:
            training.optimizer.step()
    for _ in range(3):
        graph.replay()
    training.optimizer.step()
    torch.cuda.synchronize()
    return graph


def run_case(
    implementation: str, name: str, size: str = "SMALL", blocks: int = 2, observes: bool = True
) -> dict[str, Any]:
    import jobs
    import torch

    device = stub_runtime.start()
    device.set(copies=int(observes))
    training = jobs.Training(implementation, jobs.JOBS[name], getattr(jobs, size), blocks)

    def step() -> None:
        training.accumulate()
        training.model.zero_grad(set_to_none=True)

    warm_up(step)
    device.reset()
    device.observe(observes)
    pool = 0
    try:
        graph = capture(training)
        segments = torch.cuda.memory.memory_snapshot(graph.pool())
        pool = sum(segment["total_size"] for segment in segments)
        outcome = "captured"
    except Exception as error:
        outcome = first_error(error)
    device.observe(False)
    return {
        "outcome": outcome,
        "findings": device.findings(),
        "replays": device.counts().get("graph launch", 0),
        "pool MiB": pool / 2**20,
    }


def main() -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="SMALL")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("implementation")
    parser.add_argument("cases", nargs="*")
    given = parser.parse_args()
    stub_runtime.start()
    import jobs

    jobs.join_group()
    options = given.size, given.blocks, given.size == "SMALL"
    cases = given.cases or [name for name in CASES if name in jobs.JOBS]
    return {name: run_case(given.implementation, name, *options) for name in cases}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main()), flush=True)
    os._exit(0)
