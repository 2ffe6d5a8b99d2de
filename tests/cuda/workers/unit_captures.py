"""Captures single units in CUDA graphs, and replays them.

``python unit_captures.py IMPLEMENTATION [CASE...]`` prints a JSON object: for each case "captured"
or the error, the findings of the device, the number of replays, and the MiB of the graphs' pool.

- ``roots``: each unit is a root. One graph has its forward with hooks, another its backward. A
  third one has the optimizer's step, if that can be captured.
- ``computations``: each unit's computation is captured, its hooks run eagerly. The parameters keep
  their addresses, by ``set_keep_unsharded_storage``.
- ``units of a root``: the forward of each unit is captured while the root's forward runs.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable
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


def new_input(training: Any) -> Any:
    """Returns an input of a block. The norm and the head have inputs of the same shape."""
    import jobs
    import torch

    dtype = torch.bfloat16 if training.job.mixed else torch.float32
    shape = (1, jobs.SMALL.tokens, jobs.SMALL.width)
    return torch.zeros(shape, dtype=dtype, device="cuda", requires_grad=True)


def call(function: Callable[[], Any]) -> Any:
    return function()


class Recorder:
    """Captures each function that it is called with in a graph of its own."""

    def __init__(self, pool: Any, mode: str = "global") -> None:
        self.options = {"pool": pool, "capture_error_mode": mode}
        self.graphs: list[Any] = []

    def __call__(self, function: Callable[[], Any]) -> Any:
        import torch

        self.graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(self.graphs[-1], **self.options):
            return function()

    def replay(self) -> None:
        for graph in self.graphs:
            graph.replay()


def run_forward(unit: list[Any], x: Any) -> Any:
    for module in unit:
        x = module(x)
    return x


def run_backward(output: Any, grad: Any) -> None:
    if grad is None:
        output.float().sum().backward()
    else:
        output.backward(grad)


def run_roots(training: Any, x: Any, run: Callable[[Callable[[], Any]], Any] = call) -> None:
    """Runs one step. ``run`` is called with the forward and with the backward of each unit."""
    for index in range(training.job.microbatches):
        training.start_microbatch(index)
        inputs, outputs = [x], []
        for unit in training.units:
            outputs.append(run(functools.partial(run_forward, unit, inputs[-1])))
            inputs.append(outputs[-1].detach().requires_grad_())
        grad = None
        for given, output in zip(reversed(inputs[:-1]), reversed(outputs), strict=True):
            run(functools.partial(run_backward, output, grad))
            grad = given.grad
        x.grad = None
    if training.job.finalize:
        for root in training.roots:
            root.set_requires_gradient_sync(True)
            run(root.finalize_backward)


def warm_up_roots(training: Any, x: Any) -> None:
    """Runs steps, with the optimizer's step if that is captured: its first step makes its state."""

    def step() -> None:
        run_roots(training, x)
        if training.job.capturable:
            training.optimizer.step()
        training.optimizer.zero_grad()

    warm_up(step)


def record_roots(training: Any, x: Any, pool: Any, mode: str = "global") -> Recorder:
    """Captures the forward and the backward of each unit, each in its own graph.

    If the optimizer's step can be captured, captures it, too.
    """
    warm_up_roots(training, x)
    wait_for_watchdog(stub_runtime.start())
    recorder = Recorder(pool, mode)
    run_roots(training, x, recorder)
    if training.job.capturable:
        recorder(training.optimizer.step)
    return recorder


def capture_roots(training: Any, pool: Any, mode: str = "global") -> None:
    """Captures and replays the roots."""
    import torch

    recorder = record_roots(training, new_input(training), pool, mode)
    for _ in range(3):
        recorder.replay()
    if not training.job.capturable:
        training.optimizer.step()
    torch.cuda.synchronize()


def capture_inner(training: Any, pool: Any) -> tuple[int, ...]:
    """Replaces ``inner`` of each module of the units by its graph.

    Returns the addresses of the parameters in the graphs. ``make_graphed_callables`` returns each
    gradient in the memory of the graph, where the next replay overwrites it. If gradients are
    accumulated, a hook therefore copies them.
    """
    import torch

    addresses: list[int] = []
    for unit in training.units:
        unit[0].unshard()
        torch.cuda.synchronize()
        wait_for_watchdog(stub_runtime.start())
        for module in unit:
            module.inner = torch.cuda.make_graphed_callables(
                module.inner, (new_input(training),), num_warmup_iters=3, pool=pool
            )
            for p in module.inner.parameters():
                addresses.append(p.data_ptr())
                if training.job.microbatches > 1:
                    p.register_hook(torch.clone)
        unit[0].reshard()
    return tuple(addresses)


