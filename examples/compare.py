"""Times and traces steps of torch's FSDP2 and fsdp_c in turns."""

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
    """One implementation: its model, its step function, the seconds of its steps, and one trace."""

    model: nn.Module
    step: Callable[[], object]
    seconds: list[float] = field(default_factory=list)
    trace: Any = None


def side_by_side(sides: dict[str, Side], steps: int) -> None:
    """Run ``steps`` steps of each side in turns, after a warm-up, and trace one more step of
    each."""
    import fsdp_c  # fsdp_c.trace works for torch's FSDP2, too

    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # silences torch's profiler
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
