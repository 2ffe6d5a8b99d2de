"""Makes each cudaMalloc, NCCL call and launch of fsdp_c fail in a step, and some launches of torch.

``python failures.py IMPLEMENTATION JOB`` prints a JSON object with a list for each kind of failure.
An entry belongs to one call that failed. It has the outcome of that step and of the next one, and
the parameters that are unsharded then. With the kind ``cudaMalloc`` all later calls of the step
failed, too.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from typing import Any

import stub_runtime

KINDS: dict[str, tuple[str, dict[str, int], int]] = {
    # kind: (the setting that makes the n-th call fail, further settings, distance between these n)
    "cudaMalloc": ("fail_malloc", {"malloc_failures": 1000000}, 1),
    "cudaMalloc, retried": ("fail_malloc", {"malloc_failures": 1}, 1),
    "collective": ("fail_nccl", {"nccl_error": 3}, 1),
    "launch of fsdp_c": ("fail_launch", {}, 1),
    "launch of torch": ("fail_operator", {}, 9),
}
LIMIT = 300
"""Upper bound of the number of calls of one kind in a step."""


def outcome_of(step: Callable[[], None]) -> str:
    """Returns "trained", or the type of the exception."""
    import torch

    try:
        step()
        torch.cuda.synchronize()
    except Exception as error:
        return type(error).__name__
    return "trained"


def unsharded_parameters(model: Any) -> list[str]:
    """Returns the names of the parameters that are not sharded."""
    from torch.distributed.tensor import DTensor

    return [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]


def sweep(
    training: Any, setting: str, options: dict[str, int], distance: int
) -> list[dict[str, Any]]:
    """Runs steps in which call 1, 1 + distance, ... fails, until a step has fewer calls.

    Returns the outcomes of the steps in which a call failed.
    """
    import torch

    device = stub_runtime.start()
    outcomes: list[dict[str, Any]] = []
    for n in range(1, LIMIT, distance):
        training.model.zero_grad()
        torch.cuda.empty_cache()
        device.set(**options, **{setting: n})
        outcome: dict[str, Any] = {"failed": outcome_of(training.step)}
        reached = device.get_calls_until_failure(setting) == 0
        device.set(**{setting: 0}, malloc_failures_left=0)
        training.model.zero_grad()
        outcome["next"] = outcome_of(training.step)
        outcome["unsharded"] = unsharded_parameters(training.model)
        if not reached:
            return outcomes
        outcomes.append(outcome)
    raise AssertionError(f"a step has more than {LIMIT} calls")


def main(implementation: str, job: str) -> dict[str, Any]:
    stub_runtime.start()
    import jobs

    jobs.join_group()
    results = {}
    for kind, (setting, options, distance) in KINDS.items():
        if kind == "launch of fsdp_c" and implementation != "fsdp_c":
            continue
        training = jobs.Training(implementation, jobs.JOBS[job])
        training.step()
        training.step()
        results[kind] = sweep(training, setting, options, distance)
    return results


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main(sys.argv[1], sys.argv[2])), flush=True)
    os._exit(0)
