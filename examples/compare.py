"""Measures and traces steps of torch's FSDP2 and of fsdp_c in turns."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

WARM_UP = 2


@dataclass
class ImplementationRun:
    """One implementation: its model, its step function, the seconds of its steps, and one trace."""

    model: nn.Module
    step: Callable[[], object]
    seconds: list[float] = field(default_factory=list)
    trace: Any = None


def measure_in_turns(runs: dict[str, ImplementationRun], steps: int) -> None:
    """Runs and times ``steps`` steps of each implementation in turns, after a warm-up.

    Then traces one more step of each.
    """
    import fsdp_c  # fsdp_c.trace works for torch's FSDP2, too

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences torch's profiler
    for turn in range(WARM_UP + steps):
        for run in runs.values():
            dist.barrier()
            start = time.perf_counter()
            run.step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn >= WARM_UP:
                run.seconds.append(time.perf_counter() - start)
    for run in runs.values():
        with fsdp_c.trace(run.model) as run.trace:
            run.step()
