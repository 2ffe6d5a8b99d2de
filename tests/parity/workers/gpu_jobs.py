"""Seeded scripts on a CUDA device, for torch's FSDP2 and for fsdp_c.

``run(rank, world_size, implementation, threads)`` trains every case and returns ``{case: record}``,
as features.py does on the CPU. With ``threads`` above 1, so many ranks are threads of this process
that share its device, over torch's threaded process group: one GPU is enough to run the kernels
that pack and unpack. That group copies between the threads' tensors without regard to streams, so
CUDA_LAUNCH_BLOCKING=1 must be set then. With 1, the backend is the launcher's.
"""

from __future__ import annotations

import itertools
import threading
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from features import MIXED, WIDTH, Record, Tools, blocks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

CASES: dict[str, Callable[[GpuTools], Record]] = {}
# Threads share torch's generator, from which blocks() draws.
_drawing = threading.Lock()


class GpuTools(Tools):
    """One implementation's functions, on this process's CUDA device."""

    def flat(self) -> DeviceMesh:
        return init_device_mesh("cuda", (self.world_size,))

    def mesh(self, *names: str) -> DeviceMesh:
        return init_device_mesh("cuda", (2, self.world_size // 2), mesh_dim_names=names)

    def input(self, step: int, width: int = WIDTH) -> torch.Tensor:
        return super().input(step, width).cuda()

    def blocks(self, width: int = WIDTH) -> nn.Sequential:
        with _drawing:
            return blocks(width=width)

    def flat_case(self, width: int = WIDTH, **kwargs: Any) -> Record:
        model = self.shard(self.blocks(width), mesh=self.flat(), **kwargs)
        return self.train(model, width=width)


def case(function: Callable[[GpuTools], Record]) -> Callable[[GpuTools], Record]:
    CASES[function.__name__] = function
    return function


@case
def fp32(tools: GpuTools) -> Record:
    return tools.flat_case()


@case
def mixed(tools: GpuTools) -> Record:
    return tools.flat_case(mp_policy=MIXED)


@case
def uneven_rows(tools: GpuTools) -> Record:
    return tools.flat_case(width=9, mp_policy=MIXED)


@case
def kept_after_forward(tools: GpuTools) -> Record:
    return tools.flat_case(reshard_after_forward=False)


@case
def offload(tools: GpuTools) -> Record:
    return tools.flat_case(offload_policy=CPUOffloadPolicy())


@case
def accumulated(tools: GpuTools) -> Record:
    def sync(model: Any, last: bool) -> None:
        model.set_requires_gradient_sync(last)

    model = tools.shard(tools.blocks(), mesh=tools.flat(), mp_policy=MIXED)
    return tools.train(model, micro=3, sync=sync)


@case
def prefetched_by_hand(tools: GpuTools) -> Record:
    model = tools.shard(tools.blocks(), mesh=tools.flat())
    for now, then in itertools.pairwise(model):
        now.set_modules_to_forward_prefetch([then])
    handle = model.unshard(async_op=True)
    handle.wait()
    return tools.train(model)


@case
def replicated(tools: GpuTools) -> Record:
    model = tools.blocks().cuda()
    for block in model:
        tools.replicate(block)
    return tools.train(tools.replicate(model))


@case
def clipped(tools: GpuTools) -> Record:
    model = tools.shard(tools.blocks(), mesh=tools.flat())
    model(tools.input(0)).pow(2).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return [norm.full_tensor().item(), *tools.train(model)]  # type: ignore[attr-defined]


def hsdp(tools: GpuTools) -> Record:
    """Needs an even number of ranks, at least four."""
    model = tools.shard(tools.blocks(), mesh=tools.mesh("replicate", "shard"), mp_policy=MIXED)
    return tools.train(model)


def smaller_group_after_forward(tools: GpuTools) -> Record:
    return tools.flat_case(reshard_after_forward=2, mp_policy=MIXED)


MANY_RANKS: dict[str, Callable[[GpuTools], Record]] = {
    "hsdp": hsdp,
    "smaller_group_after_forward": smaller_group_after_forward,
}
"""Cases for four ranks and more."""


def _records(rank: int, world_size: int, implementation: str) -> dict[str, Record]:
    tools = GpuTools(rank, world_size, implementation)
    records: dict[str, Record] = {}
    for name, function in (CASES | (MANY_RANKS if world_size >= 4 else {})).items():
        try:
            records[name] = function(tools)
            torch.cuda.synchronize()
        except Exception as error:
            records[name] = [f"{type(error).__name__}: {error}"]
            if world_size > 1:  # the peers wait in a collective that this rank never enters
                raise
    return records


def run(
    rank: int, world_size: int, implementation: str, threads: int = 1
) -> list[dict[str, Record]]:
    """The records of this process's ranks."""
    warnings.simplefilter("ignore")
    if threads == 1:
        torch.cuda.set_device(rank)
        return [_records(rank, world_size, implementation)]
    import thread_ranks

    dist.destroy_process_group()
    records: list[dict[str, Record]] = [{} for _ in range(threads)]

    def one(index: int) -> None:
        try:
            records[index] = _records(index, threads, implementation)
        except BaseException as error:
            thread_ranks.stop_peers(error)
            raise

    thread_ranks.run_threads(threads, one)
    return records
