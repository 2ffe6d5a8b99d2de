"""The jobs of ``data.py``.

Most are jobs of other tests: of the parity tests on GPUs (``gpu_jobs.py``), of the races step of
the GPU check (``variants.py``), and of features of the parity tests (``features.py``). A job
returns losses, and digests of reduced gradients and of parameters. Its last entry is a digest of
the unsharded parameters that its forwards have read.
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
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook

Job = Callable[[GpuTools], Record]
JOBS: dict[str, Job] = {}
FLOAT8 = torch.float8_e4m3fn


def job(function: Job) -> Job:
    JOBS[function.__name__] = function
    return function


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


EXCLUDED = {
    "func_grad": "operators of functorch are not executed",
    "func_jvp": "likewise",
    "pipeline_of_two_stages": "is on the CPU",
    "spmd_mesh_with_dp_mesh_dims": "is on the CPU",
    "compiled_blocks": "takes seconds",
    "compiled_root": "likewise",
    "tensor_parallel_mixed_accumulated": "likewise",
    "offload": "gpu_jobs.py has such a job",
}
"""Jobs of ``features.py`` that do not run here, with the reason."""
NEED_FOUR_RANKS = ("hsdp", "smaller_group")
"""First words of the variants that run on four or more ranks, and not on two."""


def variant_tools(
    implementation: str,
    rank: int,
    world: int,
    *,
    width: int = 16,
    layers: int = 2,
    steps: int = 2,
) -> VariantTools:
    variants.WORLD = world
    device = torch.device("cuda", 0)
    tools = VariantTools(implementation, device, width, layers, rows=4, steps=steps)
    tools.rank = rank
    return tools


def _run_with_gathered(function: Callable[[], Record]) -> Record:
    """Runs a job. Adds a digest of the unsharded parameters after the forward of each module."""
    gathered: list[torch.Tensor] = []

    def copy(module: nn.Module, *_: Any) -> None:
        parameters = [*module.parameters(recurse=False)]
        meshes = {p.device_mesh.mesh_dim_names for p in parameters if isinstance(p, DTensor)}
        if meshes - {("tp",)}:
            raise TypeError(f"a forward of {type(module).__name__} read sharded parameters")
        gathered.extend(variants.copies(parameters))

    handle = register_module_forward_hook(copy)
    try:
        record = function()
    finally:
        handle.remove()
    data = torch.cat([p.reshape(-1).view(torch.uint8) for p in gathered])
    return [*record, features.digest([data])]


def _run_variant(tools: VariantTools, name: str) -> Record:
    return [variants.digest(variants.VARIANTS[name](tools))]


def jobs_of(implementation: str, rank: int, world: int) -> dict[str, Callable[[], Record]]:
    """Returns the jobs by name. On four or more ranks they are those of HSDP, of smaller groups,
    and of features. On two ranks they are all others."""
    functions: dict[str, Any] = dict(gpu_jobs.CASES | gpu_jobs.ALL_GATHERS | JOBS)
    if world >= 4:
        functions = {f"{name} (GPU)": job for name, job in gpu_jobs.MANY_RANKS.items()}
        functions |= {n: job for n, job in features.CASES.items() if n not in EXCLUDED}
    tools = GpuTools(rank, world, implementation)
    jobs = {name: functools.partial(function, tools) for name, function in functions.items()}
    variant = variant_tools(implementation, rank, world)
    for name in variants.names(variant.device):
        if name.startswith(NEED_FOUR_RANKS) == (world >= 4):
            jobs[f"{name} (variant)"] = functools.partial(_run_variant, variant, name)
    return {name: functools.partial(_run_with_gathered, run) for name, run in jobs.items()}
