"""Programs that must not raise: all ranks issue equal collectives, some at different times."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from divergence import LIMIT_SECONDS, SIZE, Block, Model, make_model, train
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.tensor import DTensor


def unused_units(rank: int, group: Any) -> None:
    """A unit and a parameter that no rank uses."""
    model = make_model(group)
    model.order = [0, 2]
    model.blocks[0].uses_second = False
    train(model)


def no_sync_on_all(rank: int, group: Any) -> None:
    import fsdp_c

    model = make_model(group)
    for _ in range(2):
        with fsdp_c.no_sync(model):
            train(model, 1)
        train(model, 1)


def several_roots(rank: int, group: Any) -> None:
    """Roots over one process group. The second root runs first after three steps of the first."""
    first, second = make_model(group), make_model(group, 2)
    train(first)
    for _ in range(2):
        train(second, 1)
        train(first, 1)


def explicit_unshard_on_one_rank(rank: int, group: Any) -> None:
    """The collectives are equal: one rank issues them before its forward."""
    model = make_model(group)
    train(model, 1)
    for _ in range(2):
        if rank == 0:
            model.unshard()
            handle = model.blocks[0].unshard(async_op=True)
            handle.wait()
        train(model, 1)


def unshard_before_the_first_forward(rank: int, group: Any) -> None:
    """A unit that is unsharded before its root has run has no plan."""
    model = make_model(group)
    model.blocks[1].unshard()
    model.blocks[1].reshard()
    with torch.no_grad():
        handle = model.blocks[2].unshard(async_op=True)
    if handle is not None:
        handle.wait()
    model.blocks[2].reshard()


def async_first_gather_on_one_rank(rank: int, group: Any) -> None:
    model = make_model(group)
    if rank == 0:
        handle = model.blocks[0].unshard(async_op=True)
        handle.wait()
    else:
        model.blocks[0].unshard()
    for block in model.blocks:
        block.reshard()


def recomputation(rank: int, group: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    model = make_model(group)
    for block in model.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: checkpoint(forward, x, use_reentrant=False)
    train(model)


def reset_after_an_exception(rank: int, group: Any) -> None:
    """A backward raises on all ranks. The next forward resets the units."""
    model = make_model(group)
    train(model, 1)
    for _ in range(2):
        try:
            loss = model(torch.ones(2, SIZE))
            loss.register_hook(_raise)
            loss.sum().backward()
        except ZeroDivisionError:
            pass
        train(model, 1)


def _raise(grad: torch.Tensor) -> None:
    raise ZeroDivisionError


def evaluation_between_steps(rank: int, group: Any) -> None:
    model = make_model(group)
    for _ in range(3):
        train(model, 2)
        with torch.no_grad():
            model(torch.ones(2, SIZE))
            model.blocks[1](torch.ones(2, SIZE))


def gradient_accumulation(rank: int, group: Any) -> None:
    model = make_model(group)
    for microbatches in (3, 3, 2, 4, 4):
        for i in range(microbatches):
            model.set_requires_gradient_sync(i == microbatches - 1)
            train(model, 1)


def other_units_in_each_step(rank: int, group: Any) -> None:
    """The same units on all ranks, selected at random."""
    model = make_model(group, 4)
    generator = torch.Generator().manual_seed(0)
    for _ in range(12):
        count = int(torch.randint(1, 5, (), generator=generator))
        model.order = torch.randperm(4, generator=generator)[:count].tolist()
        train(model, 1)


def one_rank_is_late(rank: int, group: Any) -> None:
    """Rank 0 starts an evaluation 0.7 s after the other ranks."""
    model = make_model(group)
    train(model, 3)
    if rank == 0:
        time.sleep(0.7)
    with torch.no_grad():
        model(torch.ones(2, SIZE))
    train(model, 1)


def settings_changed_on_all(rank: int, group: Any) -> None:
    model = make_model(group)
    train(model, 2)
    model.blocks[1].set_gradient_divide_factor(7.0)
    model.blocks[1].first.weight.requires_grad_(False)
    model.blocks[0].set_modules_to_forward_prefetch([model.blocks[2]])
    model.set_reshard_after_forward(False)
    train(model, 2)


def replace_a_parameter(model: Any) -> None:
    """A unit keeps its own parameter, so a replacement after the first forward is not used."""
    layer = model.blocks[1].first
    sharded = layer.weight
    local = sharded.to_local().detach().clone()
    copy = DTensor.from_local(local, sharded.device_mesh, sharded.placements)
    layer.weight = torch.nn.Parameter(copy)


def parameter_replaced_on_one_rank(rank: int, group: Any) -> None:
    """The copy is equal. The unit adopts it before its first forward."""
    model = make_model(group)
    if rank == 0:
        replace_a_parameter(model)
    train(model, 2)
    if rank == 1:
        replace_a_parameter(model)
    train(model, 2)


def one_rank_per_model(rank: int, group: Any) -> None:
    """Each rank has its own model on a process group of one rank. Ranks run different numbers of
    evaluations and steps."""
    groups = [dist.new_group([r]) for r in range(dist.get_world_size())]
    model = make_model(groups[rank], 2 + rank)
    for _ in range(1 + rank):
        with torch.no_grad():
            model(torch.ones(2, SIZE))
    train(model, 1 + rank)


def one_sided_evaluation_of_replicas(rank: int, group: Any) -> None:
    """Replicated parameters need no gather, so one rank may evaluate first and alone."""
    import fsdp_c

    torch.manual_seed(0)
    model = Model([Block() for _ in range(2)])
    fsdp_c.replicate(model, mesh=DeviceMesh.from_group(group, "cpu"))
    if rank == 0:
        with torch.no_grad():
            model(torch.ones(2, SIZE))
    train(model)


PROGRAMS = (
    unused_units,
    no_sync_on_all,
    several_roots,
    explicit_unshard_on_one_rank,
    unshard_before_the_first_forward,
    async_first_gather_on_one_rank,
    recomputation,
    evaluation_between_steps,
    gradient_accumulation,
    other_units_in_each_step,
    one_rank_is_late,
    reset_after_an_exception,
    settings_changed_on_all,
    parameter_replaced_on_one_rank,
    one_rank_per_model,
    one_sided_evaluation_of_replicas,
)


def run(rank: int, world_size: int) -> dict[str, str]:
    """Runs all programs; see ``run_programs``."""
    return run_programs(rank, PROGRAMS)


def run_programs(rank: int, programs: tuple[Callable[[int, Any], None], ...]) -> dict[str, str]:
    """Returns the exception of each program, or "". Each program has its own process group."""
    results = {}
    for program in programs:
        group = dist.new_group(timeout=timedelta(seconds=LIMIT_SECONDS))
        try:
            program(rank, group)
            results[program.__name__] = ""
        except RuntimeError as error:
            results[program.__name__] = f"{type(error).__name__}: {error}"
        dist.barrier()
    return results


def run_schedule(rank: int, world_size: int, name: str) -> None:
    """Trains two stages with two ranks each by a schedule of torch.distributed.pipelining."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "shard"))
    number = mesh["stage"].get_local_rank()
    model = make_model(mesh.get_group("shard"), 2 + number)
    device = torch.device("cpu")
    stage = PipelineStage(model, number, 2, device, group=mesh.get_group("stage"))
    schedule = getattr(schedules, name)(stage, 4, loss_fn=lambda output, target: output.sum())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(3):
        arguments = () if stage.is_last else (torch.ones(8, SIZE),)
        schedule.step(*arguments, target=torch.ones(8, SIZE) if stage.is_last else None)
        optimizer.step()
        optimizer.zero_grad()


def run_stages(rank: int, world_size: int) -> None:
    """Two pipeline stages with two ranks each. The stages have different models and issue different
    collectives."""
    groups = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])]
    stage = rank // 2
    model = make_model(groups[stage], 2 + stage)
    for _ in range(2):
        for _ in range(2):
            x = torch.ones(2, SIZE)
            if stage == 1:
                dist.recv(x, rank - 2)
            output = model(x)
            if stage == 0:
                dist.send(output.detach(), rank + 2)
            output.sum().backward()


def restart(folder: Path) -> None:
    """Trains on the ranks of torchrun. Rank 1 ends in its third step, before the restart."""
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], int(os.environ["RANK"])
    dist.init_process_group("gloo")
    (folder / f"began{attempt}-{rank}").touch()
    model = make_model(dist.group.WORLD)
    for step in range(6):
        if (attempt, rank, step) == ("0", 1, 2):
            os._exit(1)
        with torch.set_grad_enabled(step != 3):
            loss = model(torch.ones(2, SIZE)).sum()
        if step != 3:
            loss.backward()
    (folder / f"trained{attempt}-{rank}").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    restart(Path(sys.argv[1]))
