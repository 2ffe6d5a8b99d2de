"""Seeded trainings on a CUDA device, under torch's FSDP2 and under fsdp_c.

``run(rank, world_size, implementation)`` runs every case that the backend and the number of ranks
allow, and returns ``{case: record}``, as features.py does on the CPU. ``launch("gloo4",
implementation)`` starts the ranks. With NCCL each rank has its own device. With gloo, which
supports CUDA tensors, ranks share devices if there are fewer devices than ranks.
FSDP_C_GPU_JOBS_DEVICE=cpu runs the cases without a GPU, over gloo.
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
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

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
        """Returns a mesh of one dimension."""
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


@case
def scaled_float16(tools: GpuTools) -> Record:
    """Trains in float16 with a GradScaler. The first steps overflow and are skipped."""
    half = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32)
    model = tools.shard(blocks(), mesh=tools.flat(), mp_policy=half)
    optimizer = tools.accelerate(torch.optim.AdamW(model.parameters(), lr=0.01))
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**17)
    record: Record = []
    for step in range(5):
        loss = model(tools.input(step)).float().pow(2).sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        record += [scaler.get_scale(), digest(model.parameters())]
    # The first step overflowed, so the scale was reduced. The last step did not change the scale.
    assert record[0] < 2.0**17 and record[-2] == record[-4]
    return record


@case
def autocast(tools: GpuTools) -> Record:
    model = tools.shard(blocks(), mesh=tools.flat())
    with torch.autocast(DEVICE, torch.bfloat16):
        losses = [model(tools.input(step)).float().pow(2).sum() for step in range(2)]
    for loss in losses:
        loss.backward()
    return [*(loss.item() for loss in losses), digest(p.grad for p in model.parameters())]


@case
def recomputed(tools: GpuTools) -> Record:
    """Trains with activation checkpointing in each unit."""
    model = nn.Sequential(*map(checkpoint_wrapper, blocks()))
    return tools.train(tools.shard(model, mesh=tools.flat(), mp_policy=MIXED))


@case
def frozen(tools: GpuTools) -> Record:
    """Trains with a frozen block, and with frozen biases in the others."""
    model = blocks()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not (name.startswith("0.") or name.endswith("bias")))
    model = tools.shard(model, mesh=tools.flat(), mp_policy=MIXED)
    record: Record = []
    for step in range(2):
        model(tools.input(step)).float().pow(2).sum().backward()
        record.append(digest(p.grad for p in model.parameters()))
    return record


@case
def meta_initialized(tools: GpuTools) -> Record:
    """Shards a model on the meta device and initializes it on the device."""
    with torch.device("meta"):
        model = blocks()
    model = tools.shard(model, mesh=tools.flat(), mp_policy=MIXED)
    model.to_empty(device=DEVICE)
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            parameter.fill_(0.01 * (i + 1))
    return tools.train(model)


@case
def sharded_checkpoint(tools: GpuTools) -> Record:
    """Loads the state of a trained model and its optimizer into another model, and trains it."""
    states: list[Any] = []
    for seed in range(2):
        model = tools.shard(blocks(seed), mesh=tools.flat())
        optimizer = tools.accelerate(torch.optim.AdamW(model.parameters(), lr=0.01))
        if states:
            set_state_dict(model, optimizer, model_state_dict=states[0], optim_state_dict=states[1])
        model(tools.input(seed)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        states[:] = get_state_dict(model, optimizer)
    return [digest(model.parameters()), digest(s["exp_avg"] for s in states[1]["state"].values())]


@case
def evaluated(tools: GpuTools) -> Record:
    """Evaluates between training steps, without gradients and in inference mode."""
    model = tools.shard(blocks(), mesh=tools.flat(), mp_policy=MIXED)
    record = tools.train(model)
    with torch.no_grad():
        record.append(model(tools.input(7)).float().sum().item())
    with torch.inference_mode():
        record.append(model(tools.input(8)).float().sum().item())
    return [*record, *tools.train(model)]


def full_checkpoint(tools: GpuTools) -> Record:
    """Gathers full states on the host, and loads them from rank 0 into another model."""
    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    model = tools.shard(blocks(), mesh=tools.flat(), mp_policy=MIXED)
    tools.train(model)
    state = get_model_state_dict(model, options=full)
    other = tools.shard(blocks(1), mesh=tools.flat(), mp_policy=MIXED)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, state, options=options)
    return [digest(state.values()), digest(other.parameters()), *tools.train(other)]


ALL_GATHERS: dict[str, Callable[[GpuTools], Record]] = {"full_checkpoint": full_checkpoint}
"""Cases that all-gather DTensors. gloo's all-gather of CUDA tensors ends with SIGSEGV."""


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
    """Runs the cases that backend and number of ranks allow. Returns this rank's records."""
    warnings.simplefilter("ignore")
    if DEVICE == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    tools = GpuTools(rank, world_size, implementation)
    records: dict[str, Record] = {}
    functions = CASES | (MANY_RANKS if world_size >= 4 else {})
    if DEVICE != "cuda" or dist.get_backend() == "nccl":
        functions |= ALL_GATHERS
    for name, function in functions.items():
        try:
            records[name] = function(tools)
            if DEVICE == "cuda":
                torch.cuda.synchronize()
        except Exception as error:
            records[name] = [f"raised {type(error).__name__}: {error}"]
        dist.barrier()
    return records


def find_exceptions(runs: dict[str, list[dict[str, Record]]], name: str) -> list[str]:
    """Returns the exceptions that a case raised on any rank under any implementation."""
    records = [record[name] for ranks in runs.values() for record in ranks]
    return [str(r[0]) for r in records if str(r[0]).startswith("raised ")]


def launch(name: str, implementation: str) -> list[dict[str, Record]]:
    """Starts the ranks that ``name`` describes ("nccl1": one, over NCCL). Returns all records."""
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