def capture_computations(training: Any, pool: Any) -> None:
    """Captures ``inner`` of each module of the units. Trains and evaluates."""
    import torch

    model = training.model
    training.step()
    addresses = {capture_inner(training, pool)}
    modules = unsharded_modules(training)
    parameters = [p for module in modules for p in module.inner.parameters()]

    def read_addresses(*_: Any) -> None:
        addresses.add(tuple(p.data_ptr() for p in parameters))

    model.head.register_forward_pre_hook(read_addresses)
    steps = STEPS // training.job.microbatches
    for step in range(steps):
        training.step()
        if step == steps // 2:
            with torch.no_grad():
                model(training.tokens)
            torch.cuda.empty_cache()
    torch.cuda.synchronize()
    if len(addresses) != 1 or 0 in next(iter(addresses)):
        raise RuntimeError(f"unsharded parameters have {len(addresses)} lists of addresses")


def unsharded_modules(training: Any) -> Any:
    """Yields the modules of the units, each while it is unsharded."""
    for unit in training.units:
        unit[0].unshard()
        yield from unit
        unit[0].reshard()


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


Case = tuple[dict[str, Any], Callable[[Any, Any], None]]
"""The settings of the job, and the function."""
# The settings have methods that torch has since 2.15.
KEPT = {"inner": True, "kept_storage": True}
FINALIZED = {"microbatches": 4, "finalize": True}
CASES: dict[str, Case] = {
    "roots": ({"roots": True}, capture_roots),
    "roots, hsdp": ({"roots": True, "hsdp": True}, capture_roots),
    "roots, replicate": ({"roots": True, "replicate": True}, capture_roots),
    "roots, checkpointing": ({"roots": True, "checkpoints": True}, capture_roots),
    "roots, 4 microbatches": (
        {"roots": True, "microbatches": 4, "sync_last": True},
        capture_roots,
    ),
    "roots, capturable optimizer": ({"roots": True, "capturable": True}, capture_roots),
    "roots, finalize_backward": ({"roots": True} | FINALIZED, capture_roots),
    "computations": (KEPT, capture_computations),
    "computations, hsdp": (KEPT | {"hsdp": True}, capture_computations),
    "computations, replicate": (KEPT | {"replicate": True}, capture_computations),
    "computations, checkpointing": (KEPT | {"checkpoints": True}, capture_computations),
    "computations, grouped head": (KEPT | {"grouped_head": True}, capture_computations),
    "computations, finalize_backward": (KEPT | FINALIZED, capture_computations),
}
# Cases that run only by name, because torch does not support them. The first two raise
# AcceleratorError: their all-gathers run on streams that do not join the capture. torch's watchdog
# may then end the process.
FAILING_CASES: dict[str, Case] = {
    "roots, resharded": (
        {"roots": True, "reshard": True},
        functools.partial(capture_roots, mode="thread_local"),
    ),
    "units of a root": ({}, capture_units_of_root),
    "roots, grouped head": ({"roots": True, "grouped_head": True}, capture_roots),
    "computations, not kept": ({"inner": True, "reshard": False}, capture_computations),
    "computations, 4 microbatches": (
        KEPT | {"microbatches": 4, "sync_last": True},
        capture_computations,
    ),
}


def cases(names: Iterable[str] = CASES) -> dict[str, Case]:
    """Returns the cases of these names, without those that call methods of newer torch releases."""
    from torch.distributed.fsdp import FSDPModule

    is_new = hasattr(FSDPModule, "finalize_backward")
    found = {name: (CASES | FAILING_CASES)[name] for name in names}
    return {
        n: c for n, c in found.items() if is_new or not {"kept_storage", "finalize"} & c[0].keys()
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

    jobs.join_group()
    return {name: run_case(implementation, name) for name in cases(names or CASES)}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main(sys.argv[1], sys.argv[2:])), flush=True)
    os._exit(0)
