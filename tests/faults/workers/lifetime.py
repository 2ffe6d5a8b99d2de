"""Lifetimes: leaks over many steps, deletion of a model, and the death of a peer.

``test_lifetime.py`` runs this module on gloo ranks.
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
from behavior import Api, blocks_and_head, shard, train
from interrupt import CASES, wait_until_blocked
from releases import groups_of
from torch.distributed.device_mesh import DeviceMesh

# ---- many steps ----

WIDTH = 200
"""Width of the model. A parameter has 160 kB, so a leak of one per step is measurable."""


class UserError(Exception):
    pass


def raise_user_error(*unused: Any) -> None:
    raise UserError


def raise_in_backward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
    output.register_hook(raise_user_error)


FAILURES = {"forward": raise_user_error, "backward": raise_in_backward}
"""Forward hooks that raise in forward or in backward."""


class Mallinfo2(ctypes.Structure):
    """glibc's struct mallinfo2, with the numbers of allocated bytes."""

    _fields_ = [(f"unused{i}", ctypes.c_size_t) for i in range(4)]
    _fields_ += [("mapped", ctypes.c_size_t), *((f"unused{i}", ctypes.c_size_t) for i in (5, 6))]
    _fields_ += [("in_arenas", ctypes.c_size_t), *((f"unused{i}", ctypes.c_size_t) for i in (8, 9))]


