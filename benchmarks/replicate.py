"""``replicate`` beside DDP and stock replicate: step time, host time and transient memory.

Method. The whole model is one unit for all three, as for DDP. Two models: a GPT with few large
parameters, where gradients are megabytes and their reduction matters, and layers with many small
parameters, where the host's work does.

- Step: ``--ranks`` gloo processes with one thread each; forward and backward, gradients set to None
  before. The implementations (and the bare model, which does not communicate) take turns within
  every round; medians and minima over the rounds on rank 0. ``--optimizer`` adds AdamW's step.
- Memory: on the same ranks, the GPT; the highest sum of bytes alive at one time in a step that are
  neither parameters nor the gradients that the step leaves, as ``memory.py`` counts them, in units
  of the parameters' bytes, above the bare model's (activations, and the output layer's). DDP's
  buckets exist before the step and are as large as the gradients; they are added, being neither.
- Host: one process on a fake group of 8 ranks (where DDP does not run), the model with small
  parameters; CPU time of the calling thread above the bare model's, minimum over the rounds.

    python benchmarks/replicate.py [--rounds N] [--ranks N] [--layers N] [--width N] [--json FILE]
"""

from __future__ import annotations

import argparse
import gc
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
from memory import BACKWARD, FORWARD, peaks_of
from ranks import STORE, model_of, start_ranks
from report import fake_mesh, table, write_json
from torch.distributed._composable.replicate_with_fsdp import replicate as stock_replicate
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT, GPTConfig, next_byte_loss

from fsdp_c import replicate

ONE_PROCESS = "FSDP_C_BENCH_ONE_PROCESS"
IMPLEMENTATIONS: dict[str, Callable[[nn.Module], Any]] = {
    "bare": lambda model: model,
    "ddp": lambda model: DistributedDataParallel(model),
    "stock": lambda model: stock_replicate(model),
    "ours": lambda model: replicate(model),
}


class Timed:
    """One model under one implementation, with a step and the times of its steps."""

    def __init__(
        self, make: Callable[[], tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]], name: str
    ) -> None:
        torch.manual_seed(0)
        model, self.loss = make()
        self.model = IMPLEMENTATIONS[name](model)
        self.parameters = list(self.model.parameters())
        self.optimizer: torch.optim.Optimizer | None = None
        self.times: list[float] = []

    def step(self) -> None:
        with record_function(FORWARD):
            loss = self.loss(self.model)
        with record_function(BACKWARD):
            loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()

    def clear(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def turn(self, clock: Callable[[], float]) -> None:
        """One step, its time noted in milliseconds."""
        self.clear()
        if dist.get_backend() == "gloo":
            dist.barrier()
        begin = clock()
        self.step()
        self.times.append((clock() - begin) * 1000)


def gpt(options: argparse.Namespace) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """Few large parameters; input (batch, context) bytes."""
    config = GPTConfig(options.layers, options.width, heads=8, context=128)
    tokens = torch.randint(256, (options.batch, config.context))
    return GPT(config), lambda model: next_byte_loss(model(tokens), tokens)


def small(_: argparse.Namespace) -> tuple[nn.Module, Callable[[nn.Module], torch.Tensor]]:
    """500 small parameters; input (4, 64)."""
    x = torch.randn(4, 64)
    return model_of(500, 64), lambda model: model(x).square().mean()


MODELS = {"gpt": gpt, "small": small}


def measure_steps(
    options: argparse.Namespace, kind: str, names: Iterable[str] = IMPLEMENTATIONS
) -> dict[str, Timed]:
    """Each implementation's step times in milliseconds, of turns in one run."""
    timed = {name: Timed(lambda: MODELS[kind](options), name) for name in names}
    if options.optimizer:
        for one in timed.values():
            one.optimizer = torch.optim.AdamW(one.parameters, lr=1e-5)
    clock = time.perf_counter if dist.get_backend() == "gloo" else time.thread_time
    for warm in (True, False):
        gc.collect()
        gc.disable()
        for _ in range(3 if warm else options.rounds):
            for one in timed.values():
                one.turn(clock)
        gc.enable()
        if warm:
            for one in timed.values():
                one.times.clear()
    return timed


def measure_memory(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Peak transient bytes in units of the parameters' bytes, above the bare model's."""
    found: dict[str, dict[str, float]] = {}
    for name in IMPLEMENTATIONS:
        one = Timed(lambda: gpt(options), name)
        for _ in range(2):
            one.step()
            one.clear()
        unit = sum(parameter.numel() * parameter.element_size() for parameter in one.parameters)
        peaks = {key: value / unit for key, value in peaks_of(one.step).items()}
        if name == "ddp":
            peaks = {key: value + 1.0 * (key != "kept") for key, value in peaks.items()}
        found[name] = peaks
    return {
        name: {phase: one[phase] - found["bare"][phase] for phase in ("forward", "backward")}
        for name, one in found.items()
    }


def show_steps(options: argparse.Namespace) -> None:
    """In a rank: measures, and prints on rank 0."""
    results: dict[str, Any] = {}
    rows: list[list[object]] = []
    for kind in MODELS:
        timed = measure_steps(options, kind)
        ours = statistics.median(timed["ours"].times)
        for name, one in timed.items():
            median = statistics.median(one.times)
            rows.append([f"{kind} {name}", median, min(one.times), median / ours])
            results[f"{kind} {name}"] = {"median": median, "min": min(one.times)}
        if dist.get_rank() == 0 and kind == "gpt":
            millions = sum(parameter.numel() for parameter in timed["bare"].parameters) / 1e6
            print(f"ms of a step on {options.ranks} gloo ranks; gpt: {millions:.1f} M parameters")
    if dist.get_rank() == 0:
        print(table(["model", "median", "min", "median/ours"], rows), flush=True)
    results["memory"] = peaks = measure_memory(options)
    if dist.get_rank() == 0:
        print("\npeak transient memory of the gpt above bare, in units of its parameters' bytes")
        lines = [[name, one["forward"], one["backward"]] for name, one in peaks.items()]
        print(table(["", "forward", "backward"], lines), flush=True)
        write_json(options.json, "replicate", {**results, **vars(options)})


def show_one_process(options: argparse.Namespace) -> None:
    """Host time on a fake group, printed."""
    fake_mesh(8)
    timed = measure_steps(options, "small", ("bare", "stock", "ours"))
    bare = min(timed["bare"].times)
    print("\nhost time: ms of CPU of a step above the bare model's, 500 parameters")
    print(table(["", "ms"], [[name, min(one.times) - bare] for name, one in timed.items()]))


def main() -> None:
    parser = argparse.ArgumentParser(description="replicate beside DDP and stock replicate.")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--optimizer", action="store_true", help="include AdamW's step")
    parser.add_argument("--json", help="write the step times to this file as well")
    options = parser.parse_args()
    if ONE_PROCESS in os.environ:
        show_one_process(options)
        return
    in_rank = STORE in os.environ
    if start_ranks(options.ranks):
        show_steps(options)
        dist.destroy_process_group()
    if not in_rank:
        subprocess.run([sys.executable, *sys.argv], env=os.environ | {ONE_PROCESS: "1"}, check=True)


if __name__ == "__main__":
    main()
