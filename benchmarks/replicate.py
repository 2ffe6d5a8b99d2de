"""fsdp_c's ``replicate``, torch's ``replicate`` and DDP: step time, host time, transient memory.

Method. Each implementation treats the whole model as one unit. There are two models: a GPT with few
large parameters, whose time depends on the reduction, and layers with many small parameters, whose
time depends on the host.

- Step: ``--ranks`` gloo processes with one thread each run forward and backward, with gradients set
  to None before. The three implementations and the bare model, which does not communicate, take
  turns within every round. Results are medians and minima over the rounds on rank 0.
  ``--optimizer`` adds AdamW's step.
- Memory: the same ranks train the GPT. The result is the peak of transient bytes in a step, counted
  as in ``memory.py``, minus the bare model's, in units of the parameters' bytes. DDP's buckets are
  as large as the gradients and exist before the step. The script adds them to DDP's result.
- Host: one process on a fake group of 8 ranks, which DDP does not support, trains the model with
  small parameters. The result is the CPU time of the calling thread minus the bare model's, minimum
  over the rounds.

    python benchmarks/replicate.py [--rounds N] [--ranks N] [--layers N] [--width N] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from memory import BACKWARD, FORWARD, measure_peaks
from ranks import STORE, make_model, start_ranks
from report import format_table, make_fake_mesh, parse_positive, write_json
from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT, GPTConfig, next_byte_loss

from fsdp_c import replicate

ONE_PROCESS = "FSDP_C_BENCH_ONE_PROCESS"
WARM_UP_ROUNDS = 3
WARM_UP_STEPS = 2
"""Steps before the memory of a step is measured."""
IMPLEMENTATIONS: dict[str, Callable[[nn.Module], Any]] = {
    "bare": lambda model: model,
    "ddp": lambda model: DistributedDataParallel(model),
    "torch": lambda model: torch_replicate(model),
    "fsdp_c": lambda model: replicate(model),
}


class TimedModel:
    """One model under one implementation, with the times of its steps in milliseconds."""

    def __init__(
        self, make: Callable[[], tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]], name: str
    ) -> None:
        torch.manual_seed(0)
        model, self.compute_loss = make()
        self.model = IMPLEMENTATIONS[name](model)
        self.parameters = list(self.model.parameters())
        self.optimizer: torch.optim.Optimizer | None = None
        self.times: list[float] = []

    def step(self) -> None:
        with record_function(FORWARD):
            loss = self.compute_loss(self.model)
        with record_function(BACKWARD):
            loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()

    def clear_gradients(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def run_timed_step(self, clock: Callable[[], float]) -> None:
        """Runs one step and appends its time."""
        self.clear_gradients()
        if dist.get_backend() == "gloo":
            dist.barrier()
        begin = clock()
        self.step()
        self.times.append((clock() - begin) * 1000)


def make_gpt(options: argparse.Namespace) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Returns a model with few large parameters, on an input of (batch, context) bytes."""
    config = GPTConfig(options.layers, options.width, heads=8, context=128)
    tokens = torch.randint(256, (options.batch, config.context))
    return GPT(config), lambda model: next_byte_loss(model(tokens), tokens)