def allocated() -> int:
    """Returns the bytes that malloc has allocated in this process."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo2
    result = mallinfo2()
    return int(result.in_arenas + result.mapped)


def census() -> dict[str, int]:
    """Returns the numbers of objects and bytes that a leak would increase."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), torch.Tensor)]
    return {
        "tensors": len(tensors),
        "objects of fsdp_c": sum(
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


def run_varied_steps(model: nn.Sequential, optimizer: torch.optim.Optimizer, rank: int) -> None:
    """Runs accumulation, evaluation, state dicts, manual gathers and steps that raise."""
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
    model[1].unshard(async_op=True)  # never waited for here; the next forward waits
    for hook in FAILURES.values():
        handle = model[1].register_forward_hook(hook)
        with contextlib.suppress(UserError):
            model(x).square().mean().backward()
        handle.remove()
        model.reset_iter_state()
        model.zero_grad()


def census_before_and_after_50_steps(rank: int, world: int) -> list[dict[str, int]]:
    """Returns the census after 10 steps and after 50 more."""
    api = Api("fsdp_c", rank, world, Path())
    model = shard(api, wide())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.001)
    result = []
    for count in (10, 50):
        for _ in range(count):
            run_varied_steps(model, optimizer, rank)
        dist.barrier()
        result.append(census())
    return result


# ---- a deleted model ----


def weak_references(model: nn.Module) -> dict[str, Any]:
    """Returns weak references to all parts of the model, by kind and module name."""
    result: dict[str, Any] = {}
    for name, module in model.named_modules():
        result[f"module {name}"] = weakref.ref(module)
        if not hasattr(module, "_get_fsdp_state"):
            continue
        state = module._get_fsdp_state()
        result[f"state {name}"] = weakref.ref(state)
        result[f"context {name}"] = weakref.ref(state._comm_ctx)
        for index, group in enumerate(groups_of(state)):
            result[f"group {index} {name}"] = weakref.ref(group)
            for number, param in enumerate(group.fsdp_params):
                key = f"{index}.{number} {name}"
                result[f"param {key}"] = weakref.ref(param)
                result[f"shard {key}"] = weakref.ref(param.sharded_param)
                if hasattr(param, "_unsharded_param"):
                    result[f"unsharded {key}"] = weakref.ref(param._unsharded_param)
    return result


def evaluate(model: nn.Module) -> None:
    with torch.no_grad():
        model(torch.ones(2, 5))


def fail_in(model: nn.Sequential, where: str) -> None:
    model[1].register_forward_hook(FAILURES[where])
    with contextlib.suppress(UserError):
        model(torch.ones(2, 5)).square().mean().backward()


USAGES: dict[str, Callable[[nn.Sequential], Any]] = {
    "never used": lambda model: None,
    "trained": lambda model: train(model, 0, 2),
    "evaluated": evaluate,
    "after a forward": lambda model: model(torch.ones(2, 5)).sum().item(),
    "gathered by hand": lambda model: model[0].unshard(),
    "while gathering": lambda model: model[0].unshard(async_op=True),
    "failed in forward": lambda model: fail_in(model, "forward"),
    "failed in backward": lambda model: fail_in(model, "backward"),
    "without gradient sync": lambda model: (
        model.set_requires_gradient_sync(False),
        model(torch.ones(2, 5)).sum().backward(),
    ),
}


def delete_without_collection(rank: int, world: int) -> dict[str, list[bool]]:
    """Returns whether a trained model is freed by `del`, and by a collection, by implementation."""
    results = {}
    for implementation in ("torch", "fsdp_c"):
        model: Any = shard(Api(implementation, rank, world, Path()), blocks_and_head())
        train(model, rank, 1)
        reference = weakref.ref(model)
        gc.collect()
        gc.disable()
        del model
        freed = [reference() is None]
        gc.enable()
        gc.collect()
        results[implementation] = [*freed, reference() is None]
    return results


def wait_for_threads(limit: int) -> int:
    """Waits up to 2 s until at most ``limit`` threads run. Returns the number of threads."""
    deadline = time.monotonic() + 2
    while len(os.listdir("/proc/self/task")) > limit and time.monotonic() < deadline:
        time.sleep(0.01)
    return len(os.listdir("/proc/self/task"))


def delete_after_each_usage(rank: int, world: int) -> dict[str, Any]:
    """Deletes a model after each usage, without a garbage collection.

    Returns, per usage, the parts that were not freed, and the number of all parts. Also returns the
    number of new threads.
    """
    api = Api("fsdp_c", rank, world, Path())
    train(shard(api, blocks_and_head()), rank, 1)  # creates torch's per-process objects
    gc.collect()
    threads = wait_for_threads(0)  # after 2 s, when threads that end have ended
    result: dict[str, Any] = {}
    for usage, use in USAGES.items():
        model = shard(api, blocks_and_head())
        use(model)
        parts = weak_references(model)
        gc.collect()
        gc.disable()
        del model
        result[usage] = [name for name, ref in parts.items() if ref() is not None]
        result[f"{usage}, parts"] = len(parts)
        gc.enable()
        dist.barrier()
    result["more threads"] = wait_for_threads(threads) - threads
    return result


# ---- a dead peer ----

PLACES = ["gather in forward", "gather in backward", "reduction"]


def run_with_peer_death(rank: int, world: int, folder: str) -> None:
    """Rank 3 shares one group with each other rank, and dies while the other ranks wait for it.

    Each of the other ranks writes its exception to a file.
    """
    api = Api("fsdp_c", rank, world, Path(folder))
    last = world - 1
    groups = [dist.new_group([r, last]) for r in range(last)]
    short_timeout_group = dist.new_group([0, 1], timeout=timedelta(seconds=1.5))
    if rank == 0:
        case_without_peer = CASES["handle"](
            api, mesh=DeviceMesh.from_group(short_timeout_group, "cpu")
        )
        report_exception(api.folder / "missing peer", case_without_peer.wait_in)
    peers = range(last) if rank == last else [rank]
    cases = {r: CASES[PLACES[r]](api, mesh=DeviceMesh.from_group(groups[r], "cpu")) for r in peers}
    for case in cases.values():
        train(case.model, 0, 1)
        case.begin()
    processes: list[Any] = [None] * world
    dist.all_gather_object(processes, os.getpid())
    if rank == last:
        for process in processes[:last]:
            wait_until_blocked(process)
        os.kill(os.getpid(), signal.SIGKILL)
    report_exception(api.folder / PLACES[rank], cases[rank].wait_in)


def report_exception(path: Path, run: Callable[[], None]) -> None:
    """Runs ``run()`` and writes its exception's type, message and cause to ``path``."""
    try:
        run()
    except Exception as error:
        parts = [type(error).__name__, str(error)]
        path.write_text("\n".join([*parts, f"cause: {type(error.__cause__).__name__}"]))
