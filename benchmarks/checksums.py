"""Costs of the guard in whole steps: modes "off", "on" and "hash".

Method. Two ranks train one model of ``steps.py`` four times, in turns: with each mode of the guard,
and with "on" again. The last one is the control. Each model has a process group of its own, because
the mode is that of the first collective of a process group. The first rank measures forward and
backward of each step: CPU time of all threads of the process, and wall time. A value is the median,
over all rounds, of the cost of one mode divided by the cost of another in the same round.

    python benchmarks/checksums.py [--models small ...] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
from typing import Any

import torch
import torch.distributed as dist
from guard import TRANSPORTS, WORLD_SIZE
from meter import Cost, Meter
from ranks import start_ranks, take_turns
from report import format_table, parse_positive, write_json
from steps import JOBS, GPTConfig, make_gpt_job
from torch.distributed.device_mesh import DeviceMesh

from fsdp_c import fully_shard, set_guard
from fsdp_c._runtime.plan_hash import GuardMode

WARM_UP = 3
ALL_JOBS = JOBS | {
    "medium, 8 sequences": lambda: make_gpt_job(GPTConfig(layers=8, width=512, heads=8), 8)
}
"""A longer step per parameter makes the relative cost smaller. ``medium`` has one sequence."""
DEFAULT_MODELS = ["small", "medium", "medium, 8 sequences"]
MODES: dict[str, GuardMode] = {"off": "off", "on": "on", "hash": "hash", "control": "on"}
RATIOS = (("on", "off"), ("hash", "on"), ("control", "on"))


class Run:
    """A model with one guard mode, and the costs of its steps."""

    def __init__(self, model_name: str, mode: GuardMode) -> None:
        set_guard(mode)
        torch.manual_seed(0)
        job = ALL_JOBS[model_name]()
        mesh = DeviceMesh.from_group(dist.new_group(), "cpu")
        for unit in job.units:
            fully_shard(unit, mesh=mesh)
        fully_shard(job.model, mesh=mesh)
        self.model, self.compute_loss = job.model, job.compute_loss
        self.costs: list[Cost] = []

    def step(self) -> None:
        self.model.zero_grad()
        dist.barrier()
        meter = Meter()
        self.compute_loss(self.model).backward()
        self.costs.append(meter.read())


def measure(model_name: str, transport: str, rounds: int) -> list[Any]:
    """Returns a row of the table: the time of a step, and the ratios of ``RATIOS``."""
    os.environ["FSDP_C_TRANSPORT"] = TRANSPORTS[transport]
    runs: dict[str, Run] = {}
    for name, mode in MODES.items():
        runs[name] = Run(model_name, mode)
        for _ in range(WARM_UP):
            runs[name].step()
        runs[name].costs.clear()
    for name in take_turns(list(runs), rounds):
        runs[name].step()
    row: list[Any] = [model_name, transport, statistics.median(c.wall for c in runs["on"].costs)]
    for numerator, denominator in RATIOS:
        for field in ("cpu", "wall"):
            pairs = zip(runs[numerator].costs, runs[denominator].costs)
            row.append(statistics.median(getattr(a, field) / getattr(b, field) for a, b in pairs))
    return row


COLUMNS = (
    "model",
    "transport",
    "step, ms",
    *(f"{clock}: {a}/{b}" for a, b in RATIOS for clock in ("CPU", "wall")),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Costs of the guard in whole steps.")
    parser.add_argument("--models", nargs="+", choices=list(ALL_JOBS), default=DEFAULT_MODELS)
    parser.add_argument("--rounds", type=parse_positive, default=60)
    parser.add_argument("--json", help="write the results to this file as well")
    options = parser.parse_args()
    if not start_ranks(WORLD_SIZE):
        return
    torch.set_num_threads(1)
    gc.disable()
    rows = [measure(name, t, options.rounds) for name in options.models for t in TRANSPORTS]
    if dist.get_rank() == 0:
        print(format_table(COLUMNS, rows))
        write_json(options.json, "checksums", {"columns": COLUMNS, "rows": rows})
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
