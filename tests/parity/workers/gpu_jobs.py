"""Seeded trainings on a CUDA device, under torch's FSDP2 and under fsdp_c.

``run(rank, world_size, implementation)`` runs every case and returns ``{case: record}``, as
features.py does on the CPU. ``launch("gloo4", implementation)`` starts the ranks. With NCCL each
rank has its own device. With gloo, which supports CUDA tensors, all ranks share the first device.
Launches are non-blocking. FSDP_C_GPU_JOBS_DEVICE=cpu runs the cases without a GPU, over gloo.
"""

from __future__ import annotations

import importlib
import itertools
import os
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from features import MIXED, WIDTH, Record, Tools, blocks, digest
from launch import run_ranks
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy

CASES: dict[str, Callable[[GpuTools], Record]] = {}
DEVICE = os.environ.get("FSDP_C_GPU_JOBS_DEVICE", "cuda")


class GpuTools(Tools):
    """One implementation's functions on this process's CUDA device."""

    def __init__(self, rank: int, world_size: int, implementation: str) -> None:
        super().__init__(rank, world_size, implementation)
        self._is_fsdp_c = implementation == "fsdp_c"

    def accelerate(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Accelerates the optimizer if the implementation is fsdp_c."""
        if self._is_fsdp_c:
            importlib.import_module("fsdp_c.optim").accelerate(optimizer)
        return optimizer

    def flat(self) -> DeviceMesh:
        return init_device_mesh(DEVICE, (self.world_size,))

    def mesh(self, *names: str) -> DeviceMesh:
        return init_device_mesh(DEVICE, (2, self.world_size // 2), mesh_dim_names=names)

    def input(self, step: int, width: int = WIDTH) -> torch.Tensor:
        return super().input(step, width).to(DEVICE)

    def flat_case(self, width: int = WIDTH, **kwargs: Any) -> Record:
        model = self.shard(blocks(width=width), mesh=self.flat(), **kwargs)
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
def uneven_shards(tools: GpuTools) -> Record:
    return tools.flat_case(width=9, mp_policy=MIXED)


@case
def without_reshard_after_forward(tools: GpuTools) -> Record:
    return tools.flat_case(reshard_after_forward=False)


@case
def offload(tools: GpuTools) -> Record:
    return tools.flat_case(offload_policy=CPUOffloadPolicy(pin_memory=DEVICE != "cpu"))


@case
def accumulated(tools: GpuTools) -> Record:
    def sync(model: Any, last: bool) -> None:
        model.set_requires_gradient_sync(last)

    model = tools.shard(blocks(), mesh=tools.flat(), mp_policy=MIXED)
    return tools.train(model, micro=3, sync=sync)


@case
def manual_prefetch(tools: GpuTools) -> Record:
    model = tools.shard(blocks(), mesh=tools.flat())
    for now, then in itertools.pairwise(model):
        now.set_modules_to_forward_prefetch([then])
    handle = model.unshard(async_op=True)
    handle.wait()
    return tools.train(model)


@case
def memory_from_process_group(tools: GpuTools) -> Record:
    """NCCL provides buffers on devices with multicast; gloo provides none."""
    model = tools.shard(blocks(), mesh=tools.flat(), mp_policy=MIXED)
    for unit in (*model, model):
        unit.set_allocate_memory_from_process_group_for_comm(True)
    return tools.train(model)


@case
def replicated(tools: GpuTools) -> Record:
    model = blocks().to(DEVICE)
    for block in model:
        tools.replicate(block)
    return tools.train(tools.replicate(model))


@case
def clipped(tools: GpuTools) -> Record:
    model = tools.shard(blocks(), mesh=tools.flat())
    model(tools.input(0)).pow(2).sum().backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    return [norm.full_tensor().item(), *tools.train(model)]  # type: ignore[attr-defined]


OPTIMIZERS: tuple[Callable[[Any], torch.optim.Optimizer], ...] = (
    lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    *(torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam),
    *(torch.optim.Adamax, torch.optim.Adadelta, torch.optim.Adagrad, torch.optim.RMSprop),
    *(torch.optim.ASGD, lambda params: torch.optim.AdamW(params, fused=True)),
)


@case
def optimizers(tools: GpuTools) -> Record:
    """Trains with each optimizer. Its default implementation depends on the device."""
    record: Record = []
    for make_optimizer in OPTIMIZERS:
        model = tools.shard(blocks(), mesh=tools.flat(), mp_policy=MIXED)
        optimizer = tools.accelerate(make_optimizer(model.parameters()))
        for step in range(3):
            model(tools.input(step)).float().pow(2).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        record.append(digest(model.parameters()))
    return record


def hsdp(tools: GpuTools) -> Record:
    """Trains with HSDP on an even number of ranks, at least four."""
    model = tools.shard(blocks(), mesh=tools.mesh("replicate", "shard"), mp_policy=MIXED)
    return tools.train(model)


def reshard_to_two_ranks(tools: GpuTools) -> Record:
    return tools.flat_case(reshard_after_forward=2, mp_policy=MIXED)


MANY_RANKS: dict[str, Callable[[GpuTools], Record]] = {
    "hsdp": hsdp,
    "reshard_to_two_ranks": reshard_to_two_ranks,
}
"""Cases that need at least four ranks."""


def run(rank: int, world_size: int, implementation: str) -> dict[str, Record]:
    """Runs all cases and returns this rank's records."""
    warnings.simplefilter("ignore")
    if DEVICE == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    tools = GpuTools(rank, world_size, implementation)
    records: dict[str, Record] = {}
    for name, function in (CASES | (MANY_RANKS if world_size >= 4 else {})).items():
        try:
            records[name] = function(tools)
            if DEVICE == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            records[name] = [f"{type(error).__name__}: {error}"]
        dist.barrier()
    return records


def launch(name: str, implementation: str) -> list[dict[str, Record]]:
    """Runs all cases on a launch ("nccl1": one rank over NCCL). Returns all ranks' records."""
    backend, ranks = name[:-1], int(name[-1])
    return run_ranks(
        run,
        ranks,
        (implementation,),
        backend=backend,
        timeout=400,
        collective_timeout=40,
        fresh=DEVICE == "cuda",  # CUDA does not support fork after its initialization
    )
