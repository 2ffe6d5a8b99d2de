"""Measures and traces steps of torch's FSDP2 and of fsdp_c in turns, and draws them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import comparison_plot
import torch
import torch.distributed as dist
from job import RANK, UsageError, print_on_rank_0
from torch import Tensor, nn

WARM_UP = 2


@dataclass
class ImplementationRun:
    """One implementation: its model, its step function, the seconds of its steps, and one trace."""

    model: nn.Module
    step: Callable[[], object]
    seconds: list[float] = field(default_factory=list)
    trace: Any = None


def compare_implementations(
    make_run: Callable[[str], tuple[nn.Module, torch.optim.Optimizer]],
    train_step: Callable[..., object],
    batch: tuple[Tensor, Tensor],
    steps: int,
    folder: Path,
) -> None:
    """Times ``steps`` steps of each implementation in turns, after a warm-up, and traces one more.

    Writes steps.png and the timeline of fsdp_c, step.json. ``make_run`` returns the model and the
    optimizer of an implementation, for ``train_step``.
    """
    runs = {}
    for impl in ("torch", "fsdp_c"):
        try:
            model, optimizer = make_run(impl)
        except UsageError as error:
            print_on_rank_0(f"Not compared      {error}")
            return
        runs[impl] = ImplementationRun(model, partial(train_step, model, optimizer, *batch))
    import fsdp_c  # fsdp_c.trace works for torch's FSDP2, too

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences torch's profiler
    for turn in range(WARM_UP + steps):
        for run in runs.values():
            dist.barrier()
            start = time.perf_counter()
            run.step()
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
            if turn >= WARM_UP:
                run.seconds.append(time.perf_counter() - start)
    for run in runs.values():
        with fsdp_c.trace(run.model) as run.trace:
            run.step()
    runs["fsdp_c"].trace.save(folder / "step.json")
    print_on_rank_0(f"One step          {runs['fsdp_c'].trace.summary()}")
    if RANK == 0:
        seconds = {impl: run.seconds for impl, run in runs.items()}
        traces = {impl: run.trace for impl, run in runs.items()}
        comparison_plot.draw_comparison(folder / "steps.png", seconds=seconds, traces=traces)
