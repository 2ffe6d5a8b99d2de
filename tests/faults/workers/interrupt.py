"""Rank 0 waits in a collective for a late rank 1, which sends it a SIGINT; then both recover.

Run by ``test_interrupt.py`` on two gloo ranks. The late rank joins the collective in the end, as a
process that was only slow would, and leaves its step by an exception of its own.
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

SIGNAL_AFTER = 0.4
"""Seconds that rank 0 has to reach its collective before the signal is sent."""
LATE = 1.0
"""Seconds from the signal until rank 1 joins."""


class Left(Exception):
    """How rank 1 leaves its step, right after the collective."""


def leave(*unused: Any) -> None:
    raise Left


class Case:
    """A model, and the step with the collective in question: ``begin``, then ``wait_in``."""

    def __init__(self, model: nn.Sequential) -> None:
        self.model = model
        self.loss: torch.Tensor | None = None

    def begin(self) -> None:
        pass

    def wait_in(self) -> None:
        raise NotImplementedError

    def late(self) -> None:
        """Rank 1's way through the same collective, and no other."""
        self.wait_in()

    def forward(self) -> torch.Tensor:
        rows, width = 4, 5
        return self.model(torch.ones(rows, width)).square().mean()


class GatherInForward(Case):
    """The root's all-gather."""

    def wait_in(self) -> None:
        self.forward()

    def late(self) -> None:
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

    def late(self) -> None:
        # Runs after the block's own hook on its output, which waits.
        self.inside.register_hook(leave)
        self.wait_in()

    def forward(self) -> torch.Tensor:
        keep = self.model[0].linear.register_forward_hook(
            lambda module, args, output: setattr(self, "inside", output)
        )
        try:
            return super().forward()
        finally:
            keep.remove()


class Reduction(InBackward):
    """The reduce-scatter of the root, which has all parameters."""


class Handle(Case):
    """An all-gather by hand."""

    def wait_in(self) -> None:
        self.model.unshard(async_op=True).wait()
        self.model.reshard()


CASES: dict[str, Callable[..., Case]] = {
    "gather in forward": lambda api, **kw: GatherInForward(shard(api, blocks_and_head(1), **kw)),
    "gather in backward": lambda api, **kw: GatherInBackward(shard(api, blocks_and_head(1), **kw)),
    "reduction": lambda api, **kw: Reduction(api.fully_shard(blocks_and_head(1), **kw)),
    "handle": lambda api, **kw: Handle(shard(api, blocks_and_head(1), **kw)),
}


HANDLED = ["gather in forward", "gather in backward", "reduction"]


def fill_memory(model: nn.Module) -> list[torch.Tensor]:
    """Tensors of every size that a buffer of the model may have, of one value."""
    sizes = {2 * p.numel() for p in model.parameters()}
    total = sum(p.numel() for p in model.parameters())
    sizes |= {n for size in (total, total + 8) for n in range(size // 2, size + 8)}
    return [torch.full((size,), -77.0) for size in sorted(sizes) for _ in range(4)]


def recover(api: Api, case: Case, found: dict[str, Any]) -> None:
    """Resets, and looks at what the abandoned collective does to memory when its peer joins."""
    model = case.model
    start = time.monotonic()
    model.reset_iter_state()
    model.zero_grad()
    found["reset took"] = time.monotonic() - start
    if not api.ours or api.rank != 0:
        dist.barrier()
        return
    context = model._get_fsdp_state()._comm_ctx
    found["parked"] = context.collectives_parked
    filled = fill_memory(model)
    dist.barrier()  # the late rank has been through the collective
    found["overwritten"] = sum(not bool((tensor == -77.0).all()) for tensor in filled)


def signal_and_join(case: Case, waiting: int, number: signal.Signals) -> float:
    """The other rank's part: signals the one that waits, joins it late; gives the signal's time."""
    time.sleep(SIGNAL_AFTER)
    sent = time.monotonic()
    os.kill(waiting, number)
    time.sleep(LATE)
    with contextlib.suppress(Left):
        case.late()
    return sent


def interrupted(api: Api, make: Callable[..., Case], peers: list[int]) -> dict[str, Any]:
    """One case: rank 0 tells when it saw the signal, rank 1 when it sent it."""
    expected = train(make(api).model, api.rank, 2)
    case = make(api)
    if isinstance(case, Handle):
        train(case.model, api.rank, 0)
        case.model._get_fsdp_state()._lazy_init()
    found: dict[str, Any] = {}
    case.begin()
    dist.barrier()
    if api.rank == 0:
        try:
            case.wait_in()
            time.sleep(LATE)  # the signal comes now, where it was not seen before
        except KeyboardInterrupt:
            found["seen"] = time.monotonic()
    else:
        found["sent"] = signal_and_join(case, peers[0], signal.SIGINT)
    recover(api, case, found)
    found["as without"] = differences(expected, train(case.model, api.rank, 2)) == []
    if api.ours:
        found["parked in the end"] = case.model._get_fsdp_state()._comm_ctx.collectives_parked
    return found


def reset_by_handler(api: Api, make: Callable[..., Case], peers: list[int]) -> dict[str, Any]:
    """One case whose signal has a handler on rank 0 that resets the model, and returns."""
    expected = train(make(api).model, api.rank, 2)
    case = make(api)
    found: dict[str, Any] = {"error": ""}
    case.begin()
    dist.barrier()
    if api.rank == 0:
        before = signal.signal(signal.SIGUSR1, lambda *unused: case.model.reset_iter_state())
        try:
            case.wait_in()
        except RuntimeError as error:
            found["error"] = str(error)
        signal.signal(signal.SIGUSR1, before)
    else:
        signal_and_join(case, peers[0], signal.SIGUSR1)
    recover(api, case, found)
    found["as without"] = differences(expected, train(case.model, api.rank, 2)) == []
    return found


def interrupt_all(rank: int, world: int, name: str, attempts: int) -> dict[str, list[Any]]:
    """Every case, ``attempts`` times; ours also with handlers that reset (``handler: case``)."""
    api = Api(name, rank, world, Path())
    peers: list[Any] = [None] * world
    dist.all_gather_object(peers, os.getpid())
    found = {
        title: [interrupted(api, make, peers) for _ in range(attempts)]
        for title, make in CASES.items()
    }
    for title in HANDLED if api.ours else []:
        found[f"handler: {title}"] = [reset_by_handler(api, CASES[title], peers)]
    return found
