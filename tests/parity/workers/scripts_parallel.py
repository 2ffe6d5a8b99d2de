"""Scripts that shard beside other kinds of parallelism: pipelines, sequences, classes."""

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


def two_columns() -> DeviceMesh:
    """One rank for data, two for tensors."""
    return init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))


# ---- parts of tensors ----


@script(costly=True)
def parts_of_sequences(run: Script) -> Any:
    mesh = two_columns()
    torch.manual_seed(0)
    layers = (nn.Linear(WIDTH, 2 * WIDTH), nn.ReLU(), nn.Linear(2 * WIDTH, WIDTH))
    model = nn.Sequential(nn.LayerNorm(WIDTH), *layers)
    plan = {
        "0": SequenceParallel(use_local_output=False),
        "1": ColwiseParallel(input_layouts=Shard(1)),
        "3": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(model, mesh["tensor"], plan)
    run.fully_shard(model, mesh=mesh["data"])

    def loss(step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        return model(torch.randn(2, 4, WIDTH, generator=generator)).square().mean()

    return run.train(model, loss)


@script(costly=True)
def losses_over_parts_of_classes(run: Script) -> Any:
    mesh = two_columns()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 16))
    plan = {
        "0": ColwiseParallel(output_layouts=Replicate()),
        "2": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
    }
    parallelize_module(model, mesh["tensor"], plan)
    run.shard(model, mesh=mesh["data"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        rows = torch.randn(4, WIDTH, generator=generator)
        labels = torch.randint(0, 16, (4,), generator=generator)
        with loss_parallel():
            loss = nn.functional.cross_entropy(model(rows), labels)
            loss.backward()
        seen += [copy_of(loss), gradients(model)]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, weights(model)]


# ---- pipelines ----


def stage(run: Script, mesh: DeviceMesh, index: int, count: int) -> PipelineStage:
    torch.manual_seed(index)
    part = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    run.shard(part, mesh=mesh["data"], reshard_after_forward=False)
    return PipelineStage(part, index, count, DEVICE, group=mesh.get_group("pipeline"))


def squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def pipelined(run: Script, kind: Any, each: int) -> list[Any]:
    """Steps of a schedule that gives each rank so many stages."""
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("pipeline", "data"))
    count = run.world * each
    stages = [stage(run, mesh, index, count) for index in range(run.rank, count, run.world)]
    schedule = kind(stages if each > 1 else stages[0], 4, loss_fn=squared)
    params = [param for one in stages for param in one.submod.parameters()]
    optimizer = torch.optim.SGD(params, lr=0.1)
    seen: list[Any] = []
    for step in range(2):
        generator = torch.Generator().manual_seed(step)
        rows, target = (torch.randn(8, WIDTH, generator=generator) for _ in "ab")
        losses: list[torch.Tensor] = []
        if run.rank == 0:
            schedule.step(rows)
        else:
            schedule.step(target=target, losses=losses)
        seen += [copy_of(loss) for loss in losses]
        seen += [gradients(one.submod) for one in stages]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, *(weights(one.submod) for one in stages)]


@script()
def a_pipeline_that_first_runs_all_forwards(run: Script) -> Any:
    return pipelined(run, ScheduleGPipe, 1)


@script(costly=True)
def a_pipeline_of_interleaved_stages(run: Script) -> Any:
    return pipelined(run, ScheduleInterleaved1F1B, 2)


@script(costly=True)
def a_pipeline_that_parts_its_backwards(run: Script) -> Any:
    """Gradients of inputs first, those of weights later."""
    return pipelined(run, ScheduleInterleavedZeroBubble, 2)