def make_layers(
    _: argparse.Namespace,
) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Returns a model with 500 small parameters, on an input of (4, 64)."""
    x = torch.randn(4, 64)
    return make_model(500, 64), lambda model: model(x).square().mean()


MODELS = {"gpt": make_gpt, "small": make_layers}


def measure_steps(
    options: argparse.Namespace, model_name: str, names: Iterable[str] = IMPLEMENTATIONS
) -> dict[str, TimedModel]:
    """Runs the implementations in turns. Returns the runs, with the times of their steps."""
    runs = {name: TimedModel(lambda: MODELS[model_name](options), name) for name in names}
    if options.optimizer:
        for run in runs.values():
            run.optimizer = torch.optim.AdamW(run.parameters, lr=1e-5)
    clock = time.perf_counter if dist.get_backend() == "gloo" else time.thread_time
    for is_warm_up in (True, False):
        gc.collect()
        gc.disable()
        for _ in range(WARM_UP_ROUNDS if is_warm_up else options.rounds):
            for run in runs.values():
                run.run_timed_step(clock)
        gc.enable()
        if is_warm_up:
            for run in runs.values():
                run.times.clear()
    return runs


def measure_memory(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Returns peak transient bytes minus the bare model's, in units of the parameters' bytes."""
    peaks_by_name: dict[str, dict[str, float]] = {}
    for name in IMPLEMENTATIONS:
        run = TimedModel(lambda: make_gpt(options), name)
        for _ in range(WARM_UP_STEPS):
            run.step()
            run.clear_gradients()
        unit = sum(parameter.numel() * parameter.element_size() for parameter in run.parameters)
        peaks = {key: value / unit for key, value in measure_peaks(run.step).items()}
        if name == "ddp":
            peaks = {key: value + 1.0 for key, value in peaks.items()}  # the buckets
        peaks_by_name[name] = peaks
    bare = peaks_by_name["bare"]
    return {
        name: {phase: peaks[phase] - bare[phase] for phase in ("forward", "backward")}
        for name, peaks in peaks_by_name.items()
    }


def report_steps(options: argparse.Namespace) -> None:
    """Measures step times and memory. Every rank must call it, and rank 0 prints."""
    results: dict[str, Any] = {}
    rows: list[list[object]] = []
    for model_name in MODELS:
        runs = measure_steps(options, model_name)
        fsdp_c_median = statistics.median(runs["fsdp_c"].times)
        for name, run in runs.items():
            median = statistics.median(run.times)
            rows.append([f"{model_name} {name}", median, min(run.times), median / fsdp_c_median])
            results[f"{model_name} {name}"] = {"median": median, "min": min(run.times)}
        if dist.get_rank() == 0 and model_name == "gpt":
            millions = sum(parameter.numel() for parameter in runs["bare"].parameters) / 1e6
            print(f"ms of a step on {options.ranks} gloo ranks; gpt: {millions:.1f} M parameters")
    if dist.get_rank() == 0:
        print(format_table(["model", "median", "min", "median/fsdp_c"], rows), flush=True)
    results["memory"] = peaks = measure_memory(options)
    if dist.get_rank() == 0:
        print("\npeak transient memory of the gpt above bare, in units of its parameters' bytes")
        rows = [[name, peak["forward"], peak["backward"]] for name, peak in peaks.items()]
        print(format_table(["", "forward", "backward"], rows), flush=True)
        write_json(options.json, "replicate", {**results, **vars(options)})


def report_host_time(options: argparse.Namespace) -> None:
    """Measures host time on a fake group, prints it and adds it to the JSON file."""
    make_fake_mesh(8)
    runs = measure_steps(options, "small", ("bare", "torch", "fsdp_c"))
    bare = min(runs["bare"].times)
    times = {name: min(run.times) - bare for name, run in runs.items()}
    print("\nhost time: ms of CPU of a step minus the bare model's, 500 parameters")
    print(format_table(["", "ms"], [*times.items()]))
    if options.json is not None:
        file = Path(options.json)
        file.write_text(json.dumps(json.loads(file.read_text()) | {"host_ms": times}, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(description="fsdp_c's replicate, torch's replicate and DDP.")
    parser.add_argument("--rounds", type=parse_positive, default=12)
    parser.add_argument("--ranks", type=parse_positive, default=2)
    parser.add_argument("--layers", type=parse_positive, default=8)
    parser.add_argument("--width", type=parse_positive, default=512)
    parser.add_argument("--batch", type=parse_positive, default=1)
    parser.add_argument("--optimizer", action="store_true", help="include AdamW's step")
    parser.add_argument("--json", help="write the results to this file as well")
    options = parser.parse_args()
    if ONE_PROCESS in os.environ:
        report_host_time(options)
        return
    in_rank = STORE in os.environ
    if start_ranks(options.ranks):
        report_steps(options)
        dist.destroy_process_group()
    if not in_rank:
        subprocess.run([sys.executable, *sys.argv], env=os.environ | {ONE_PROCESS: "1"}, check=True)


if __name__ == "__main__":
    main()
