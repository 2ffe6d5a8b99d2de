"""Both implementations side by side: step times in turns, and one traced step of each."""

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
class Side:
    """One implementation: its model and what a step is, the seconds of its steps, one traced."""

    model: nn.Module
    step: Callable[[], object]
    seconds: list[float] = field(default_factory=list)
    trace: Any = None


def side_by_side(sides: dict[str, Side], steps: int) -> None:
    """Make ``steps`` steps of each in turns, after a warm-up, and trace one more of each."""
    import fsdp_c  # traces torch's FSDP2 as well

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler says when it starts
    for turn in range(WARM_UP + steps):
        for side in sides.values():
            dist.barrier()
            start = time.perf_counter()
            side.step()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            if turn >= WARM_UP:
                side.seconds.append(time.perf_counter() - start)
    for side in sides.values():
        with fsdp_c.trace(side.model) as side.trace:
            side.step()
