"""Runs ranks as threads of one process, over PyTorch's threaded process group.

The group's collectives are methods of a Python class that copy between the threads' tensors. This
module records those methods, because the calls do not pass through torch's operators.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from record import COLLECTIVES, CollectiveRecorder
from releases import has
from torch.testing._internal.distributed import multi_threaded_pg as threaded

GATHER, SCATTER = (
    ("all_gather_single", "reduce_scatter_single")
    if has("2.13")
    else ("_allgather_base", "_reduce_scatter_base")
)
METHODS = (
    GATHER,
    SCATTER,
    "all_gather_single_coalesced",
    "reduce_scatter_single_coalesced",
    "all_to_all_single",
    *(name.strip("_") for name in COLLECTIVES if "base" not in name),
)


@contextmanager
def recorded_methods() -> Iterator[CollectiveRecorder]:
    """Records calls of the threaded group's methods, except calls between these methods."""
    collective_recorder = CollectiveRecorder()
    nested = threading.local()
    group = threaded.ProcessLocalGroup
    originals = {name: vars(group)[name] for name in METHODS if name in vars(group)}

    def recording(name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            if getattr(nested, "method", False):
                return method(self, *args, **kwargs)
            collective_recorder.record(name, list(args[:2]), self)
            nested.method = True
            try:
                return method(self, *args, **kwargs)
            finally:
                nested.method = False

        return call

    for name, method in originals.items():
        setattr(group, name, recording(name, method))
    try:
        yield collective_recorder
    finally:
        for name, method in originals.items():
            setattr(group, name, method)


def run_threads(world_size: int, target: Callable[[int], None]) -> None:
    """Runs ``target(rank)`` on threads that form one process group, and joins them."""
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
    """Makes the other ranks raise in the collectives in which they wait for this rank."""
    threaded.ProcessLocalGroup.exception_handle(error)
