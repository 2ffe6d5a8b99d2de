"""Captures single units in CUDA graphs, and replays them.

``python unit_captures.py IMPLEMENTATION [CASE...]`` prints a JSON object: for each case "captured"
or the error, the findings of the device, the number of replays, and the MiB of the graphs' pool.

- ``roots``: each unit is a root. One graph has its forward with hooks, another its backward.
- ``computations``: each unit's computation is captured, its hooks run eagerly. The parameters keep
  their addresses, by ``set_keep_unsharded_storage`` or because the unit is never resharded.
- ``units of a root``: the forward of each unit is captured while the root's forward runs.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import stub_runtime
from captures import first_error, warm_up

BLOCKS = 2
STEPS = 100
LONGEST_WAIT = 100
"""Seconds."""


def wait_for_watchdog(device: stub_runtime.Device) -> None:
    """Returns when no thread queries events.

    The watchdog of ProcessGroupNCCL queries works that were not complete at its last query. A query
    is an error while another thread captures in the default mode, "global". torch 2.15 then ends
    the process.
    """
    equal, queries = 0, -1
    for _ in range(LONGEST_WAIT):
        count = device.counts().get("query", 0)
        equal, queries = (equal + 1 if count == queries else 0), count
        if equal == 2:
            return
        time.sleep(1)
    raise TimeoutError("a thread queries events")


def new_input() -> Any:
    import jobs
    import torch

    dtype, shape = torch.bfloat16, (1, jobs.SMALL.tokens, jobs.SMALL.width)
    return torch.zeros(shape, dtype=dtype, device="cuda", requires_grad=True)


def capture_roots(training: Any, pool: Any, mode: str = "global") -> None:
    """Captures the forward and the backward of each unit, each in its own graph. Replays them."""
    import torch

    units = list(training.model.blocks)

    def step() -> None:
        x = new_input()
        for unit in units:
            x = unit(x)
        x.float().sum().backward()
        for unit in units:
            unit.zero_grad(set_to_none=True)

    warm_up(step)
    wait_for_watchdog(stub_runtime.start())
    graphs, inputs, outputs = [], [new_input()], []
    for unit in units:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], pool=pool, capture_error_mode=mode):
            outputs.append(unit(inputs[-1]))
        inputs.append(outputs[-1].detach().requires_grad_())
    grad = torch.ones_like(outputs[-1])
    for index in reversed(range(len(units))):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1], pool=pool, capture_error_mode=mode):
            outputs[index].backward(grad)
        grad = inputs[index].grad
    for _ in range(3):
        for graph in graphs:
            graph.replay()
    training.optimizer.step()
    torch.cuda.synchronize()


def capture_computations(training: Any, pool: Any) -> None:
    """Replaces the module inside of each unit by a graph of it. Trains and evaluates."""
    import torch

    model = training.model
    training.step()
    addresses: set[tuple[int, ...]] = set()
    for block in model.blocks:
        block.unshard()
        torch.cuda.synchronize()
        wait_for_watchdog(stub_runtime.start())
        block.inner = torch.cuda.make_graphed_callables(
            block.inner, (new_input(),), num_warmup_iters=3, pool=pool
        )
        block.reshard()
    parameters = [block.inner.q.weight for block in unsharded_blocks(model)]

    def read_addresses(*_: Any) -> None:
        addresses.add(tuple(p.data_ptr() for p in parameters))

    model.head.register_forward_pre_hook(read_addresses)
    for step in range(STEPS):
        training.step()
        if step == STEPS // 2:
            with torch.no_grad():
                model(training.tokens)
            torch.cuda.empty_cache()
    torch.cuda.synchronize()
    if len(addresses) != 1 or 0 in next(iter(addresses)):
        raise RuntimeError(f"unsharded parameters have {len(addresses)} lists of addresses")


def unsharded_blocks(model: Any) -> Any:
    """Yields the blocks, each while it is unsharded."""
    for block in model.blocks:
        block.unshard()
        yield block
        block.reshard()


def capture_units_of_root(training: Any, pool: Any) -> None:
    """Captures the forward of each unit in a graph, within the forward of the root."""
    import torch

    training.step()
    training.step()
    model, graphs = training.model, []

    def forward(tokens: Any) -> Any:
        x = model.embedding(tokens)
        for block in model.blocks:
            graphs.append(torch.cuda.CUDAGraph())
            with torch.cuda.graph(graphs[-1], pool, capture_error_mode="thread_local"):
                x = block(x)
        return model.head(model.norm(x))

    model.forward = forward
    model(training.tokens)


CASES: dict[str, tuple[dict[str, Any], Callable[[Any, Any], None]]] = {
    # name: (settings of the job, function)
    "roots": ({"roots": True}, capture_roots),
    "roots, hsdp": ({"roots": True, "hsdp": True}, capture_roots),
    "roots, replicate": ({"roots": True, "replicate": True}, capture_roots),
    "roots, checkpointing": ({"roots": True, "checkpoints": True}, capture_roots),
    "computations": ({"kept_storage": True, "inner": True}, capture_computations),
    "computations, hsdp": (
        {"kept_storage": True, "inner": True, "hsdp": True},
        capture_computations,
    ),
    "computations, never resharded": ({"reshard": False, "inner": True}, capture_computations),
    "computations, replicate": ({"replicate": True, "inner": True}, capture_computations),
    "computations, checkpointing": (
        {"reshard": False, "inner": True, "checkpoints": True},
        capture_computations,
    ),
    "computations, grouped head": (
        {"reshard": False, "inner": True, "grouped_head": True},
        capture_computations,
    ),
}
# Captures that raise AcceleratorError: their all-gathers run on streams that do not join the
# capture. Each case runs only by name, in its own process: torch's watchdog may end the process.
FAILING_CASES: dict[str, tuple[dict[str, Any], Callable[[Any, Any], None]]] = {
    "roots, resharded": (
        {"roots": True, "reshard": True},
        functools.partial(capture_roots, mode="thread_local"),
    ),
    "units of a root": ({}, capture_units_of_root),
}


def run_case(implementation: str, name: str) -> dict[str, Any]:
    import jobs
    import torch

    device = stub_runtime.start()
    settings, function = (CASES | FAILING_CASES)[name]
    training = jobs.Training(implementation, jobs.Job(**settings), blocks=BLOCKS)
    pool = torch.cuda.graph_pool_handle()
    device.reset()
    device.observe()
    try:
        function(training, pool)
        outcome = "captured"
    except Exception as error:
        outcome = first_error(error)
    device.observe(False)
    segments = torch.cuda.memory.memory_snapshot(pool) if outcome == "captured" else []
    return {
        "outcome": outcome,
        "findings": device.findings(),
        "replays": device.counts().get("graph launch", 0),
        "pool MiB": sum(segment["total_size"] for segment in segments) / 2**20,
    }


def main(implementation: str, names: list[str]) -> dict[str, Any]:
    stub_runtime.start()
    import jobs
    from torch.distributed.fsdp import FSDPModule

    jobs.join_group()
    keeps = hasattr(FSDPModule, "set_keep_unsharded_storage")  # torch 2.15
    names = names or [n for n, (s, _) in CASES.items() if keeps or "kept_storage" not in s]
    return {name: run_case(implementation, name) for name in names}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main(sys.argv[1], sys.argv[2:])), flush=True)
    os._exit(0)
