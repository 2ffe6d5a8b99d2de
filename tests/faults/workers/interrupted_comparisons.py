"""Ranks over gloo that an exception interrupts while they compare their collectives.

A rank that then issues another collective than the other ranks must not end them: gloo ends a
process by SIGABRT if it receives a message of another size than expected. Each program returns the
texts of the exceptions of its later steps.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from divergence import SIZE, Block, Model
from interrupt import Exchange, wait_until_blocked
from torch.distributed.device_mesh import DeviceMesh

import fsdp_c
from fsdp_c._runtime.departures import Departures

LATE = 0.7
"""Seconds from the interruption of rank 0 until rank 1 joins."""


class Interrupt(Exception):
    pass


def make_model(factors: tuple[int, ...] = (2, 1, 3, 4)) -> Any:
    torch.manual_seed(0)
    mesh = DeviceMesh.from_group(dist.new_group(timeout=timedelta(seconds=6)), "cpu")
    model: Any = Model([Block(SIZE * factor) for factor in factors])
    for block in model.blocks:
        fsdp_c.fully_shard(block, mesh=mesh)
    return fsdp_c.fully_shard(model, mesh=mesh)


def step(model: Any, hook: Callable[[torch.Tensor], None] | None = None) -> None:
    x = torch.full((2, SIZE), 0.5, requires_grad=hook is not None)
    if hook is not None:
        x.register_hook(hook)
    model(x).sum().backward()
    model.zero_grad()


def evaluate(block: nn.Module) -> None:
    with torch.no_grad():
        block(torch.ones(2, SIZE))


def run_steps(model: Any, count: int, hook: Callable[[torch.Tensor], None]) -> list[str]:
    """Returns the exceptions of the steps. ``hook`` runs at the end of the first backward."""
    texts = []
    for index in range(count):
        try:
            step(model, hook if index == 0 else None)
        except (Interrupt, RuntimeError) as error:
            texts.append(f"{type(error).__name__}: {error}")
            model.reset_iter_state()
            model.zero_grad()
        else:
            texts.append("")
    return texts


def interrupt_rank_0_while_rank_1_is_late(rank: int) -> Callable[[torch.Tensor], None]:
    """Returns a hook for both ranks, in which rank 1 waits until rank 0 waits for it."""
    processes: list[Any] = [None, None]
    dist.all_gather_object(processes, os.getpid())
    exchange = Exchange()

    def hook(grad: torch.Tensor) -> None:
        if rank == 0:
            exchange.set("waiting")
            return
        assert exchange.wait("waiting")
        wait_until_blocked(processes[0])
        os.kill(processes[0], signal.SIGUSR1)
        assert exchange.wait("interrupted")
        time.sleep(LATE)

    def interrupt(*unused: Any) -> None:
        exchange.set("interrupted")
        raise Interrupt

    if rank == 0:
        signal.signal(signal.SIGUSR1, interrupt)
    return hook


def leave_departure(rank: int, world_size: int, repeats: bool) -> list[str]:
    """Rank 0 departs: its collective is not the predicted one.

    An exception interrupts it after the ranks have decided to issue this collective.
    ``repeats``: rank 0 evaluates again, as it must. Otherwise it trains instead.
    """
    model = make_model()
    for _ in range(5):
        step(model)
    decide = Departures._decide

    def decide_and_raise(self: Departures, store: dist.Store, key: str) -> bool:
        Departures._decide = decide  # type: ignore[method-assign]
        decide(self, store, key)
        raise Interrupt

    if rank == 0:
        Departures._decide = decide_and_raise  # type: ignore[method-assign]
    texts = []
    try:
        evaluate(model.blocks[2])
        assert rank == 1
    except Interrupt:
        if repeats:
            evaluate(model.blocks[2])
        else:
            model.reset_iter_state()
    except RuntimeError as error:  # rank 0 has ended
        texts.append(f"{type(error).__name__}: {error}")
    for _ in range(2):
        try:
            step(model)
        except RuntimeError as error:
            texts.append(f"{type(error).__name__}: {error}")
    return texts


def leave_exchange(rank: int, world_size: int) -> list[str]:
    """Rank 0 is interrupted in the exchange before the first agreement, and skips a batch."""
    return run_steps(make_model(), 3, interrupt_rank_0_while_rank_1_is_late(rank))


def leave_agreement(rank: int, world_size: int) -> list[str]:
    """Rank 1 swaps two units of equal size. Rank 0 is interrupted while it waits for the agreement.

    An evaluation follows only some steps, at varying distances. So rank 0 has no prediction of its
    next collective.
    """
    model = make_model((2, 1, 1, 4))
    for index in range(40):
        step(model)
        if index * index % 7 in (1, 2):
            evaluate(model.blocks[3])
    step(model)
    if rank == 1:
        model.order = [0, 2, 1, 3]
    return run_steps(model, 2, interrupt_rank_0_while_rank_1_is_late(rank))
