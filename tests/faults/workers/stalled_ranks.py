"""Ranks 0 and 2 wait for rank 1 until their reports about the wait are logged.

Run by ``test_stalled_ranks.py`` on three gloo ranks, with a limit of one second.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from behavior import Api, blocks_and_head, shard, train

LATE_RANK, WAITING = 1, (0, 2)


class ReportFile(logging.Handler):
    """Writes the reports of this rank to files. Continues the late process, which may be stopped,
    when each waiting rank has written one."""

    def __init__(self, folder: Path, rank: int, late_process: int) -> None:
        super().__init__()
        self.folder, self.rank, self.late_process = folder, rank, late_process
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "has waited" not in text:
            return
        self.count += 1
        partial = self.folder / f"partial{self.rank}"
        partial.write_text(text)
        partial.rename(self.folder / f"report{self.rank}-{self.count}")
        if all((self.folder / f"report{rank}-1").exists() for rank in WAITING):
            os.kill(self.late_process, signal.SIGCONT)


def wait_for_reports(folder: Path, count: int = 1) -> None:
    """Waits until each waiting rank has written ``count`` reports."""
    # os.access of a str has no Python frame, so reports show this file as the place of the thread
    reports = [str(folder / f"report{rank}-{count}") for rank in WAITING]
    while not all(os.access(report, os.F_OK) for report in reports):
        time.sleep(0.01)


def sleep_in_forward(model: nn.Module, folder: Path) -> None:
    """Sleeps until the second reports."""

    def hook(*unused: Any) -> None:
        wait_for_reports(folder, 2)

    model.get_submodule("1").register_forward_pre_hook(hook)


def leave_forward(model: nn.Sequential, folder: Path) -> None:
    """Leaves a forward by an exception, and then sleeps until the first reports."""

    def fail(*unused: Any) -> None:
        raise ValueError

    handle = model[1].register_forward_pre_hook(fail)
    try:
        model(torch.ones(2, 5))
    except ValueError:
        wait_for_reports(folder)
    handle.remove()


def stop_process(model: nn.Module, folder: Path) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


CASES: dict[str, Callable[[nn.Sequential, Path], None]] = {
    "sleeps": sleep_in_forward,
    "left forward": leave_forward,
    "stopped": stop_process,
}


def run_case(rank: int, world: int, folder: str, case: str) -> float:
    """Trains, lets rank 1 be late, and trains again. Returns a sum of the parameters."""
    path = Path(folder)
    api = Api("fsdp_c", rank, world, path)
    model = shard(api, blocks_and_head())
    train(model, rank, 1)
    processes: list[Any] = [None] * world
    dist.all_gather_object(processes, os.getpid())
    logger = logging.getLogger("torch.distributed.fsdp.fully_shard")
    logger.addHandler(ReportFile(path, rank, processes[LATE_RANK]))
    if rank == LATE_RANK:
        CASES[case](model, path)
    if case == "left forward":
        if rank != LATE_RANK:
            model(torch.ones(2, 5))
        else:  # the gather that the exception left out
            model.get_submodule("2").unshard()
        model.reset_iter_state()
    train(model, rank, 1)
    return sum(float(p.full_tensor().double().sum()) for p in model.parameters())
