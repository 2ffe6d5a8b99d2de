"""Trains on ranks that exchange data, after steps in which one call failed on all ranks.

``python failed_steps.py RANK WORLD FILE ALLOCATOR`` is one rank. It prints a JSON object. ``steps``
maps each job and each kind of call to a list. Each entry belongs to a step of fsdp_c in which one
call of the kind failed: its outcome, and the digest of the gradients of the next step. ``expected``
has the outcome under torch, None if torch makes no such call, and the digest of the same step
without a failure. ``findings`` are those of the device.

If a cudaMalloc fails, all later ones of the step fail, too. ALLOCATOR is "caching", or "direct":
then each tensor is a cudaMalloc, and no other kind of call fails.
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
from failures import KINDS, LIMIT, outcome_of

FAILING = ("cudaMalloc", "collective", "launch of fsdp_c")
"""Kinds of calls of ``failures.py``."""
DISTANCE_OF_DIRECT = 4
"""With the allocator "direct" every fourth cudaMalloc fails."""


def shard_functions(tools: Any, world: int) -> dict[str, Callable[[], Any]]:
    """Returns the jobs by name. Each function returns a new model."""
    import variants
    from torch.distributed.fsdp import CPUOffloadPolicy

    mixed = {"mp_policy": variants.MIXED}
    if world >= 4:
        return {"hsdp": lambda: tools.shard(tools.blocks(), mesh=tools.hybrid, **mixed)}
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


def fail_step(tools: Any, model: Any, kind: str, n: int) -> str | None:
    """Runs a step in which the n-th call fails. Returns its outcome, or None without such a call.

    Drops the model's gradients before the step.
    """
    import torch

    device, (setting, options, _) = stub_runtime.start(), KINDS[kind]
    model.zero_grad()
    torch.cuda.empty_cache()
    device.set(**options, **{setting: n})
    outcome = outcome_of(lambda: tools.backward(model, tools.inputs(1)[0]))
    is_reached = device.get_calls_until_failure(setting) == 0
    device.set(**{setting: 0}, malloc_failures_left=0)
    return outcome if is_reached else None


def fail_steps(tools: Any, model: Any, kind: str, distance: int) -> list[tuple[str, str]]:
    """Returns the outcome of each failed step, and the digest of the step after it.

    Call 1, 1 + distance, ... fails, until a step has fewer calls.
    """
    results = []
    for n in range(1, LIMIT, distance):
        outcome = fail_step(tools, model, kind, n)
        if outcome is None:
            return results
        results.append((outcome, digest_of_step(tools, model, tools.inputs(2)[1])))
    raise AssertionError(f"a step has more than {LIMIT} calls")


def main(rank: int, world: int, file: str, allocator: str) -> dict[str, Any]:
    is_direct = allocator == "direct"
    if is_direct:
        os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    device = data.join(rank, world, file)
    import data_jobs

    # torch allocates a segment for a parameter of more than 1 MiB. `empty_cache` frees it.
    width = 16 if is_direct else 512
    torchs, own = (
        data_jobs.variant_tools(name, rank, world, width=width) for name in ("torch", "fsdp_c")
    )
    kinds = FAILING[:1] if is_direct else FAILING
    expected: dict[str, dict[str, Any]] = {}
    steps = {}
    for name, shard in shard_functions(torchs, world).items():
        model = shard()
        digest_of_step(torchs, model, torchs.inputs(2)[0])
        digest = digest_of_step(torchs, model, torchs.inputs(2)[1])
        expected[name] = {kind: (fail_step(torchs, model, kind, 1), digest) for kind in kinds}
    for name, shard in shard_functions(own, world).items():
        model = shard()
        digest_of_step(own, model, own.inputs(2)[0])
        distance = DISTANCE_OF_DIRECT if is_direct else 1
        steps[name] = {kind: fail_steps(own, model, kind, distance) for kind in kinds}
    return {"expected": expected, "steps": steps, "findings": device.findings()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    rank, world, file, allocator = sys.argv[1:]
    print(json.dumps(main(int(rank), int(world), file, allocator)), flush=True)
    os._exit(0)
