"""Scripts that combine FSDP2 with sequence, loss and pipeline parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from scripts import Script, copy_of, gradients, script, weights
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import (
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

DEVICE = torch.device("cpu")
WIDTH = 8


def data_tensor_mesh() -> DeviceMesh:
    """Returns a mesh with one data-parallel and two tensor-parallel ranks."""
    return init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))


# ---- sequence and loss parallelism ----


@script(costly=True)
def sequence_parallel(api: Script) -> Any:
    mesh = data_tensor_mesh()
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
    model = nn.Sequential(nn.LayerNorm(WIDTH), *layers)
    plan = {
        "0": SequenceParallel(use_local_output=False),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh["tensor"], plan)
    api.fully_shard(model, mesh=mesh["data"])

    def loss(step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        return model(torch.randn(2, 4, WIDTH, generator=generator)).square().mean()

    return api.train(model, loss)


@script(costly=True)
def loss_parallel_cross_entropy(api: Script) -> Any:
    mesh = data_tensor_mesh()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 16))
    plan = {
        "0": ColwiseParallel(output_layouts=Replicate()),
        "2": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh["tensor"], plan)
    api.shard(model, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results: list[Any] = []
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randn(4, WIDTH, generator=generator)
        labels = torch.randint(0, 16, (4,), generator=generator)
        with loss_parallel():
            loss = nn.functional.cross_entropy(model(rows), labels)
            loss.backward()
        results += [copy_of(loss), gradients(model)]
        optimizer.step()
        optimizer.zero_grad()
    return [*results, weights(model)]


# ---- pipelines ----


def build_stage(api: Script, mesh: DeviceMesh, index: int, count: int) -> PipelineStage:
    torch.manual_seed(index)
    part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    api.shard(part, mesh=mesh["data"], reshard_after_forward=False)
    return PipelineStage(part, index, count, DEVICE, group=mesh.get_group("pipeline"))


def mean_squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def train_pipeline(api: Script, kind: Any, stages_per_rank: int) -> list[Any]:
    """Trains two steps of a pipeline schedule with ``stages_per_rank`` stages per rank."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipeline", "data"))
    count = api.world * stages_per_rank
    stages = [build_stage(api, mesh, index, count) for index in range(api.rank, count, api.world)]
    schedule = kind(stages if stages_per_rank > 1 else stages[0], 4, loss_fn=mean_squared_error)
    params = [param for stage in stages for param in stage.submod.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)
    results: list[Any] = []
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        rows, target = (torch.randn(8, WIDTH, generator=generator) for _ in range(2))
        losses: list[torch.Tensor] = []
        if api.rank == 0:
            schedule.step(rows)
        else:
            schedule.step(target=target, losses=losses)
        results += [copy_of(loss) for loss in losses]
        results += [gradients(stage.submod) for stage in stages]
        optimizer.step()
        optimizer.zero_grad()
    return [*results, *(weights(stage.submod) for stage in stages)]


@script()
def pipeline_gpipe(api: Script) -> Any:
    return train_pipeline(api, ScheduleGPipe, 1)


@script(costly=True)
def pipeline_interleaved_1f1b(api: Script) -> Any:
    return train_pipeline(api, ScheduleInterleaved1F1B, 2)


@script(costly=True)
def pipeline_interleaved_zero_bubble(api: Script) -> Any:
    """The schedule computes input gradients first and weight gradients later."""
    return train_pipeline(api, ScheduleInterleavedZeroBubble, 2)
