"""The jobs of ``data.py``.

Most are jobs of other tests: of the parity tests on GPUs (``gpu_jobs.py``), of the races step of the
GPU check (``variants.py``), and of features of the parity tests (``features.py``). A job returns a
list of numbers and digests: losses, and the bits of reduced gradients and of parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import features
import gpu_jobs
import torch
import torch.nn as nn
import variants
from extensions import Extended, OneArgument
from features import MIXED, Record, blocks
from gpu_jobs import GpuTools
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule

Job = Callable[[GpuTools], Record]
JOBS: dict[str, Job] = {}
FLOAT8 = torch.float8_e4m3fn


def job(function: Job) -> Job:
    JOBS[function.__name__] = function
    return function


class Tools(GpuTools):
    """As GpuTools, also for the jobs of ``features.py``, which call no method for the mesh."""

    @functools.cached_property
    def world_mesh(self) -> DeviceMesh:
        return init_device_mesh("cuda", (self.world_size,))

    def shard(self, model: nn.Sequential, **kwargs: Any) -> Any:
        kwargs.setdefault("mesh", self.world_mesh)
        return super().shard(model, **kwargs)

    def accumulate(self, model: Any) -> Record:
        return super().accumulate(model)


class VariantTools(variants.Tools):
    """Small models for ``variants.py``. Each rank has other inputs."""

    rank = 0

    def inputs(self, count: int, width: int = 0) -> list[torch.Tensor]:
        width = width or self.width
        generator = torch.Generator().manual_seed(self.rank)
        return list(torch.randn((count, self.rows, width), generator=generator).cuda())


class Float8(Extended):
    """Gathers the tensor in float8, and its scale in the metadata, as float8 training does."""

    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], float]:
        scale = 64.0
        return ((self.held * scale).to(FLOAT8),), scale

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: float,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        (values,) = all_gather_outputs
        if values.dtype != FLOAT8:
            raise TypeError(f"gathered {values.dtype}, expected {FLOAT8}")
        wide = values.to(torch.float32).div(metadata).to(param_dtype)
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(wide)
            return None
        return wide, (wide,)


def _extended(tools: GpuTools, extension: type, **kwargs: Any) -> Record:
    model = blocks(bias=False)
    for block in model:
        block[0].weight = nn.Parameter(extension(block[0].weight.detach().cuda()))
    return tools.accumulate(tools.shard(model, **kwargs))


@job
def extension_with_two_inputs(tools: GpuTools) -> Record:
    return _extended(tools, OneArgument)


@job
def float8_extension(tools: GpuTools) -> Record:
    return _extended(tools, Float8)


@job
def float8_extension_mixed(tools: GpuTools) -> Record:
    return _extended(tools, Float8, mp_policy=MIXED)


@job
def divide_factor(tools: GpuTools) -> Record:
    """The factor is an argument of NCCL's reduction (PreMulSum)."""
    model = tools.shard(blocks(), mp_policy=MIXED)
    for unit in (*model, model):
        unit.set_gradient_divide_factor(3.0)
    return tools.train(model)


@job
def sum_reduction(tools: GpuTools) -> Record:
    model = tools.shard(blocks(), mp_policy=MIXED)
    for unit in (*model, model):
        unit.set_force_sum_reduction_for_comms(True)
    return tools.train(model)


@job
def symmetric_memory(tools: GpuTools) -> Record:
    model = tools.shard(blocks())
    for unit in (*model, model):
        unit.set_symm_mem_for_comm()
    return tools.train(model)


if hasattr(FSDPModule, "finalize_backward"):  # since torch 2.15

    @job
    def manual_finalization(tools: GpuTools) -> Record:
        """``finalize_backward`` reduces the gradients of two microbatches."""
        model = tools.shard(blocks(), mp_policy=MIXED)
        model.set_manual_backward_finalization(True)
        record: Record = []
        for step in range(3):
            for index in range(2):
                model.set_requires_gradient_sync(False)
                model(tools.input(10 * step + index)).float().pow(2).sum().backward()
            model.set_requires_gradient_sync(True)
            model.finalize_backward(async_op=True).wait()
            record.append(features.digest(p.grad for p in model.parameters()))
            model.zero_grad()
        return record


def cases(implementation: str, rank: int, world: int) -> dict[str, Callable[[], Any]]:
    variants.WORLD = world
    vtools = VariantTools(implementation, torch.device("cuda", 0), width=16, layers=2, rows=4, steps=2)
    vtools.rank = rank
    tools = Tools(rank, world, implementation)
    functions = gpu_jobs.CASES | gpu_jobs.ALL_GATHERS | JOBS
    if world >= 4:
        functions |= gpu_jobs.MANY_RANKS
        functions |= features.CASES
    found: dict[str, Callable[[], Any]] = {
        name: functools.partial(function, tools) for name, function in functions.items()
    }
    for name in variants.names(vtools.device):
        if world == 2 and name == "smaller_group":
            continue
        found[f"{name} (streams)"] = functools.partial(lambda n: [variants.digest(variants.VARIANTS[n](vtools))], name)
    return found
