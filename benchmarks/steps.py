"""Whole training steps on real ranks: the bare model, DDP, stock FSDP2 and ours.

Method. ``--ranks`` gloo processes with one thread each; four models. In every round each of the
implementations makes one step, after a barrier: forward, backward (read first), and the optimizer's
step (read again, from the same start). Medians over the rounds on rank 0 of

- wall and CPU milliseconds (of all threads of the process),
- page faults (``ru_minflt``).

Peaks are taken in a second pass: of resident memory (``VmHWM``, reset before) above that at the
step's begin, after the C library and fsdp_c have given back what they keep free, which would hide
them (and cost page faults). What an implementation keeps between steps (DDP's buckets) is not in
them.

``bare`` does not communicate. Gradients are ``None`` before each step. The optimizer is AdamW with
torch's defaults (SGD for ``wide``, whose states would fill the memory of a small machine); ours is
accelerated, as it is with ``FSDP_C=1``. Of ``deep`` there is ours once more, ``shared``:
neighbouring units share collectives (``auto_shard(min_unit=)``). As many rounds are made as fit
into ``--seconds`` for each model. In the end a step of stock and one of ours are made while another
process looks at the resident memory.

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
from host import WIDTH, Group
from meter import Cost, Meter, give_back, memory_over
from ranks import start_ranks
from report import implementations, table, write_json
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT, GPTConfig, next_byte_loss

import fsdp_c
from fsdp_c.ending import wait_for_threads

NAMES = ("bare", "ddp", "stock", "ours")
MIN_UNIT = 2**14
"""Bytes of a unit of ``shared`` at least: ``deep`` has four of them."""
MOST_ROUNDS = 40
WARM_UP = 2
PEAKS = 2
SETTLING = 12
"""Steps before them: what ours keeps follows the last eight."""


@dataclass
class Job:
    """A model, the modules that are its units, and its loss."""

    model: nn.Module
    units: list[nn.Module]
    loss: Callable[[nn.Module], torch.Tensor]
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.AdamW


def gpt(config: GPTConfig, batch: int) -> Job:
    """Input (batch, context) bytes."""
    tokens = torch.randint(256, (batch, config.context))
    model = GPT(config)
    return Job(model, list(model.blocks), lambda model: next_byte_loss(model(tokens), tokens))


def chain(units: list[nn.Module], x: torch.Tensor, optimizer: Any = torch.optim.AdamW) -> Job:
    """Units one after the other."""
    return Job(nn.Sequential(*units), units, lambda model: model(x).square().mean(), optimizer)


JOBS: dict[str, Callable[[], Job]] = {
    "small": lambda: gpt(GPTConfig(), 8),
    "medium": lambda: gpt(GPTConfig(layers=8, width=512, heads=8), 1),
    "wide": lambda: chain(
        [nn.Linear(4096, 4096) for _ in range(6)], torch.randn(16, 4096), torch.optim.SGD
    ),
    "deep": lambda: chain([Group(5) for _ in range(200)], torch.ones(WIDTH)),
    "tiny": lambda: chain([Group(2) for _ in range(2)], torch.ones(WIDTH)),
}
"""``tiny`` is there to try this script."""
WITH_SHARED = ("deep", "tiny")
TITLES = {
    "small": "small GPT",
    "medium": "medium GPT",
    "wide": "wide, 6 x Linear(4096, 4096)",
    "deep": "deep, 200 units of 5 small parameters",
    "tiny": "tiny",
}


class Timed:
    """One model under one implementation, with what its steps have cost."""

    def __init__(self, kind: str, name: str) -> None:
        torch.manual_seed(0)
        job = JOBS[kind]()
        self.loss = job.loss
        self.model: nn.Module = job.model
        if name == "ddp":
            self.model = DistributedDataParallel(job.model)
        elif name == "shared":
            fsdp_c.auto_shard(job.model, type(job.units[0]), min_unit=MIN_UNIT)
        elif name != "bare":
            shard = implementations()[name]
            for unit in job.units:
                shard(unit)
            shard(job.model)
        self.optimizer = job.optimizer(self.model.parameters(), lr=1e-5)
        if name in ("ours", "shared"):
            fsdp_c.optim.accelerate(self.optimizer)
        self.costs: dict[str, list[Cost]] = {"without": [], "with": []}
        self.peaks: dict[str, list[Cost]] = {"without": [], "with": []}
        """Without and with the optimizer."""

    def turn(self, into: dict[str, list[Cost]]) -> None:
        """One step, its costs noted after backward and after the optimizer."""
        self.optimizer.zero_grad()
        dist.barrier()
        meter = Meter()
        self.loss(self.model).backward()
        into["without"].append(meter.read())
        self.optimizer.step()
        into["with"].append(meter.read())

    def turns_for_peaks(self) -> None:
        for _ in range(SETTLING):
            self.turn({"without": [], "with": []})
        for _ in range(PEAKS):
            self.optimizer.zero_grad()
            give_back()
            self.turn(self.peaks)

    def memory(self) -> list[tuple[float, float]]:
        """Over one step, as ``memory_over`` has it."""
        self.optimizer.zero_grad()
        give_back()
        dist.barrier()
        return memory_over(self._step)

    def _step(self) -> None:
        self.loss(self.model).backward()
        self.optimizer.step()

    def medians(self) -> dict[str, dict[str, float | None]]:
        found = {}
        for kind, costs in self.costs.items():
            found[kind] = _medians(costs[WARM_UP:])
            found[kind]["peak"] = _medians(self.peaks[kind])["peak"]
        return found


def _medians(costs: list[Cost]) -> dict[str, float | None]:
    found: dict[str, float | None] = {"least_wall": min(cost.wall for cost in costs)}
    for field in Cost._fields:
        values = [getattr(cost, field) for cost in costs]
        found[field] = None if None in values else statistics.median(values)
    return found


def measure(kind: str, seconds: float) -> dict[str, Any]:
    """In every rank: the implementations' costs, of turns in one run."""
    names = NAMES + (("shared",) if kind in WITH_SHARED else ())
    timed = {name: Timed(kind, name) for name in names}
    gc.collect()
    gc.disable()
    for _ in range(WARM_UP):
        begin = time.perf_counter()
        for one in timed.values():
            one.turn(one.costs)
    rounds = _agree(min(MOST_ROUNDS, max(3, int(seconds / (time.perf_counter() - begin)))))
    for _ in range(rounds):
        for one in timed.values():
            one.turn(one.costs)
    for one in timed.values():
        one.turns_for_peaks()
    gc.enable()
    parameters = list(timed["bare"].model.parameters())
    return {
        "title": f"{TITLES[kind]}, {sum(p.numel() for p in parameters) / 1e6:.3g} M parameters",
        "optimizer": type(timed["bare"].optimizer).__name__,
        "rounds": rounds,
        "costs": {name: one.medians() for name, one in timed.items()},
        "memory": {name: timed[name].memory() for name in ("stock", "ours")},
    }


