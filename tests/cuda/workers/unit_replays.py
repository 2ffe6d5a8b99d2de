"""Compares steps that replay captured units with eager steps, bit by bit.

``python unit_replays.py IMPLEMENTATION [CASE...]`` prints a JSON object. ``cases`` has for each
case the digests of gradients and parameters of eager steps and of steps with graphs, or the
exception. ``findings`` are those of the device, which executes the work. The other ranks of the
group have the same data (``loop_group.py``).
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stub_runtime

TESTS = Path(__file__).resolve().parents[2]
STEPS = 3


def start_roots(training: Any, x: Any, captures: bool) -> Callable[[], None]:
    """Returns a function that runs one step with the input ``x``, eagerly or by graphs."""
    import torch
    import unit_captures

    if captures:
        pool = torch.cuda.graph_pool_handle()
        return unit_captures.record_roots(training, x, pool).replay

    def step() -> None:
        training.optimizer.zero_grad()
        unit_captures.run_roots(training, x)
        if training.job.capturable:
            training.optimizer.step()

    if training.job.capturable:
        unit_captures.warm_up_roots(training, x)
    return step


def start_computations(training: Any, x: Any, captures: bool) -> Callable[[], None]:
    """Like :func:`start_roots`, with graphs of the units' computations only."""
    import torch
    import unit_captures

    training.tokens = x
    training.step()
    if captures:
        unit_captures.capture_inner(training, torch.cuda.graph_pool_handle())

    def step() -> None:
        training.optimizer.zero_grad()
        training.accumulate()

    return step


def digest_of_training(implementation: str, settings: dict[str, Any], captures: bool) -> str:
    """Trains, and returns a digest of the gradients of all steps and of the parameters."""
    import jobs
    import torch
    import unit_captures
    import variants

    torch.manual_seed(0)
    job = jobs.Job(**settings)
    training = jobs.Training(implementation, job, jobs.SMALL_VIT)
    inputs = torch.randn(STEPS, *unit_captures.new_input(training).shape, device="cuda")
    if job.roots:
        x, start = unit_captures.new_input(training), start_roots
    else:
        x, start = training.tokens, start_computations
        inputs = inputs.mul(100).long().remainder(jobs.SMALL.vocabulary)[..., 0]
    step = start(training, x, captures)
    parameters = [p for group in training.optimizer.param_groups for p in group["params"]]
    results: list[Any] = []
    for new in inputs:
        with torch.no_grad():
            x.copy_(new)
        step()
        results += variants.copies(p.grad for p in parameters)
        if not job.capturable:
            training.optimizer.step()
    return variants.digest([*results, *variants.copies(parameters)])


def run_case(implementation: str, settings: dict[str, Any]) -> dict[str, str]:
    from captures import first_error

    digests = {}
    for name, captures in (("eager", False), ("graphs", True)):
        try:
            digests[name] = digest_of_training(implementation, settings, captures)
        except Exception as error:
            digests[name] = first_error(error)
    return digests


def main(implementation: str, names: list[str]) -> dict[str, Any]:
    device = stub_runtime.start()
    import torch

    device.execute(1)
    sys.path += [str(TESTS / "gpu/workers")]
    import jobs
    import loop_group
    import unit_captures

    torch.cuda.set_device(0)
    loop_group.join(jobs.WORLD, torch.device("cuda", 0))
    cases = unit_captures.cases(names or unit_captures.CASES)
    results = {name: run_case(implementation, settings) for name, (settings, _) in cases.items()}
    return {"cases": results, "findings": device.findings()}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main(sys.argv[1], sys.argv[2:])), flush=True)
    os._exit(0)
