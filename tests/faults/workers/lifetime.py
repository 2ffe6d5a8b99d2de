"""How long things live: over many steps, after a model is deleted, and when a peer dies.

Run by ``test_lifetime.py`` on gloo ranks.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from behaviour import Api, shard, train
from behaviour import plain as blocks_and_head
from interrupt import CASES, wait_until_blocked
from torch.distributed.device_mesh import DeviceMesh

# ---- many steps ----

WIDTH = 200
"""A parameter of a block has 160 kB: one that leaks in each of 50 steps shows."""


class UserError(Exception):
    pass


def fail(*unused: Any) -> None:
    raise UserError


def fail_in_backward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    output.register_hook(fail)


FAILURES = {"forward": fail, "backward": fail_in_backward}
"""Forward hooks."""


class Mallinfo2(ctypes.Structure):
    """glibc's account of what is allocated."""

    _fields_ = [(f"unused{i}", ctypes.c_size_t) for i in range(4)]
    _fields_ += [("mapped", ctypes.c_size_t), *((f"unused{i}", ctypes.c_size_t) for i in (5, 6))]
    _fields_ += [("in_arenas", ctypes.c_size_t), *((f"unused{i}", ctypes.c_size_t) for i in (8, 9))]


def allocated() -> int:
    """Bytes that somebody in this process holds."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo2
    found = mallinfo2()
    return int(found.in_arenas + found.mapped)


def census() -> dict[str, int]:
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    return {
        "tensors": len(tensors),
        "objects of ours": sum(
            str(type(o).__module__).startswith("fsdp_c") for o in gc.get_objects()
        ),
        "process groups": len(dist.distributed_c10d._world.pg_map),
        "threads": len(os.listdir("/proc/self/task")),
        "files": len(os.listdir("/proc/self/fd")),
        "bytes": allocated(),
    }


def wide() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))


def all_kinds_of_steps(model: nn.Sequential, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Accumulation, evaluation, state dicts, gathers by hand, failures in forward and backward."""
    x = torch.ones(2, WIDTH) + rank
    for last in (False, True):
        model.set_requires_gradient_sync(last)
        model(x).square().mean().backward()
    with torch.no_grad():
        model(x)
    optimizer.step()
    optimizer.zero_grad()
    model.state_dict()
    model[0].unshard(async_op=True).wait()
    model[0].reshard()
    model[1].unshard(async_op=True)  # nobody waits: the next forward does
    for hook in FAILURES.values():
        handle = model[1].register_forward_hook(hook)
        with contextlib.suppress(UserError):
            model(x).square().mean().backward()
        handle.remove()
        model.reset_iter_state()
        model.zero_grad()


def steps(rank: int, world: int) -> list[dict[str, int]]:
    """The census after some steps, and after 50 more."""
    api = Api("fsdp_c", rank, world, Path())
    model = shard(api, wide())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    found = []
    for count in (10, 50):
        for _ in range(count):
            all_kinds_of_steps(model, optimizer, rank)
        dist.barrier()
        found.append(census())
    return found


# ---- a deleted model ----


def everything_of(model: nn.Module) -> dict[str, Any]:
    """Weak references to all that the model consists of, by what it is."""
    found: dict[str, Any] = {"model": weakref.ref(model)}
    for index, module in enumerate(model.modules()):
        found[f"module {index}"] = weakref.ref(module)
        if not hasattr(module, "_get_fsdp_state"):
            continue
        state = module._get_fsdp_state()
        found[f"state {index}"] = weakref.ref(state)
        found[f"context {index}"] = weakref.ref(state._comm_ctx)
        for group in state._fsdp_param_groups:
            found[f"group {index}"] = weakref.ref(group)
            for number, param in enumerate(group.fsdp_params):
                found[f"param {index} {number}"] = weakref.ref(param)
                found[f"shard {index} {number}"] = weakref.ref(param.sharded_param)
                if hasattr(param, "_unsharded_param"):
                    found[f"unsharded {index} {number}"] = weakref.ref(param._unsharded_param)
    return found


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(2, 5))


def leave_in(model: nn.Sequential, where: str) -> None:
    model[1].register_forward_hook(FAILURES[where])
    with contextlib.suppress(UserError):
        model(torch.ones(2, 5)).square().mean().backward()


LIVES: dict[str, Callable[[nn.Sequential], Any]] = {
    "never used": lambda model: None,
    "trained": lambda model: train(model, 0, 2),
    "evaluated": evaluate,
    "after a forward": lambda model: model(torch.ones(2, 5)).sum().item(),
    "gathered by hand": lambda model: model[0].unshard(),
    "while gathering": lambda model: model[0].unshard(async_op=True),
    "failed in forward": lambda model: leave_in(model, "forward"),
    "failed in backward": lambda model: leave_in(model, "backward"),
    "without synchronisation": lambda model: (
        model.set_requires_gradient_sync(False),
        model(torch.ones(2, 5)).sum().backward(),
    ),
}


def threads_after(most: int) -> int:
    """Threads of this process, once there are at most so many or after two seconds."""
    deadline = time.monotonic() + 2
    while len(os.listdir("/proc/self/task")) > most and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(os.listdir("/proc/self/task"))


def deletions(rank: int, world: int) -> dict[str, Any]:
    """What is left of a model after each life, and of the threads of all."""
    api = Api("fsdp_c", rank, world, Path())
    train(shard(api, blocks_and_head()), rank, 1)  # what torch makes once
    gc.collect()
    threads = threads_after(0)
    found: dict[str, Any] = {}
    for life, lead in LIVES.items():
        model = shard(api, blocks_and_head())
        lead(model)
        parts = everything_of(model)
        del model
        gc.collect()
        found[life] = [name for name, ref in parts.items() if ref() is not None]
        found[f"{life}, parts"] = len(parts)
        dist.barrier()
    found["more threads"] = threads_after(threads) - threads
    return found


# ---- a dead peer ----

PLACES = ["gather in forward", "gather in backward", "reduction"]


def lose_a_peer(rank: int, world: int, folder: str) -> None:
    """Rank 3 shares one group with each other rank, and dies while they wait for it.

    Each of the others writes what it saw to a file.
    """
    api = Api("fsdp_c", rank, world, Path(folder))
    last = world - 1
    groups = [dist.new_group([r, last]) for r in range(last)]
    brief = dist.new_group([0, 1], timeout=timedelta(seconds=1.5))
    if rank == 0:
        absent = CASES["handle"](api, mesh=DeviceMesh.from_group(brief, "cpu"))
        witness(api.folder / "nobody comes", absent.wait_in)
    mine = range(last) if rank == last else [rank]
    cases = {r: CASES[PLACES[r]](api, mesh=DeviceMesh.from_group(groups[r], "cpu")) for r in mine}
    for case in cases.values():
        train(case.model, 0, 1)
        case.begin()
    processes: list[Any] = [None] * world
    dist.all_gather_object(processes, os.getpid())
    if rank == last:
        for process in processes[:last]:
            wait_until_blocked(process)
        os.kill(os.getpid(), signal.SIGKILL)
    witness(api.folder / PLACES[rank], cases[rank].wait_in)


def witness(path: Path, run: Callable[[], None]) -> None:
    """Writes type, seconds and message of the exception of ``run()``, and of its cause."""
    start = time.monotonic()
    try:
        run()
    except Exception as error:
        parts = [type(error).__name__, f"{time.monotonic() - start}", str(error)]
        path.write_text("\n".join([*parts, f"cause: {type(error.__cause__).__name__}"]))
