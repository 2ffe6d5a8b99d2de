"""Host cost of a training step per parameter group and per parameter, torch's FSDP2 and fsdp_c.

Method. One process with a fake process group of 8 ranks, whose collectives complete immediately.
The model has ``--groups`` equal groups of tiny parameters below a root without parameters,
resharded after forward. A group's forward multiplies its input by each of its parameters, so the
model itself costs little. Three copies of the model take turns within every round, in changing
order: bare, under torch and under fsdp_c. A step is one forward and one backward.

On the CPU, the time of a step is the CPU time of the calling thread, which also runs backward. With
another ``--device``, autograd runs backward in its own threads. The time is then the CPU time of
the process. The device is idle when a step begins, and the script does not wait for the device. The
garbage collector is off. Gradients are set to None between steps, outside the timed part, so every
backward allocates its gradients as in a usual training loop.

The time of a model is its minimum over the rounds. The cost of an implementation is (its time - the
bare model's time) / groups. The cost per parameter is the slope of a least-squares line over the
numbers of parameters per group. In jobs in mixed precision, the bare model computes in bf16.

Each job is a table: both precisions on a 1-D mesh, both on a 2 x 4 mesh (HSDP), and forwards alone
under no_grad. The job "guard" runs guard.py, which measures the comparison of collectives between
two real ranks; only on the CPU.

    python benchmarks/host.py [--rounds N] [--groups N] [--params 1 2 5 9 14 20] [--jobs fp32 ...]
                              [--device cuda] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from ranks import take_turns
from report import (
    POLICIES,
    FullyShard,
    format_table,
    get_implementations,
    make_fake_mesh,
    parse_positive,
    write_json,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

WORLD_SIZE = 8
REPLICAS = 2
WIDTH = 16
PRINTED_COUNTS = (1, 9, 20)
WARM_UP_STEPS = 5
STEPS_PER_TURN = 2


@dataclass(frozen=True)
class Job:
    """Settings of the steps in one table."""

    precision: str
    hsdp: bool = False
    no_grad: bool = False


JOBS = {
    "fp32": Job("fp32"),
    "mixed": Job("mixed"),
    "fp32 hsdp": Job("fp32", hsdp=True),
    "mixed hsdp": Job("mixed", hsdp=True),
    "fp32 no_grad": Job("fp32", no_grad=True),
    "mixed no_grad": Job("mixed", no_grad=True),
}
GUARD = "guard"


class VectorUnit(nn.Module):
    """Multiplies its input by each of its ``count`` vectors: (WIDTH,) -> (WIDTH,)."""

    def __init__(self, count: int) -> None:
        super().__init__()
        for index in range(count):
            self.register_parameter(f"scale{index}", nn.Parameter(torch.ones(WIDTH)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self._parameters.values():
            x = x * scale
        return x


class TimedModel:
    """One model with its input and the times of its steps (nanoseconds of CPU time)."""

    def __init__(self, model: nn.Module, x: torch.Tensor, no_grad: bool) -> None:
        self.model = model
        self.x = x
        self.on_cpu = x.device.type == "cpu"
        self.clock = time.thread_time_ns if self.on_cpu else time.process_time_ns
        self.step = self._forward if no_grad else self._train
        self.parameters = list(model.parameters())
        self.times: list[int] = []

    @torch.no_grad()
    def _forward(self) -> None:
        begin = self._begin()
        self.model(self.x)
        self.times.append(self.clock() - begin)

    def _begin(self) -> int:
        if not self.on_cpu:
            torch.accelerator.synchronize()
        return self.clock()

    def _train(self) -> None:
        begin = self._begin()
        self.model(self.x).sum().backward()
        self.times.append(self.clock() - begin)
        for parameter in self.parameters:
            parameter.grad = None


def build_model(
    job: Job, groups: int, params: int, shard: FullyShard | None, mesh: DeviceMesh
) -> TimedModel:
    """Builds a model of ``groups`` groups of ``params`` vectors, sharded by ``shard`` if given."""
    model = nn.Sequential(*(VectorUnit(params) for _ in range(groups))).to(mesh.device_type)
    x = torch.ones(WIDTH, device=mesh.device_type)
    policy = POLICIES[job.precision]
    if shard is None:
        model.to(policy.param_dtype)
        return TimedModel(model, x.to(policy.param_dtype), job.no_grad)
    for group in model:
        shard(group, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    shard(model, mesh=mesh, mp_policy=policy)
    return TimedModel(model, x, job.no_grad)


def measure(
    implementations: dict[str, FullyShard],
    mesh: DeviceMesh,
    job: Job,
    groups: int,
    params: int,
    rounds: int,
) -> dict[str, float]:
    """Returns microseconds per group and step.

    The bare model's time is absolute. Times of implementations are relative to the bare model.
    """
    models = {"bare": build_model(job, groups, params, None, mesh)}
    for name, shard in implementations.items():
        models[name] = build_model(job, groups, params, shard, mesh)
    for run in models.values():
        for _ in range(WARM_UP_STEPS):
            run.step()
        run.times.clear()
    gc.collect()
    gc.disable()
    try:
        for name in take_turns(list(models), rounds):
            for _ in range(STEPS_PER_TURN):
                models[name].step()
    finally:
        gc.enable()
    best = {name: min(run.times) / 1000 / groups for name, run in models.items()}
    return {name: us if name == "bare" else us - best["bare"] for name, us in best.items()}


def compute_ratio(row: dict[str, float]) -> float:
    """Returns torch's cost divided by fsdp_c's."""
    return row["torch"] / row["fsdp_c"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Host cost per group and parameter.")
    parser.add_argument(
        "--rounds", type=parse_positive, default=30, help="rounds in which each model takes a turn"
    )
    parser.add_argument("--groups", type=parse_positive, default=16)
    parser.add_argument("--params", type=parse_positive, nargs="+", default=[1, 2, 5, 9, 14, 20])
    jobs = [*JOBS, GUARD]
    parser.add_argument("--jobs", nargs="+", choices=jobs, default=jobs, metavar="JOB")
    parser.add_argument(
        "--device",
        default="cpu",
        help="device type; except with cpu, the CPU time of all threads counts",
    )
    parser.add_argument("--json", help="write the results to this file as well")
    options = parser.parse_args()
    counts = sorted(set(options.params))
    flat_mesh = make_fake_mesh(WORLD_SIZE, options.device)
    names = ("replicate", "shard")
    hybrid_mesh = init_device_mesh(
        options.device, (REPLICAS, WORLD_SIZE // REPLICAS), mesh_dim_names=names
    )
    implementations = get_implementations()
    results: dict[str, Any] = {"groups": options.groups, "rounds": options.rounds}
    for name in options.jobs:
        if name == GUARD:
            continue
        job = JOBS[name]
        mesh = hybrid_mesh if job.hsdp else flat_mesh
        rows = {
            params: measure(implementations, mesh, job, options.groups, params, options.rounds)
            for params in counts
        }
        results[name] = print_results(name, rows, list(implementations))
    if GUARD in options.jobs and options.device == "cpu":
        results[GUARD] = run_guard(options.groups, options.rounds)
    write_json(options.json, "host", results)


def run_guard(groups: int, rounds: int) -> dict[str, dict[str, float]]:
    """Runs guard.py, with 10 times the rounds of the other jobs. Returns its results."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "guard.json")
        command = ["--groups", str(groups), "--rounds", str(10 * rounds), "--json", str(target)]
        script = Path(__file__).with_name("guard.py")
        subprocess.run([sys.executable, str(script), *command], check=True)
        data = json.loads(target.read_text())
    return {name: value for name, value in data.items() if isinstance(value, dict)}


def print_results(
    title: str, rows: dict[int, dict[str, float]], implementations: list[str]
) -> dict[str, Any]:
    """Prints one job's table and fitted lines. Returns them for the JSON file.

    There are no lines through the costs of a single number of parameters.
    """
    print(f"{title}: us of CPU time per group and step, minus those of the bare model")
    shown = [params for params in rows if params in PRINTED_COUNTS] or list(rows)
    table = [
        [
            params,
            *(rows[params][k] for k in ("bare", "torch", "fsdp_c")),
            compute_ratio(rows[params]),
        ]
        for params in shown
    ]
    print(format_table(["parameters", "bare", "torch", "fsdp_c", "torch/fsdp_c"], table))
    fits = {}
    for name in implementations if len(rows) > 1 else ():
        line = statistics.linear_regression(list(rows), [row[name] for row in rows.values()])
        fits[name] = {"fixed_us": line.intercept, "us_per_param": line.slope}
        print(f"{name}: {line.intercept:.1f} us per group + {line.slope:.2f} us per parameter")
    print()
    return {
        "us_per_group_step": rows,
        "ratio": {params: compute_ratio(row) for params, row in rows.items()},
        "fit": fits,
    }


if __name__ == "__main__":
    main()
