"""Scripts about the course of a run: processes that it forks, evaluations, several models, and
forwards that fail."""

from __future__ import annotations

import multiprocessing
import os
import sys
from typing import Any

import torch
import torch.nn as nn
from scripts import Script, copy_of, script, weights
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.data import DataLoader, TensorDataset

# ---- forks ----


@script(costly=True)
def data_from_forked_workers(run: Script) -> Any:
    model = run.sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    rows = torch.randn(16, run.width, generator=torch.Generator().manual_seed(run.rank))
    for (part,) in DataLoader(TensorDataset(rows), batch_size=4, num_workers=2):
        model(part).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


@script()
def a_fork_that_reads_the_weights(run: Script) -> Any:
    model = run.sharded()
    before = run.train(model)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            total = sum(param.sum() for param in weights(model))
            status = 0 if total.isfinite() else 2
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return [before, status, run.train(model)]


@script(costly=True)
def a_fork_that_ends_as_python_does(run: Script) -> Any:
    model = run.sharded()
    before = run.train(model)
    child = multiprocessing.get_context("fork").Process(target=sys.exit, args=(3,))
    child.start()
    child.join(60)
    return [before, child.exitcode, run.train(model)]


# ---- evaluations ----


@script(costly=True)
def generation_between_steps(run: Script) -> Any:
    """Each output is the next input."""
    model = run.sharded()
    first = run.train(model, steps=1)
    seen: list[Any] = []
    with torch.no_grad():
        hidden = run.rows()
        for _ in range(5):
            hidden = model(hidden)
            seen.append(copy_of(hidden))
    return [first, seen, run.train(model)]


@script()
def frozen_and_trained_again_in_half_precision(run: Script) -> Any:
    model = run.sharded(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    seen = run.train(model, steps=1)
    model[0].requires_grad_(False)
    seen += run.train(model, steps=1)
    model.requires_grad_(True)
    return [*seen, run.train(model, steps=1)]


# ---- several models ----


@script()
def two_models_against_each_other(run: Script) -> Any:
    """The critic sees the generator's output, detached, then as it is."""
    maker, critic = run.sharded(), run.sharded()
    makers = torch.optim.SGD(maker.parameters(), lr=0.1)
    critics = torch.optim.SGD(critic.parameters(), lr=0.1)
    seen: list[Any] = []
    for step in range(3):
        made = maker(run.rows(step))
        verdict = critic(made.detach()).mean() - critic(run.rows(step + 7)).mean()
        verdict.backward()
        critics.step()
        critics.zero_grad()
        loss = -critic(maker(run.rows(step))).mean()
        loss.backward()
        makers.step()
        makers.zero_grad()
        critics.zero_grad()
        seen += [copy_of(verdict), copy_of(loss)]
    return [*seen, weights(maker), weights(critic)]


@script()
def a_teacher_and_a_student(run: Script) -> Any:
    teacher = run.shard(run.blocks(seed=5)).requires_grad_(False).eval()
    student = run.sharded()

    def loss(step: int) -> torch.Tensor:
        rows = run.rows(step)
        return (student(rows) - teacher(rows).detach() * 2).square().mean()

    return run.train(student, loss)


# ---- forwards that fail ----


class Failing(nn.Module):
    """Raises in its first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 1:
            raise ValueError("not yet")
        return rows


@script()
def a_first_forward_that_raises(run: Script) -> Any:
    model = run.blocks()
    model.append(Failing())
    run.shard(model)
    try:
        model(run.rows())
    except ValueError as error:
        return [str(error), run.train(model)]
    return None
