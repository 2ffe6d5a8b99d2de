"""Scripts about whole runs: forked processes, evaluations, several models, and failing forwards."""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from scripts import Script, copy_of, script, weights
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader, TensorDataset

# ---- forks ----


@script(costly=True)
def dataloader_with_forked_workers(api: Script) -> Any:
    model = api.sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.randn(16, api.width, generator=torch.Generator().manual_seed(api.rank))
    for (part,) in DataLoader(TensorDataset(rows), batch_size=4, num_workers=2):
        model(part).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@script()
def forked_child_reads_weights(api: Script) -> Any:
    model = api.sharded()
    before = api.train(model)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            total = sum(param.sum() for param in weights(model))
            status = 0 if total.isfinite() else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return [before, status, api.train(model)]


@script(costly=True)
def forked_child_exits_interpreter(api: Script) -> Any:
    model = api.sharded()
    before = api.train(model)
    child = multiprocessing.get_context("fork").Process(target=sys.exit, args=(3,))
    child.start()
    child.join(60)
    return [before, child.exitcode, api.train(model)]


# ---- evaluations and frozen blocks ----


@script(costly=True)
def generation_between_steps(api: Script) -> Any:
    """Uses each output as the next input."""
    model = api.sharded()
    first = api.train(model, steps=1)
    results: list[Any] = []
    with torch.no_grad():
        hidden = api.rows()
        for _ in range(5):
            hidden = model(hidden)
            results.append(copy_of(hidden))
    return [first, results, api.train(model)]


@script()
def block_frozen_and_unfrozen_in_bfloat16(api: Script) -> Any:
    model = api.sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    results = api.train(model, steps=1)
    model[0].requires_grad_(False)
    results += api.train(model, steps=1)
    model.requires_grad_(True)
    return [*results, api.train(model, steps=1)]


# ---- several models ----


@script()
def generator_and_critic(api: Script) -> Any:
    """The critic receives the generator's output, first detached, then attached."""
    generator, critic = api.sharded(), api.sharded()
    generator_optimizer = torch.optim.SGD(generator.parameters(), lr=0.1)
    critic_optimizer = torch.optim.SGD(critic.parameters(), lr=0.1)
    results: list[Any] = []
    for step in range(3):
        generated = generator(api.rows(step))
        critic_loss = critic(generated.detach()).mean() - critic(api.rows(step + 7)).mean()
        critic_loss.backward()
        critic_optimizer.step()
        critic_optimizer.zero_grad()
        loss = -critic(generator(api.rows(step))).mean()
        loss.backward()
        generator_optimizer.step()
        generator_optimizer.zero_grad()
        critic_optimizer.zero_grad()
        results += [copy_of(critic_loss), copy_of(loss)]
    return [*results, weights(generator), weights(critic)]


@script()
def teacher_and_student(api: Script) -> Any:
    teacher = api.shard(api.blocks(seed=5)).requires_grad_(False).eval()
    student = api.sharded()

    def loss(step: int) -> torch.Tensor:
        rows = api.rows(step)
        return (student(rows) - teacher(rows).detach() * 2).square().mean()

    return api.train(student, loss)


# ---- failing forwards and destroyed groups ----


class RaisesOnce(nn.Module):
    """Raises in its first forward only."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 1:
            raise ValueError("not yet")
        return rows


@script()
def first_forward_raises(api: Script) -> Any:
    model = api.blocks()
    model.append(RaisesOnce())
    api.shard(model)
    try:
        model(api.rows())
    except ValueError as error:
        return [str(error), api.train(model)]
    return None


@script()
def training_after_destroyed_group(api: Script) -> Any:
    """Modules hold their process group, so they work after ``destroy_process_group``."""
    group = dist.new_group(list(range(dist.get_world_size())))
    model = api.sharded(mesh=DeviceMesh.from_group(group, "cpu"))
    results = api.train(model)
    dist.barrier()
    dist.destroy_process_group(group)
    with torch.no_grad():
        results.append(model(api.rows()))
    return results + api.train(model)
