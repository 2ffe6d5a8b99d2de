"""The jobs of ``data.py``: those of the GPU's parity tests and of the races step of the GPU check."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import gpu_jobs
import torch
import variants


class Tools(variants.Tools):
    """Small models. Each rank has other inputs."""

    rank = 0

    def inputs(self, count: int, width: int = 0) -> list[torch.Tensor]:
        width = width or self.width
        generator = torch.Generator().manual_seed(self.rank)
        return list(torch.randn((count, self.rows, width), generator=generator).cuda())


def cases(implementation: str, rank: int, world: int) -> dict[str, Callable[[], Any]]:
    variants.WORLD = world
    tools = Tools(implementation, torch.device("cuda", 0), width=16, layers=2, rows=4, steps=2)
    tools.rank = rank
    gpu_tools = gpu_jobs.GpuTools(rank, world, implementation)
    functions = gpu_jobs.CASES | gpu_jobs.ALL_GATHERS
    if world >= 4:
        functions |= gpu_jobs.MANY_RANKS
    found: dict[str, Callable[[], Any]] = {
        name: functools.partial(function, gpu_tools) for name, function in functions.items()
    }
    for name in variants.names(tools.device):
        if world == 2 and name == "smaller_group":
            continue
        found[f"{name} (streams)"] = functools.partial(lambda n: [variants.digest(variants.VARIANTS[n](tools))], name)
    return found
