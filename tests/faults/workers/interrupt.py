"""Rank 0 waits in a collective for a late rank 1, which sends it a signal; then both recover.

``test_interrupt.py`` runs it on two gloo ranks. The signal is SIGINT, or SIGUSR1 if rank 0 has a
handler that resets the model. The late rank finally joins the collective, like a slow process. In
the gather cases it then leaves its step by LateRankLeaves.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from behavior import Api, blocks_and_head, differences, shard, train

LIMIT = 30.0
"""Seconds after which rank 1 joins although rank 0 has not reset: only a failure takes as long."""
TORCH_LIMIT = 1.0
"""The same under torch, where rank 0 handles the signal only after rank 1 has joined."""
BLOCKED = 20
"""Readings, 10 ms apart, in which a thread must be asleep to count as blocked."""


class LateRankLeaves(Exception):
    """How rank 1 leaves its step, right after the collective."""


def leave(*unused: Any) -> None:
    raise LateRankLeaves


class Case:
    """A model, and the step with the collective in question: ``begin``, then ``wait_in``."""

    def __init__(self, model: nn.Sequential) -> None:
        self.model = model
        self.loss: torch.Tensor | None = None

    def begin(self) -> None:
        pass

    def wait_in(self) -> None:
        raise NotImplementedError

    def join_late(self) -> None:
        """Runs only the same collective on rank 1."""
        self.wait_in()

    def forward(self) -> torch.Tensor:
        rows, width = 4, 5
        return self.model(torch.ones(rows, width)).square().mean()


class GatherInForward(Case):
    """The root's all-gather."""

    def wait_in(self) -> None:
        self.forward()

    def join_late(self) -> None:
        handle = self.model.register_forward_pre_hook(leave)
        try:
            self.forward()
        finally:
            handle.remove()


class InBackward(Case):
    """A collective of a backward; its forward has been run."""

    def begin(self) -> None:
        self.loss = self.forward()

    def wait_in(self) -> None:
        assert self.loss is not None
        self.loss.backward()


class GatherInBackward(InBackward):
    """The all-gather of the only block, ahead of its backward."""

    def join_late(self) -> None:
        # Runs after the block's pre-backward hook on this tensor, which waits for the all-gather.
        self.inside.register_hook(leave)
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
    """The reduce-scatter of the root, which has all parameters."""


class Handle(Case):
    """An all-gather by ``model.unshard()``."""

    def wait_in(self) -> None:
        self.model.unshard(async_op=True).wait()
        self.model.reshard()


CASES: dict[str, Callable[..., Case]] = {
    "gather in forward": lambda api, **kw: GatherInForward(shard(api, blocks_and_head(1), **kw)),
    "gather in backward": lambda api, **kw: GatherInBackward(shard(api, blocks_and_head(1), **kw)),
    "reduction": lambda api, **kw: Reduction(api.fully_shard(blocks_and_head(1), **kw)),
    "handle": lambda api, **kw: Handle(shard(api, blocks_and_head(1), **kw)),
}


RESET_IN_HANDLER_CASES = ["gather in forward", "gather in backward", "reduction"]
"""Cases that also run with a signal handler that resets the model."""


