"""Whole training steps on real ranks: the bare model, DDP, torch's FSDP2 and fsdp_c.

Method. ``--ranks`` gloo processes with one thread each train four models. In every round, each
implementation runs one step after a barrier. The order changes from round to round. The script
measures two intervals: from the barrier to the end of backward, and from the barrier to the end of
the optimizer's step. Rank 0 reports, over its own rounds,

- medians of wall and CPU milliseconds (of all threads of the process),
- the minimum of the wall milliseconds,
- the median of page faults (``ru_minflt``).

A second pass measures peaks: the highest resident memory of a step (``VmHWM``, reset before) minus
that at the beginning of the step. Before each step, the C library and fsdp_c return their free
memory to the kernel, because allocations from free memory do not raise the peak. Steps after such a
release have more page faults, so times come from the first pass. Memory that an implementation
keeps between steps (DDP's buckets) is not part of a peak.

``bare`` does not communicate. ``torch`` is torch's FSDP2. ``shared`` is fsdp_c with neighboring
units that share collectives (``auto_shard(min_unit=)``); only ``deep`` and ``tiny`` have this
implementation. Gradients are ``None`` before each step. The optimizer is AdamW with torch's
defaults, and SGD for ``wide``, because AdamW's states would fill the memory of a small machine.
With fsdp_c, ``fsdp_c.optim.accelerate`` changes the optimizer, as under ``FSDP_C=1``. Each model
trains for 3 to 40 rounds, as many as fit into ``--seconds``. Finally, one step each of torch and
fsdp_c runs while another process samples resident memory.

    python benchmarks/steps.py [--models small wide ...] [--seconds N] [--ranks N] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from host import WIDTH, VectorUnit
from meter import Cost, Meter, release_free_memory, sample_memory_over_time
from ranks import start_ranks, take_turns
from report import format_table, get_implementations, parse_positive, write_json
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT, GPTConfig, next_byte_loss

import fsdp_c
from fsdp_c._compat.shutdown import wait_for_threads

IMPLEMENTATIONS = ("bare", "ddp", "torch", "fsdp_c")
MIN_UNIT = 2**14
"""Minimum bytes of a unit of ``shared``, which has four units in ``deep``."""
MAX_ROUNDS = 40
WARM_UP = 2
PEAK_STEPS = 2
STEPS_BEFORE_PEAKS = 12
"""Steps before the peaks are measured. fsdp_c sizes its buffer pool by the last eight steps."""


@dataclass
class Job:
    """A model, the modules that become its units, its loss and the class of its optimizer."""

    model: nn.Module
    units: list[nn.Module]
    compute_loss: Callable[[nn.Module], torch.Tensor]
    optimizer_class: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW


def make_gpt_job(config: GPTConfig, batch: int) -> Job:
    """Returns a GPT on an input of (batch, context) bytes."""
    tokens = torch.randint(256, (batch, config.context))
    model = GPT(config)
    return Job(model, list(model.blocks), lambda model: next_byte_loss(model(tokens), tokens))


def make_chain_job(
    units: list[nn.Module], x: torch.Tensor, optimizer_class: Any = torch.optim.AdamW
) -> Job:
    """Returns a model that applies the units one after the other."""
    model = nn.Sequential(*units)
    return Job(model, units, lambda model: model(x).square().mean(), optimizer_class)


JOBS: dict[str, Callable[[], Job]] = {
    "small": lambda: make_gpt_job(GPTConfig(), 8),
    "medium": lambda: make_gpt_job(GPTConfig(layers=8, width=512, heads=8), 1),
    "wide": lambda: make_chain_job(
        [nn.Linear(4096, 4096) for _ in range(6)], torch.randn(16, 4096), torch.optim.SGD
    ),
    "deep": lambda: make_chain_job([VectorUnit(5) for _ in range(200)], torch.ones(WIDTH)),
    "tiny": lambda: make_chain_job([VectorUnit(2) for _ in range(2)], torch.ones(WIDTH)),
}
"""Models by name; ``tiny`` is for testing this script."""
WITH_SHARED = ("deep", "tiny")
TITLES = {
    "small": "small GPT",
    "medium": "medium GPT",
    "wide": "wide, 6 x Linear(4096, 4096)",
    "deep": "deep, 200 units of 5 small parameters",
    "tiny": "tiny",
}


class TimedModel:
    """One model under one implementation, with the costs of its steps."""

    def __init__(self, model_name: str, implementation: str) -> None:
        torch.manual_seed(0)
        job = JOBS[model_name]()
        self.compute_loss = job.compute_loss
        self.model: nn.Module = job.model
        if implementation == "ddp":
            self.model = DistributedDataParallel(job.model)
        elif implementation == "shared":
            fsdp_c.auto_shard(job.model, type(job.units[0]), min_unit=MIN_UNIT)
        elif implementation != "bare":
            shard = get_implementations()[implementation]
            for unit in job.units:
                shard(unit)
            shard(job.model)
        self.optimizer = job.optimizer_class(self.model.parameters(), lr=1e-5)
        if implementation in ("fsdp_c", "shared"):
            fsdp_c.optim.accelerate(self.optimizer)
        self.costs: dict[str, list[Cost]] = {"without": [], "with": []}
        self.peaks: dict[str, list[Cost]] = {"without": [], "with": []}
        """Costs and peaks without and with the optimizer's step."""

    def run_step(self, costs: dict[str, list[Cost]]) -> None:
        """Runs one step and appends its costs after backward and after the optimizer's step."""
        self.optimizer.zero_grad()
        dist.barrier()
        meter = Meter()
        self.compute_loss(self.model).backward()
        costs["without"].append(meter.read())
        self.optimizer.step()
        costs["with"].append(meter.read())

    def measure_peaks(self) -> None:
        for _ in range(STEPS_BEFORE_PEAKS):
            self.run_step({"without": [], "with": []})
        for _ in range(PEAK_STEPS):
            self.optimizer.zero_grad()
            release_free_memory()
            self.run_step(self.peaks)

    def sample_memory(self) -> list[tuple[float, float]]:
        """Returns the samples of ``sample_memory_over_time`` for one step."""
        self.optimizer.zero_grad()
        release_free_memory()
        dist.barrier()
        return sample_memory_over_time(self._train_once)

    def _train_once(self) -> None:
        self.compute_loss(self.model).backward()
        self.optimizer.step()

    def compute_medians(self) -> dict[str, dict[str, float | None]]:
        medians = {}
        for kind, costs in self.costs.items():
            medians[kind] = _compute_medians(costs[WARM_UP:])
            medians[kind]["peak"] = _compute_medians(self.peaks[kind])["peak"]
        return medians


