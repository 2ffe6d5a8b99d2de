"""Trains on ranks that exchange data, after steps in which cudaMalloc failed on all ranks.

``python failed_steps.py IMPLEMENTATION RANK WORLD FILE`` is one rank. It prints a JSON object.
Under torch, ``steps`` maps each job to the digest of the gradients of a step. Under fsdp_c it maps
each job to a list. Entry n belongs to a step in which the n-th and all later calls of cudaMalloc
failed: its outcome, and the digest of the next step. ``findings`` are those of the device.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import data
import stub_runtime
from failures import LIMIT, outcome_of

FAILURES = 1000000
"""More calls than a step has."""


def shard_functions(tools: Any) -> dict[str, Callable[[], Any]]:
    """Returns the jobs by name. Each function returns a new model."""
    import variants
    from torch.distributed.fsdp import CPUOffloadPolicy

    mixed = {"mp_policy": variants.MIXED}
    return {
        "fsdp": lambda: tools.shard(tools.blocks(), **mixed),
        "replicate": lambda: tools.replicate(tools.blocks(), mesh=tools.flat, **mixed),
        "offload": lambda: tools.shard(tools.blocks(), offload_policy=CPUOffloadPolicy(), **mixed),
    }


def digest_of_step(tools: Any, model: Any, x: Any) -> str:
    import variants

    model.zero_grad()
    tools.backward(model, x)
    return variants.digest(variants.copies(p.grad for p in model.parameters()))


def fail_steps(device: stub_runtime.Device, tools: Any, model: Any) -> list[tuple[str, str]]:
    """Returns the outcome of each failed step, and the digest of the step after it."""
    import torch

    first, second = tools.inputs(2)
    results = []
    for n in range(1, LIMIT):
        model.zero_grad()
        torch.cuda.empty_cache()
        device.set(malloc_failures=FAILURES, fail_malloc=n)
        outcome = outcome_of(lambda: tools.backward(model, first))
        is_reached = device.get_calls_until_failure("fail_malloc") == 0
        device.set(fail_malloc=0, malloc_failures_left=0)
        if not is_reached:
            return results
        results.append((outcome, digest_of_step(tools, model, second)))
    raise AssertionError(f"a step has more than {LIMIT} calls")


def main(implementation: str, rank: int, world: int, file: str) -> dict[str, Any]:
    device = data.join(rank, world, file)
    import data_jobs

    # torch allocates a segment for a parameter of more than 1 MiB. `empty_cache` frees it.
    tools = data_jobs.variant_tools(implementation, rank, world, width=512)
    first, second = tools.inputs(2)
    results: dict[str, Any] = {}
    for name, shard in shard_functions(tools).items():
        model = shard()
        digest_of_step(tools, model, first)
        if implementation == "fsdp_c":
            results[name] = fail_steps(device, tools, model)
        else:
            results[name] = digest_of_step(tools, model, second)
    return {"steps": results, "findings": device.findings()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    implementation, rank, world, file = sys.argv[1:]
    print(json.dumps(main(implementation, int(rank), int(world), file)), flush=True)
    os._exit(0)
