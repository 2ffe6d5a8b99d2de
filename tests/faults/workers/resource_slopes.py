"""Resources of a process against the number of steps, models, exceptions, installs and groups.

    python tests/faults/workers/resource_slopes.py [--scale 1.0] [--job models]

Needs ``tests/harness`` and the workers' folders in PYTHONPATH. Two gloo ranks repeat each job.
A warm-up of half as many repetitions comes first. Rank 0 counts its resources at eleven points. The
result is the slope of a least-squares line, per repetition. Resident bytes are those of anonymous
memory: the pages of a ring buffer become resident at their first use, up to 4 MiB for each rank.

Prints a table. The exit status is 1 if a slope of fsdp_c is above its limit and above the slope of
torch's FSDP2 in the same job.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import importlib
import os
import re
import sys
from array import array
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
from behavior import Api, blocks_and_head, shard
from launch import run_ranks
from lifetime import FAILURES, UserError, allocated
from torch.distributed.device_mesh import DeviceMesh

INTERVALS = 10
"""Number of intervals between the counts of resources."""
LIMITS = {
    "objects": 0.02,
    "tensors": 0.005,
    "threads": 0.005,
    "files": 0.005,
    "mappings": 0.02,
    "bytes": 32.0,
    "resident bytes": 1024.0,
}
"""Largest slope, per repetition. Smaller slopes are noise: single objects in caches, arenas."""


def count_resources() -> dict[str, float]:
    gc.collect()
    objects = gc.get_objects()
    anonymous = re.search(r"RssAnon:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert anonymous is not None
    return {
        "objects": len(objects),
        "tensors": sum(issubclass(type(o), torch.Tensor) for o in objects),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "mappings": len(Path("/proc/self/maps").read_text().splitlines()),
        "bytes": allocated(),
        "resident bytes": 1024 * int(anonymous[1]),
    }


# ---- jobs ----


class Job:
    """The work that a rank repeats. A new job is made for each measurement."""

    def __init__(self, api: Api) -> None:
        self.api = api

    def repeat(self) -> None:
        raise NotImplementedError


def run_step(model: nn.Module) -> None:
    model(torch.ones(2, 5)).square().mean().backward()


class Steps(Job):
    """Steps with an optimizer."""

    def __init__(self, api: Api) -> None:
        super().__init__(api)
        self.model = shard(api, blocks_and_head())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.001)

    def repeat(self) -> None:
        run_step(self.model)
        self.optimizer.step()
        self.optimizer.zero_grad()


class Models(Job):
    """Models that are created, trained for a step and deleted."""

    def repeat(self) -> None:
        run_step(shard(self.api, blocks_and_head()))


class Exceptions(Job):
    """Exceptions in forward and in backward, in turns, with a step after each."""

    def __init__(self, api: Api) -> None:
        super().__init__(api)
        self.model = shard(api, blocks_and_head())
        self.count = 0

    def repeat(self) -> None:
        hook = list(FAILURES.values())[self.count % len(FAILURES)]
        self.count += 1
        handle = self.model[1].register_forward_hook(hook)
        if self.api.is_fsdp_c:
            with contextlib.suppress(UserError):
                run_step(self.model)
            self.model.reset_iter_state()
        else:  # torch's model cannot train after an exception
            model, self.model = self.model, shard(self.api, blocks_and_head())
            with contextlib.suppress(UserError):
                run_step(model)
        handle.remove()
        self.model.zero_grad()
        run_step(self.model)


class Installs(Job):
    """``install`` and ``uninstall``, with a step of a model of torch's ``fully_shard`` between."""

    def repeat(self) -> None:
        import fsdp_c

        if self.api.is_fsdp_c:
            fsdp_c.install()
        run_step(shard(Api("torch", self.api.rank, self.api.world, Path()), blocks_and_head()))
        if self.api.is_fsdp_c:
            fsdp_c.uninstall()