def _compute_medians(costs: list[Cost]) -> dict[str, float | None]:
    medians: dict[str, float | None] = {"min_wall": min(cost.wall for cost in costs)}
    for field in Cost._fields:
        values = [getattr(cost, field) for cost in costs]
        medians[field] = None if None in values else statistics.median(values)
    return medians


def measure(model_name: str, seconds: float) -> dict[str, Any]:
    """Measures all implementations on one model. Every rank must call it."""
    names = IMPLEMENTATIONS + (("shared",) if model_name in WITH_SHARED else ())
    runs = {name: TimedModel(model_name, name) for name in names}
    gc.collect()
    gc.disable()
    for _ in range(WARM_UP):
        begin = time.perf_counter()
        for run in runs.values():
            run.run_step(run.costs)
    rounds = _broadcast_from_rank_0(
        min(MAX_ROUNDS, max(3, int(seconds / (time.perf_counter() - begin))))
    )
    for name in take_turns(names, rounds):
        runs[name].run_step(runs[name].costs)
    for run in runs.values():
        run.measure_peaks()
    gc.enable()
    millions = sum(param.numel() for param in runs["bare"].model.parameters()) / 1e6
    return {
        "title": f"{TITLES[model_name]}, {millions:.3g} M parameters",
        "optimizer": type(runs["bare"].optimizer).__name__,
        "rounds": rounds,
        "costs": {name: run.compute_medians() for name, run in runs.items()},
        "memory": {name: runs[name].sample_memory() for name in ("torch", "fsdp_c")},
    }


def _broadcast_from_rank_0(number: int) -> int:
    """Returns rank 0's number on all ranks."""
    value = torch.tensor(number)
    dist.broadcast(value, 0)
    return int(value)


def make_rows(result: dict[str, Any], kind: str) -> list[list[object]]:
    """Returns a row of ``COLUMNS`` per implementation; ``kind`` is "without" or "with"."""
    costs = {name: medians[kind] for name, medians in result["costs"].items()}
    fsdp_c_wall = costs["fsdp_c"]["wall"]
    rows: list[list[object]] = []
    for name, cost in costs.items():
        faults = None if cost["faults"] is None else int(cost["faults"])
        wall = cost["wall"]
        rows.append(
            [name, wall, wall / fsdp_c_wall, cost["min_wall"], cost["cpu"], faults, cost["peak"]]
        )
    return rows


COLUMNS = ("", "wall, ms", "wall/fsdp_c", "min wall", "CPU, ms", "page faults", "peak, MiB")


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Steps of the bare model, DDP, torch's FSDP2 and fsdp_c."
    )
    parser.add_argument("--models", nargs="+", choices=JOBS, default=[*JOBS][:4], metavar="MODEL")
    parser.add_argument("--seconds", type=float, default=60, help="approximate time per model")
    parser.add_argument("--ranks", type=parse_positive, default=2)
    parser.add_argument("--json", help="write the results to this file as well")
    options = parser.parse_args()
    if not start_ranks(options.ranks):
        return
    results = {}
    for model_name in options.models:
        results[model_name] = result = measure(model_name, options.seconds)
        if dist.get_rank() == 0:
            for kind in ("without", "with"):
                title = f"{result['title']}: {kind} {result['optimizer']}"
                print(f"{title}, {result['rounds']} rounds")
                print(format_table(COLUMNS, make_rows(result, kind)), end="\n\n", flush=True)
        gc.collect()
    if dist.get_rank() == 0:
        write_json(options.json, "steps", {"ranks": options.ranks, "models": results})
    dist.barrier()
    dist.destroy_process_group()
    wait_for_threads()


if __name__ == "__main__":
    main()
