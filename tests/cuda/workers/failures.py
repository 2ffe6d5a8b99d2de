"""Makes cudaMalloc, NCCL calls and launches fail during a step, each in turn.

``python failures.py IMPLEMENTATION JOB`` prints a JSON object: for each kind of failure a list with
the outcome of the step in which the n-th call failed, and of the step after it.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import stub_runtime

KINDS = {
    # kind: (the setting that makes the n-th call fail, further settings)
    "cudaMalloc": ("fail_malloc", {"fail_mallocs": 1000000}),
    "cudaMalloc, retried": ("fail_malloc", {"fail_mallocs": 1}),
    "collective": ("fail_nccl", {"nccl_error": 3}),
    "launch of fsdp_c": ("fail_launch", {}),
}
LIMIT = 200


def outcome_of(step: Callable[[], None]) -> str:
    """Returns "trained", or the type of the exception."""
    import torch

    try:
        step()
        torch.cuda.synchronize()
    except Exception as error:
        return type(error).__name__
    return "trained"


def states_of(model: Any) -> list[str]:
    """Returns the names of modules that hold parameters that are not sharded."""
    from torch.distributed.tensor import DTensor

    return [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]


def sweep(training: Any, setting: str, options: dict[str, int]) -> list[dict[str, Any]]:
    """Lets call 1, 2, ... of a step fail, until a step has fewer calls."""
    import torch

    device = stub_runtime.start()
    outcomes: list[dict[str, Any]] = []
    for n in range(1, LIMIT):
        training.model.zero_grad()
        torch.cuda.empty_cache()
        device.set(**options, **{setting: n})
        failed = outcome_of(training.step)
        reached = device.armed(setting) == 0
        device.set(**{setting: 0}, failing_mallocs=0)
        training.model.zero_grad()
        following = outcome_of(training.step)
        if not reached:
            break
        outcomes.append(
            {"failed": failed, "next": following, "unsharded": states_of(training.model)}
        )
    return outcomes


def main(implementation: str, job: str) -> dict[str, Any]:
    stub_runtime.start()
    import jobs

    jobs.join_group()
    results = {}
    for kind, (setting, options) in KINDS.items():
        if kind == "launch of fsdp_c" and implementation != "fsdp_c":
            continue
        training = jobs.Training(implementation, jobs.JOBS[job])
        training.step()
        training.step()
        results[kind] = sweep(training, setting, options)
    return results


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main(sys.argv[1], sys.argv[2])), flush=True)
    os._exit(0)
