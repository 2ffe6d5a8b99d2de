"""Host time of the guard per unit and operation: it labels collectives and compares the labels.

Method. Two ranks, over shared memory and over gloo. For each transport three models take turns in
every round. The guard (``FSDP_C_GUARD``) is on for one of them, and off for the other two. The last
one is the control. Each model has a process group of its own, because the ranks decide at the first
collective of a process group whether they compare.

- Gathers: each unit is unsharded with ``async_op=True``. After a barrier, when all ranks have
  issued all gathers, each gather is waited for. So no call waits for the other rank. The guard adds
  the time to make a label, to send or hash this label, and to compare it.
- Steps: one forward and one backward. Each unit gathers twice and reduces once: three operations.
  Over gloo, a step also has one agreement. The values of steps have more noise, because ranks wait
  for each other, and the CPU time of a wait varies.

All values are the CPU time of the calling thread on rank 0, per unit and operation. The time of a
call is the first percentile of its times, because other work on the machine only lengthens calls.
The values of guard and control are differences to the first model without the guard. The control
shows the noise.

    python benchmarks/guard.py [--rounds N] [--groups N] [--params N] [--json FILE]

``host.py`` runs this script for its job "guard".
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from typing import Any

import torch.distributed as dist
from host import WARM_UP_STEPS, Job, TimedModel, build_model
from ranks import start_ranks, take_turns
from report import format_table, parse_positive, write_json
from torch.distributed.device_mesh import DeviceMesh

from fsdp_c import fully_shard, set_guard

WORLD_SIZE = 2
STEP_OPERATIONS = 3
"""Collectives of a unit in a step."""
TRANSPORTS = {"shared memory": "direct", "gloo": "gloo"}
"""Name -> value of FSDP_C_TRANSPORT."""
MODES = ("off", "on", "control")


class Run:
    """A model, and the CPU times in ns of its steps, and of issues and waits of its gathers."""

    def __init__(self, options: argparse.Namespace, mode: str) -> None:
        set_guard("on" if mode == "on" else "off")
        mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
        job = Job("fp32")
        self.timed: TimedModel = build_model(job, options.groups, options.params, fully_shard, mesh)
        self.units: list[Any] = list(self.timed.model.children())
        self.issues: list[int] = []
        self.waits: list[int] = []

    def gather(self) -> None:
        clock = time.thread_time_ns
        handles = []
        for unit in self.units:
            begin = clock()
            handle = unit.unshard(async_op=True)
            self.issues.append(clock() - begin)
            handles.append(handle)
        dist.barrier()
        for handle in handles:
            begin = clock()
            handle.wait()
            self.waits.append(clock() - begin)
        for unit in self.units:
            unit.reshard()

    def compute_gather_time(self) -> float:
        """Returns the time of one gather in us."""
        return compute_first_percentile(self.issues) + compute_first_percentile(self.waits)

    def compute_step_time(self) -> float:
        """Returns the time of a step per unit and operation, in us."""
        return compute_first_percentile(self.timed.times) / len(self.units) / STEP_OPERATIONS


def main() -> None:
    parser = argparse.ArgumentParser(description="Host time of the guard per unit and operation.")
    parser.add_argument("--rounds", type=parse_positive, default=120)
    parser.add_argument("--groups", type=parse_positive, default=16)
    parser.add_argument("--params", type=parse_positive, default=1)
    parser.add_argument("--json", help="write the results to this file as well")
    options = parser.parse_args()
    if not start_ranks(WORLD_SIZE):
        return
    results = {name: measure(options, name) for name in TRANSPORTS}
    if dist.get_rank() == 0:
        print("guard: us of CPU time per unit and operation, on two ranks")
        rows = [[name, *row.values()] for name, row in results.items()]
        print(format_table(("transport", *results["gloo"]), rows))
        write_json(options.json, "guard", {**results, **vars(options)})
    dist.destroy_process_group()


def measure(options: argparse.Namespace, transport: str) -> dict[str, float]:
    """Returns the columns of a transport: us per unit and operation."""
    os.environ["FSDP_C_TRANSPORT"] = TRANSPORTS[transport]
    runs = {}
    for mode in MODES:
        runs[mode] = Run(options, mode)
        for _ in range(WARM_UP_STEPS):
            runs[mode].timed.step()
        runs[mode].timed.times.clear()
    gc.collect()
    gc.disable()
    try:
        for mode in take_turns(MODES, options.rounds):
            runs[mode].gather()
            runs[mode].timed.step()
    finally:
        gc.enable()
    gather = {mode: run.compute_gather_time() for mode, run in runs.items()}
    step = {mode: run.compute_step_time() for mode, run in runs.items()}
    return {
        "gather": gather["off"],
        "gather: guard": gather["on"] - gather["off"],
        "gather: control": gather["control"] - gather["off"],
        "step": step["off"],
        "step: guard": step["on"] - step["off"],
        "step: control": step["control"] - step["off"],
    }


def compute_first_percentile(times: list[int]) -> float:
    """Returns the first percentile in us."""
    return sorted(times)[len(times) // 100] / 1000


if __name__ == "__main__":
    main()
