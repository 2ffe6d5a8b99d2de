"""Captures a training step, with its gathers and frees, in a CUDA graph and replays it.

The gradients of the replays must equal those of eager steps bit for bit, also after the weights
changed. For comparison, torch runs the same cases; torch's failures do not fail this step of the
GPU check.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import traceback
import warnings
from typing import Any

import loop_group
import race
import torch
import variants
from outcome import conclude, start_device
from variants import MIXED, Tools, copies, digest

CASES: dict[str, dict[str, Any]] = {
    "fp32": {},
    "mixed": {"mp_policy": MIXED},
    "kept after forward": {"reshard_after_forward": False},
    "smaller group": {"reshard_after_forward": 2},
    "hsdp": {"hsdp": True, "mp_policy": MIXED},
    "replicate": {"replicate": True},
}
MISMATCH = "AccumulateGrad node's stream does not match"
"""Part of torch's warning about gradients that were produced on another stream."""


def build(tools: Tools, case: dict[str, Any]) -> Any:
    options = dict(case)
    if options.pop("replicate", False):
        if tools.implementation == "fsdp_c":  # several buckets, reduced during backward
            options["bucket_cap_mb"] = 2
        return tools.replicate(tools.blocks(), mesh=tools.flat, **options)
    mesh = tools.hybrid if options.pop("hsdp", False) else tools.flat
    return tools.shard(tools.blocks(), mesh=mesh, **options)


def step(tools: Tools, model: Any, x: torch.Tensor) -> None:
    for p in model.parameters():
        p.grad = None
    tools.backward(model, x)


@torch.no_grad()
def scale_weights(model: Any) -> None:
    """Scales the weights in place."""
    for p in model.parameters():
        p._local_tensor.mul_(0.875)


def eager(tools: Tools, case: dict[str, Any], inputs: list[torch.Tensor]) -> list[Any]:
    model, gradients = build(tools, case), []
    for x in inputs:
        step(tools, model, x)
        gradients += copies(p.grad for p in model.parameters())
        scale_weights(model)
    return gradients


def replayed(tools: Tools, case: dict[str, Any], inputs: list[torch.Tensor]) -> list[Any]:
    model, gradients = build(tools, case), []
    x = inputs[0].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm-up: lazy initialization, workspaces, plans
        for _ in range(3):
            step(tools, model, x)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(tools, model, x)
    for new in inputs:
        x.copy_(new)
        graph.replay()
        gradients += copies(p.grad for p in model.parameters())
        scale_weights(model)
    return gradients


def run_case(tools: Tools, case: dict[str, Any]) -> str:
    """Returns "equal", "differs", "warned", or the exception's type and message."""
    inputs = tools.inputs(4)
    torch.set_warn_always(True)
    try:
        expected = digest(eager(tools, case, inputs))
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            is_equal = digest(replayed(tools, case, inputs)) == expected
        if any(MISMATCH in str(warning.message) for warning in warned):
            return "warned"
        return "equal" if is_equal else "differs"
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"[:200]


def run_all_cases(implementation: str) -> dict[str, str]:
    device = start_device()
    loop_group.join(variants.WORLD, device)
    tools = race.make_tools(implementation, device)
    return {name: run_case(tools, case) for name, case in CASES.items()}


def run_both_implementations() -> dict[str, dict[str, str]]:
    """Runs all cases in one process per implementation.

    A failed capture can leave the process's CUDA context unusable.
    """
    command = [sys.executable, __file__]
    processes = {
        name: subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True)
        for name in ("fsdp_c", "torch")
    }
    texts = {name: process.communicate()[0] for name, process in processes.items()}
    process_failed = dict.fromkeys(CASES, "the process failed")
    return {
        name: process_failed if processes[name].returncode else json.loads(text.splitlines()[-1])
        for name, text in texts.items()
    }


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(run_all_cases(sys.argv[1])))
        return
    outcomes_by_implementation = run_both_implementations()
    outcomes = outcomes_by_implementation["fsdp_c"]
    failures = [f"{name}: {outcome}" for name, outcome in outcomes.items() if outcome != "equal"]
    captured_by_torch = sum(
        outcome == "equal" for outcome in outcomes_by_implementation["torch"].values()
    )
    total = len(outcomes)
    line = f"{total - len(failures)} of {total} captured and replayed with equal bits"
    line += f" (torch {captured_by_torch})" + (f"; {failures[0]}" if failures else "")
    conclude(not failures, line, **outcomes_by_implementation)


if __name__ == "__main__":
    main()