def fill_memory(model: nn.Module) -> list[torch.Tensor]:
    """Allocates tensors of every size that a buffer of the model may have, filled with -77."""
    sizes = {2 * p.numel() for p in model.parameters()}
    total = sum(p.numel() for p in model.parameters())
    sizes |= {n for size in (total, total + 8) for n in range(size // 2, size + 8)}
    return [torch.full((size,), -77.0) for size in sorted(sizes) for _ in range(4)]


def recover(api: Api, case: Case, found: dict[str, Any], exchange: Exchange) -> None:
    """Resets the model, then checks memory after the peer has joined the abandoned collective.

    Memory is filled before the event "reset", after which the peer joins.
    """
    model = case.model
    model.reset_iter_state()
    model.zero_grad()
    if not api.is_fsdp_c or api.rank != 0:
        if api.rank == 0:
            exchange.set("reset")
        dist.barrier()
        return
    context = model._get_fsdp_state()._comm_ctx
    found["pending"] = context.deferred_collectives
    filled = fill_memory(model)
    exchange.set("reset")
    dist.barrier()  # the late rank has joined the collective
    found["overwritten"] = sum(not bool((tensor == -77.0).all()) for tensor in filled)


class Exchange:
    """Events of one case that the two ranks exchange through the default store."""

    _numbers = itertools.count()  # both ranks run the same cases in the same order

    def __init__(self) -> None:
        self._number = next(self._numbers)
        self._store = dist.distributed_c10d._get_default_store()

    def set(self, event: str) -> None:
        self._store.set(f"{event} {self._number}", "")

    def wait(self, event: str, seconds: float = LIMIT) -> bool:
        """Returns whether the other rank sets the event within the limit."""
        try:
            self._store.wait([f"{event} {self._number}"], timedelta(seconds=seconds))
        except RuntimeError:  # the store's time limit
            return False
        return True


def wait_until_blocked(pid: int) -> None:
    """Returns when the main thread of ``pid`` has been asleep in BLOCKED readings.

    The readings need not be consecutive: a thread that polls is sometimes runnable (state R)
    between two sleeps.
    """
    asleep = 0
    while asleep < BLOCKED:
        state = Path(f"/proc/{pid}/task/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        asleep += state == "S"
        time.sleep(0.01)


def signal_and_join(
    case: Case, waiting: int, number: signal.Signals, exchange: Exchange, seconds: float
) -> dict[str, bool]:
    """Signals the waiting rank, and joins the collective after that rank has reset its model.

    Returns whether it handled the signal, and whether it reset, before this rank joined.
    """
    exchange.wait("waiting")
    wait_until_blocked(waiting)
    os.kill(waiting, number)
    found = {event: exchange.wait(event, seconds) for event in ("handled", "reset")}
    with contextlib.suppress(LateRankLeaves):
        case.join_late()
    return found


def interrupt_case(api: Api, make: Callable[..., Case], peers: list[int]) -> dict[str, Any]:
    """Runs a case. Rank 1 checks that rank 0 handled the signal and reset before rank 1 joined."""
    expected = train(make(api).model, api.rank, 2)
    case = make(api)
    if isinstance(case, Handle):
        case.model._get_fsdp_state()._lazy_init()
    found: dict[str, Any] = {"interrupted": False}
    exchange = Exchange()
    case.begin()
    dist.barrier()
    if api.rank == 0:
        try:
            exchange.set("waiting")
            case.wait_in()
        except KeyboardInterrupt:
            found["interrupted"] = True
            exchange.set("handled")
    else:
        seconds = LIMIT if api.is_fsdp_c else TORCH_LIMIT
        found |= signal_and_join(case, peers[0], signal.SIGINT, exchange, seconds)
    recover(api, case, found, exchange)
    found["equal to a run without signal"] = (
        differences(expected, train(case.model, api.rank, 2)) == []
    )
    if api.is_fsdp_c:
        found["pending at the end"] = case.model._get_fsdp_state()._comm_ctx.deferred_collectives
    return found


def reset_by_handler(api: Api, make: Callable[..., Case], peers: list[int]) -> dict[str, Any]:
    """Runs a case in which rank 0's signal handler resets the model and returns."""
    expected = train(make(api).model, api.rank, 2)
    case = make(api)
    found: dict[str, Any] = {"error": ""}
    exchange = Exchange()
    case.begin()
    dist.barrier()

    def reset(*unused: Any) -> None:
        exchange.set("handled")
        case.model.reset_iter_state()
        exchange.set("reset")

    if api.rank == 0:
        before = signal.signal(signal.SIGUSR1, reset)
        try:
            exchange.set("waiting")
            case.wait_in()
        except RuntimeError as error:
            found["error"] = str(error)
        signal.signal(signal.SIGUSR1, before)
    else:
        found |= signal_and_join(case, peers[0], signal.SIGUSR1, exchange, LIMIT)
    recover(api, case, found, exchange)
    found["equal to a run without signal"] = (
        differences(expected, train(case.model, api.rank, 2)) == []
    )
    return found


def interrupt_all(rank: int, world: int, name: str) -> dict[str, dict[str, Any]]:
    """Runs every case, and for fsdp_c each case with a handler that resets (``handler: case``)."""
    api = Api(name, rank, world, Path())
    peers: list[Any] = [None] * world
    dist.all_gather_object(peers, os.getpid())
    found = {title: interrupt_case(api, make, peers) for title, make in CASES.items()}
    for title in RESET_IN_HANDLER_CASES if api.is_fsdp_c else []:
        found[f"handler: {title}"] = reset_by_handler(api, CASES[title], peers)
    return found
