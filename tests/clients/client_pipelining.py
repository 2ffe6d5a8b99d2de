"""Pipeline stages sharded by FSDP2, with every schedule of ``torch.distributed.pipelining``.

The script uses four ranks: two pipeline ranks by two data-parallel ranks.
"""

from __future__ import annotations

import copy

import torch
import torch.nn as nn
from client_job import Report, main, seed_everything
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, schedules

DIM = 12
MICROBATCHES = 4
BATCH = 2 * MICROBATCHES


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(self.norm(x))))


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output.float(), target)


def build_stages(mesh: DeviceMesh, numbers: list[int], total: int, **settings: object) -> list:
    """Returns this rank's stages out of ``total``. Each stage and its two blocks are sharded."""
    seed_everything(3)
    chunks = [nn.Sequential(Block(), Block()) for _ in range(total)]
    built = []
    for number in numbers:
        chunk = copy.deepcopy(chunks[number])
        for block in chunk:
            fully_shard(block, mesh=mesh["dp"], **settings)
        fully_shard(chunk, mesh=mesh["dp"], **settings)
        group = mesh.get_group("pp")
        built.append(PipelineStage(chunk, number, total, torch.device("cpu"), group=group))
    return built


def train(
    report: Report, schedule_name: str, per_rank: int, shape: str = "loop", **settings: object
) -> None:
    """Trains three steps of ``schedule_name`` with ``per_rank`` stages per pipeline rank.

    With two stages, pipeline rank r has r and r + 2 ("loop"), or r and 3 - r ("V").
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    pipeline_rank, total = mesh["pp"].get_local_rank(), 2 * per_rank
    numbers = [pipeline_rank] if per_rank == 1 else [pipeline_rank, pipeline_rank + 2]
    if shape == "V":
        numbers = [pipeline_rank, total - 1 - pipeline_rank]
    own_stages = build_stages(mesh, numbers, total, **settings)
    kind = getattr(schedules, schedule_name)
    single = issubclass(kind, schedules.PipelineScheduleSingle)
    schedule = kind(own_stages[0] if single else own_stages, MICROBATCHES, loss_fn=loss_of)
    optimizers = [torch.optim.AdamW(stage.submod.parameters(), lr=0.05) for stage in own_stages]
    data = torch.Generator().manual_seed(mesh["dp"].get_local_rank())
    for _ in range(3):
        x = torch.randn(BATCH, DIM, generator=data)
        target = torch.randn(BATCH, DIM, generator=data)
        losses: list[torch.Tensor] = []
        arguments = (x,) if any(stage.is_first for stage in own_stages) else ()
        last = any(stage.is_last for stage in own_stages)
        schedule.step(*arguments, target=target if last else None, losses=losses)
        for position, loss in enumerate(losses):
            report.record(f"loss {position}", loss)
        assert bool(losses) == last
        for stage, optimizer in zip(own_stages, optimizers):
            report.record_gradients(stage.submod)
            assert any(parameter.grad is not None for parameter in stage.submod.parameters())
            optimizer.step()
            optimizer.zero_grad()
    for stage in own_stages:
        report.record_model(stage.submod)


def case_gpipe(report: Report) -> None:
    train(report, "ScheduleGPipe", 1)


def case_1f1b(report: Report) -> None:
    train(report, "Schedule1F1B", 1)


def case_1f1b_bf16_keep(report: Report) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    train(report, "Schedule1F1B", 1, mp_policy=policy, reshard_after_forward=False)


def case_looped_bfs(report: Report) -> None:
    train(report, "ScheduleLoopedBFS", 2)


def case_interleaved_1f1b(report: Report) -> None:
    train(report, "ScheduleInterleaved1F1B", 2)


def case_interleaved_zero_bubble(report: Report) -> None:
    train(report, "ScheduleInterleavedZeroBubble", 2, reshard_after_forward=False)


def case_zbv_zero_bubble(report: Report) -> None:
    train(report, "ScheduleZBVZeroBubble", 2, "V", reshard_after_forward=False)


def case_dualpipev(report: Report) -> None:
    train(report, "ScheduleDualPipeV", 2, "V", reshard_after_forward=False)


if __name__ == "__main__":
    main(globals())