def _agree(number: int) -> int:
    """Rank 0's number, on all ranks."""
    value = torch.tensor(number)
    dist.broadcast(value, 0)
    return int(value)


def rows_of(found: dict[str, Any], kind: str) -> list[list[object]]:
    """A row for each implementation: medians, and stock's and its own wall beside ours."""
    costs = {name: one[kind] for name, one in found["costs"].items()}
    ours = costs["ours"]["wall"]
    rows: list[list[object]] = []
    for name, one in costs.items():
        faults = None if one["faults"] is None else int(one["faults"])
        rows.append(
            [name, one["wall"], one["wall"] / ours, one["least_wall"], one["cpu"], faults]
            + [one["peak"]]
        )
    return rows


COLUMNS = ("", "wall, ms", "wall/ours", "least wall", "CPU, ms", "page faults", "peak, MiB")


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps of bare, DDP, stock FSDP2 and ours.")
    parser.add_argument("--models", nargs="+", choices=JOBS, default=[*JOBS][:4], metavar="MODEL")
    parser.add_argument("--seconds", type=float, default=60, help="for each model, about")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--json", help="write the results to this file as well")
    options = parser.parse_args()
    if not start_ranks(options.ranks):
        return
    results = {}
    for kind in options.models:
        results[kind] = found = measure(kind, options.seconds)
        if dist.get_rank() == 0:
            for what in ("without", "with"):
                print(f"{found['title']}: {what} {found['optimizer']}, {found['rounds']} rounds")
                print(table(COLUMNS, rows_of(found, what)), end="\n\n", flush=True)
        gc.collect()
    if dist.get_rank() == 0:
        write_json(options.json, "steps", {"ranks": options.ranks, "models": results})
    dist.barrier()
    dist.destroy_process_group()
    wait_for_threads()


if __name__ == "__main__":
    main()
