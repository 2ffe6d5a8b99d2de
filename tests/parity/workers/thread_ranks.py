"""Ranks that are threads of one process, over PyTorch's threaded process group.

Its collectives are methods of a Python class, which copy between the threads' tensors. They are
recorded there; torch's operators do not see them.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from record import COLLECTIVES, Tap
from releases import has
from torch.testing._internal.distributed import multi_threaded_pg as threaded

BASE_METHODS = ("_allgather_base", "_reduce_scatter_base")
METHODS = (  # the first one gathers
    *(("all_gather_single", "reduce_scatter_single") if has("2.13") else BASE_METHODS),
    "all_gather_single_coalesced",
    "reduce_scatter_single_coalesced",
    "all_to_all_single",
    *(name.strip("_") for name in COLLECTIVES if "base" not in name),
)


@contextmanager
def recorded_methods() -> Iterator[Tap]:
    """Record the calls of the threaded group's methods; those that they make in turn are not."""
    tap = Tap()
    inside = threading.local()
    group = threaded.ProcessLocalGroup
    originals = {name: vars(group)[name] for name in METHODS if name in vars(group)}

    def recording(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(inside, "method", False):
                return method(self, *args, **kwargs)
            tap.note(name, list(args[:2]), self)
            inside.method = True
            try:
                return method(self, *args, **kwargs)
            finally:
                inside.method = False

        return call

    for name, method in originals.items():
        setattr(group, name, recording(name, method))
    try:
        yield tap
    finally:
        for name, method in originals.items():
            setattr(group, name, method)


def run_threads(world_size: int, target: Callable[[int], None]) -> None:
    """Call ``target(rank)`` on threads that form one process group; returns when all have ended."""
    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    store = dist.HashStore()

    def run(rank: int) -> None:
        dist.init_process_group("threaded", rank=rank, world_size=world_size, store=store)
        try:
            target(rank)
        finally:
            dist.destroy_process_group()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    threaded._uninstall_threaded_pg()
    torch._C._distributed_c10d._set_thread_isolation_mode(False)


def stop_peers(error: BaseException) -> None:
    """Have the other ranks leave the collectives in which they wait for this one."""
    threaded.ProcessLocalGroup.exception_handle(error)
