"""Rank 0 waits in a collective for a late rank 1, which sends it SIGINT; then both recover.

``test_interrupt.py`` runs this module on two gloo ranks. Rank 1 joins the collective late, as a
slow process would, and then leaves its step by raising ``PeerLeft``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from behaviour import Api, differences, shard, train
from behaviour import plain as blocks_and_head

SIGNAL_AFTER_SECONDS = 0.4
"""Seconds from the barrier to the signal, in which rank 0 enters its collective."""
LATE_SECONDS = 1.0
"""Seconds from the signal until rank 1 joins the collective."""


class PeerLeft(Exception):
    """Raised by rank 1 to leave its step right after the collective."""


def raise_peer_left(*unused: Any) -> None:
    raise PeerLeft


class Case:
    """A model and one step: ``begin`` runs the part before the collective under test, and
    ``wait_in`` the part that waits in it."""

    def __init__(self, model: nn.Sequential) -> None:
        self.model = model
        self.loss: torch.Tensor | None = None

    def begin(self) -> None:
        pass

    def wait_in(self) -> None:
        raise NotImplementedError

    def join_late(self) -> None:
        """Rank 1 issues the same collective and no further one."""
        self.wait_in()

    def forward(self) -> torch.Tensor:
        rows, width = 4, 5
        return self.model(torch.ones(rows, width)).square().mean()


class GatherInForward(Case):
    """Waits in the root's all-gather in forward."""

    def wait_in(self) -> None:
        self.forward()

    def join_late(self) -> None:
        handle = self.model.register_forward_pre_hook(raise_peer_left)
        try:
            self.forward()
        finally:
            handle.remove()


class InBackward(Case):
    """Base of cases whose collective runs in backward, after a complete forward."""

    def begin(self) -> None:
        self.loss = self.forward()

    def wait_in(self) -> None:
        assert self.loss is not None
        self.loss.backward()


class GatherInBackward(InBackward):
    """Waits in the all-gather of the only block, before its backward."""

    def join_late(self) -> None:
        # Autograd runs this hook after the block's pre-backward hook, which waits for the gather.
        self.inside.register_hook(raise_peer_left)
        self.wait_in()

    def forward(self) -> torch.Tensor:
        handle = self.model[0].linear.register_forward_hook(
            lambda module, args, output: setattr(self, "inside", output)
        )
        try:
            return super().forward()
        finally:
            handle.remove()


class Reduction(InBackward):
    """Waits in the reduce-scatter of the root, which holds all parameters."""


class Handle(Case):
    """Waits in an all-gather that ``unshard(async_op=True)`` issued."""

    def wait_in(self) -> None:
        self.model.unshard(async_op=True).wait()
        self.model.reshard()


CASES: dict[str, Callable[..., Case]] = {
    "gather in forward": lambda api, **kw: GatherInForward(shard(api, blocks_and_head(1), **kw)),
    "gather in backward": lambda api, **kw: GatherInBackward(shard(api, blocks_and_head(1), **kw)),
    "reduction": lambda api, **kw: Reduction(api.fully_shard(blocks_and_head(1), **kw)),
    "handle": lambda api, **kw: Handle(shard(api, blocks_and_head(1), **kw)),
}


HANDLER_CASES = ["gather in forward", "gather in backward", "reduction"]


def fill_memory(model: nn.Module) -> list[torch.Tensor]:
    """Allocates tensors with one value in every size that a buffer of the model can have. They
    would reuse the memory of a buffer that was released too early."""
    sizes = {2 * p.numel() for p in model.parameters()}
    total = sum(p.numel() for p in model.parameters())
    sizes |= {n for size in (total, total + 8) for n in range(size // 2, size + 8)}
    return [torch.full((size,), -77.0) for size in sorted(sizes) for _ in range(4)]


def recover(api: Api, case: Case, outcome: dict[str, Any]) -> None:
    """Resets the model, then checks whether the abandoned collective overwrites reused memory."""
    model = case.model
    start = time.monotonic()
    model.reset_iter_state()
    model.zero_grad()
    outcome["reset took"] = time.monotonic() - start
    if not api.ours or api.rank != 0:
        dist.barrier()
        return
    context = model._get_fsdp_state()._comm_ctx
    outcome["parked"] = context.collectives_parked
    filled = fill_memory(model)
    dist.barrier()  # the late rank has joined the collective
    outcome["overwritten"] = sum(not bool((tensor == -77.0).all()) for tensor in filled)


def signal_and_join(case: Case, waiting_pid: int, number: signal.Signals) -> float:
    """Runs the late rank: signals the waiting process, then joins its collective.

    Returns the time of the signal.
    """
    time.sleep(SIGNAL_AFTER_SECONDS)
    sent = time.monotonic()
    os.kill(waiting_pid, number)
    time.sleep(LATE_SECONDS)
    with contextlib.suppress(PeerLeft):
        case.join_late()
    return sent


def run_with_sigint(api: Api, make_case: Callable[..., Case], peers: list[int]) -> dict[str, Any]:
    """Runs one case with SIGINT. Rank 0 records when it was interrupted, rank 1
    when it sent the signal."""
    expected = train(make_case(api).model, api.rank, 2)
    case = make_case(api)
    if isinstance(case, Handle):
        train(case.model, api.rank, 0)
        case.model._get_fsdp_state()._lazy_init()
    outcome: dict[str, Any] = {}
    case.begin()
    dist.barrier()
    if api.rank == 0:
        try:
            case.wait_in()
            time.sleep(LATE_SECONDS)  # a signal that did not interrupt the wait is handled here
        except KeyboardInterrupt:
            outcome["interrupted at"] = time.monotonic()
    else:
        outcome["sent at"] = signal_and_join(case, peers[0], signal.SIGINT)
    recover(api, case, outcome)
    outcome["matches expected"] = differences(expected, train(case.model, api.rank, 2)) == []
    if api.ours:
        outcome["parked in the end"] = case.model._get_fsdp_state()._comm_ctx.collectives_parked
    return outcome


def run_with_resetting_handler(
    api: Api, make_case: Callable[..., Case], peers: list[int]
) -> dict[str, Any]:
    """Runs one case in which rank 0's signal handler resets the model and returns."""
    expected = train(make_case(api).model, api.rank, 2)
    case = make_case(api)
    outcome: dict[str, Any] = {"error": ""}
    case.begin()
    dist.barrier()
    if api.rank == 0:
        previous_handler = signal.signal(
            signal.SIGUSR1, lambda *unused: case.model.reset_iter_state()
        )
        try:
            case.wait_in()
        except RuntimeError as error:
            outcome["error"] = str(error)
        signal.signal(signal.SIGUSR1, previous_handler)
    else:
        signal_and_join(case, peers[0], signal.SIGUSR1)
    recover(api, case, outcome)
    outcome["matches expected"] = differences(expected, train(case.model, api.rank, 2)) == []
    return outcome


def interrupt_all(rank: int, world: int, name: str, attempts: int) -> dict[str, list[Any]]:
    """Runs every case ``attempts`` times, and for fsdp_c also with signal handlers that reset
    (``handler: case``)."""
    api = Api(name, rank, world, Path())
    peers: list[Any] = [None] * world
    dist.all_gather_object(peers, os.getpid())
    outcome = {
        title: [run_with_sigint(api, make_case, peers) for _ in range(attempts)]
        for title, make_case in CASES.items()
    }
    for title in HANDLER_CASES if api.ours else []:
        outcome[f"handler: {title}"] = [run_with_resetting_handler(api, CASES[title], peers)]
    return outcome
