"""Runs a benchmark script on gloo ranks: one process per rank."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import torch.nn as nn
from report import format_table, parse_positive

STORE = "FSDP_C_BENCH_STORE"
WARM_UP = 2
"""Rounds before those that are measured."""


def start_ranks(world_size: int) -> bool:
    """In the launching process, runs the script on ``world_size`` ranks and returns False.

    In a rank, joins the default process group and returns True. Raises SystemExit if a rank fails.
    If a rank fails, or the launching process gets SIGTERM, the other ranks are terminated.
    """
    if STORE in os.environ:
        torch.set_num_threads(1)
        rank, store = int(os.environ["RANK"]), dist.FileStore(os.environ[STORE], world_size)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=120)
        )
        return True
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {STORE: f"{folder}/store", "OMP_NUM_THREADS": "1"}
        signal.signal(signal.SIGTERM, _exit_by_signal)
        processes: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world_size):
                env |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                processes.append(subprocess.Popen([sys.executable, *sys.argv], env=env))
            while None in [process.poll() for process in processes]:
                if any(process.returncode for process in processes):
                    break
                os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # blocks until a rank ends
        finally:
            for process in processes:
                process.terminate()  # no effect on a rank that has ended
            codes = [process.wait() for process in processes]
    if any(codes):
        raise SystemExit(1)
    return False


def _exit_by_signal(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def take_turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Yields each name once per round. Each pair of rounds has an order and the reverse order.

    The first name changes from pair to pair, so no name always follows the same one.
    """
    for index in range(rounds):
        first = index // 2 % len(names)
        order = [*names[first:], *names[:first]]
        yield from reversed(order) if index % 2 else order


class Times(NamedTuple):
    """Milliseconds of one call."""

    wall: float
    cpu: float


def measure_in_turns(
    calls: dict[str, Callable[[], object]],
    rounds: int,
    prepare: Callable[[], object] = lambda: None,
) -> dict[str, Times]:
    """Returns wall and CPU milliseconds of each call, the minima over the rounds.

    The calls take turns, each after ``prepare()`` and a barrier. The minimum is the best estimate,
    because other processes on the machine can only lengthen a call.
    """
    wall: dict[str, list[float]] = {name: [] for name in calls}
    cpu: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(WARM_UP + rounds):
        for name, call in calls.items():
            prepare()
            dist.barrier()
            begin, cpu_begin = time.perf_counter(), time.thread_time()
            call()
            if i >= WARM_UP:
                cpu[name].append((time.thread_time() - cpu_begin) * 1000)
                wall[name].append((time.perf_counter() - begin) * 1000)
    return {name: Times(min(wall[name]), min(cpu[name])) for name in calls}


def format_times(title: str, results: dict[Any, dict[str, Times]]) -> str:
    """Formats a table of "torch" and "fsdp_c" by wall and CPU time, one row per result."""
    rows: list[list[object]] = []
    for label, times in results.items():
        torch_value, fsdp_c_value = times["torch"], times["fsdp_c"]
        wall = [torch_value.wall, fsdp_c_value.wall, torch_value.wall / fsdp_c_value.wall]
        rows.append(
            [label, *wall, torch_value.cpu, fsdp_c_value.cpu, torch_value.cpu / fsdp_c_value.cpu]
        )
    titles = [
        f"{clock} {column}" for clock in ("wall", "cpu") for column in ("torch", "fsdp_c", "ratio")
    ]
    return format_table([title, *titles], rows)


def parse_tens(text: str) -> int:
    """Parses the number of parameters of ``make_model`` for argparse."""
    number = parse_positive(text)
    if number % 10:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of 10, a layer's parameters")
    return number


class Layer(nn.Module):
    """Five linear layers with residual connections: ten parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(width, width) for _ in range(5)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts:
            x = x + torch.tanh(part(x))  # the residual keeps gradients from becoming denormal
        return x


def make_model(parameters: int, width: int) -> nn.Sequential:
    """Returns a model of layers with ten parameters each: five (width, width) and five (width,)."""
    return nn.Sequential(*(Layer(width) for _ in range(parameters // 10)))
