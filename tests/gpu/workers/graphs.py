"""A training step captured in a CUDA graph, units gathered and freed inside, and replayed.

The replays' gradients are those of the same steps run eagerly, bit for bit, also after the weights
have changed. Stock's answer stands beside; what stock cannot capture is no fault of ours.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import traceback
from typing import Any

import loop_group
import race
import torch
import variants
from outcome import conclude, start_device
from variants import MIXED, Stage, copies, digest

JOBS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "mixed": {"mp_policy": MIXED},
    "kept after forward": {"reshard_after_forward": False},
    "smaller group": {"reshard_after_forward": 2},
    "hsdp": {"hsdp": True, "mp_policy": MIXED},
}


def build(stage: Stage, job: dict[str, Any]) -> Any:
    options = dict(job)
    mesh = stage.hybrid if options.pop("hsdp", False) else stage.flat
    return stage.shard(stage.blocks(), mesh=mesh, **options)


def step(stage: Stage, model: Any, x: torch.Tensor) -> None:
    for p in model.parameters():
        p.grad = None
    stage.backward(model, x)


@torch.no_grad()
def change(model: Any) -> None:
    """Other weights."""
    for p in model.parameters():
        p._local_tensor.mul_(0.875)


def eager(stage: Stage, job: dict[str, Any], inputs: list[torch.Tensor]) -> list[Any]:
    model, kept = build(stage, job), []
    for x in inputs:
        step(stage, model, x)
        kept += copies(p.grad for p in model.parameters())
        change(model)
    return kept


def replayed(stage: Stage, job: dict[str, Any], inputs: list[torch.Tensor]) -> list[Any]:
    model, kept = build(stage, job), []
    x = inputs[0].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # warm: lazy init, workspaces, plans
        for _ in range(3):
            step(stage, model, x)
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    gc.collect()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(stage, model, x)
    for new in inputs:
        x.copy_(new)
        graph.replay()
        kept += copies(p.grad for p in model.parameters())
        change(model)
    return kept


def attempt(stage: Stage, job: dict[str, Any]) -> str:
    """ "equal", "differs" or what was raised."""
    inputs = stage.inputs(4)
    try:
        right = digest(eager(stage, job, inputs))
        return "equal" if digest(replayed(stage, job, inputs)) == right else "differs"
    except Exception as error:
        traceback.print_exc()
        return f"{type(error).__name__}: {error}"[:200]


def attempts(implementation: str) -> dict[str, str]:
    device = start_device()
    loop_group.join(variants.WORLD, device)
    stage = race.make_stage(implementation, device)
    return {name: attempt(stage, job) for name, job in JOBS.items()}


def of_both() -> dict[str, dict[str, str]]:
    """From a process for each: a capture that fails may leave the device unusable."""
    command = [sys.executable, __file__]
    processes = {
        name: subprocess.Popen([*command, name], stdout=subprocess.PIPE, text=True)
        for name in ("fsdp_c", "torch")
    }
    texts = {name: process.communicate()[0] for name, process in processes.items()}
    none = dict.fromkeys(JOBS, "the process failed")
    return {
        name: none if processes[name].returncode else json.loads(text.splitlines()[-1])
        for name, text in texts.items()
    }


def main() -> None:
    if len(sys.argv) > 1:
        print(json.dumps(attempts(sys.argv[1])))
        return
    found = of_both()
    ours = found["fsdp_c"]
    wrong = [f"{name}: {words}" for name, words in ours.items() if words != "equal"]
    stock = sum(words == "equal" for words in found["torch"].values())
    line = f"{len(ours) - len(wrong)} of {len(ours)} captured and replayed with equal bits"
    line += f" (stock {stock})" + (f"; {wrong[0]}" if wrong else "")
    conclude(not wrong, line, **found)


if __name__ == "__main__":
    main()