class Groups(Job):
    """Process groups that are created, used by a model, and destroyed."""

    def repeat(self) -> None:
        group = dist.new_group()
        mesh = DeviceMesh.from_group(group, "cpu")
        run_step(shard(self.api, blocks_and_head(), mesh=mesh))
        del mesh
        gc.collect()
        dist.destroy_process_group(group)


@dataclass(frozen=True)
class JobSetting:
    job: type[Job]
    repetitions: int


JOBS = {
    "steps": JobSetting(Steps, 2000),
    "models": JobSetting(Models, 500),
    "exceptions": JobSetting(Exceptions, 500),
    "install and uninstall": JobSetting(Installs, 500),
    "process groups": JobSetting(Groups, 200),
}


# ---- measurement ----


def measure_jobs(
    rank: int, world: int, implementation: str, counts: dict[str, int]
) -> dict[str, dict[str, float]]:
    """Returns the slopes of each job. Runs in a rank."""
    return {
        job: measure(Api(implementation, rank, world, Path()), job, count)
        for job, count in counts.items()
    }


def measure(api: Api, job: str, count: int) -> dict[str, float]:
    """Returns the slope of each resource, per repetition."""
    run = JOBS[job].job(api)
    warm_up, step = count // 2, count // INTERVALS
    values = array("d", bytes(8 * len(LIMITS) * (INTERVALS + 1)))  # later writes make no objects
    for _ in range(warm_up):
        run.repeat()
    for point in range(INTERVALS + 1):
        for _ in range(step if point > 0 else 0):
            run.repeat()
        dist.barrier()
        for index, value in enumerate(count_resources().values()):
            values[point * len(LIMITS) + index] = value
    return {
        key: fit_slope([(i * step, values[i * len(LIMITS) + index]) for i in range(INTERVALS + 1)])
        for index, key in enumerate(LIMITS)
    }


def fit_slope(points: list[tuple[int, float]]) -> float:
    mean_x = sum(x for x, _ in points) / len(points)
    mean_y = sum(y for _, y in points) / len(points)
    covariance = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return covariance / sum((x - mean_x) ** 2 for x, _ in points)


def find_slopes(implementation: str, counts: dict[str, int]) -> dict[str, dict[str, float]]:
    """Runs jobs on two ranks and returns the slopes of rank 0. ``counts``: job -> repetitions."""
    # torch's flight recorder keeps the last 2000 collectives, which would count as a leak.
    env = {"TORCH_FR_BUFFER_SIZE": "0"}
    # If this file runs as a script, its own functions cannot be imported by the ranks.
    target = importlib.import_module("resource_slopes").measure_jobs
    slopes: dict[str, dict[str, float]] = run_ranks(
        target, 2, (implementation, counts), timeout=1200, env=env
    )[0]
    return slopes


def find_leaks(slopes: dict[str, float], torch_slopes: dict[str, float]) -> list[str]:
    """Returns the resources whose slope is above the limit and above torch's."""
    return [
        key
        for key, limit in LIMITS.items()
        if slopes[key] > limit and slopes[key] > 1.05 * max(0.0, torch_slopes[key])
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Resources against repetitions.")
    parser.add_argument("--scale", type=float, default=1.0, help="of the numbers of repetitions")
    parser.add_argument("--job", choices=JOBS, action="append")
    options = parser.parse_args()
    print(f"| job | repetitions | implementation | {' | '.join(LIMITS)} |")
    print(f"|{' --- |' * (len(LIMITS) + 3)}")
    leaks = []
    for job in options.job or JOBS:
        slopes = {}
        count = max(INTERVALS, int(JOBS[job].repetitions * options.scale))
        for implementation in ("fsdp_c", "torch"):
            slopes[implementation] = found = find_slopes(implementation, {job: count})[job]
            values = " | ".join(f"{found[key] + 0.0:.3g}" for key in LIMITS)
            print(f"| {job} | {count} | {implementation} | {values} |", flush=True)
        leaks += [f"{job}: {leak}" for leak in find_leaks(slopes["fsdp_c"], slopes["torch"])]
    for leak in leaks:
        print(f"leak: {leak}", file=sys.stderr)
    sys.exit(bool(leaks))


if __name__ == "__main__":
    main()
