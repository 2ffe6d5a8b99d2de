"""Compares the plans of a root through the store of an NCCL process group.

A collective of NCCL would need memory on the device, and a wait of the host for the device. Instead
each rank reads the hash of rank 0 from the store and adds its result there, before the first
collective of the root. A rank writes at most four times, and polls the store until all ranks have
written. The keys of a comparison:

    first   the hash of rank 0
    equal   the number of ranks whose hash is that of rank 0
    result  set once: "equal", "off", or "RANK HASH" of a rank that differs
    read    the number of ranks that have read the result; the last one deletes the keys

The keys are deleted because a store may outlive a process group, and a later process group may have
the same name.

If a rank does not write before the time limit of the process group, the others train without a
comparison. NCCL's watchdog then decides what happens.
"""

from __future__ import annotations

import datetime
import logging
import time
import weakref
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.distributed_c10d import _get_process_group_store

OFF = "off"
_EQUAL = "equal"
_POLL_SECONDS = (0.001, 1.0)
"""The shortest and the longest time between two requests of a rank that waits."""

_logger = logging.getLogger("torch.distributed.fsdp.fully_shard")
_comparisons: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
"""The number of comparisons of each process group. It is equal on all ranks."""


def uses_nccl(process_group: dist.ProcessGroup) -> bool:
    """Whether NCCL moves the data of the process group's CUDA tensors."""
    try:
        return "nccl" in dist.get_backend_config(process_group)
    except (AssertionError, RuntimeError, TypeError, ValueError):  # unknown to torch
        return False


def compare(process_group: dist.ProcessGroup, plan: str) -> tuple[int, tuple[int, int]] | None:
    """Compares the hash of this rank's plan, in hexadecimal digits, with those of all ranks.

    If the store fails, or a rank does not write in time, this function logs a warning and returns
    None. Any other exception propagates, and the next call repeats the comparison.

    With ``OFF`` this rank does not wait. The other ranks then find no difference, unless they have
    found one before.

    Returns:
        None if no difference was found. Otherwise the first rank of the process group that was
        found to differ from rank 0, and the hashes of both.
    """
    number = _comparisons.get(process_group, 0) + 1
    prefix = f"fsdp_c/plans/{number}"
    store = dist.PrefixStore(prefix, _get_process_group_store(process_group))
    deadline = time.monotonic() + get_timeout(process_group, "cuda").total_seconds()
    try:
        result = exchange(store, process_group.rank(), process_group.size(), plan, deadline)
        _comparisons[process_group] = number
        difference = None
        if result not in (_EQUAL, OFF):
            rank, hash_of_rank = result.split()
            difference = int(rank), (int(store.get("first"), 16), int(hash_of_rank, 16))
        if store.add("read", 1) == process_group.size():
            for key in ("first", "equal", "result", "read"):
                store.delete_key(key)
        return difference
    except (RuntimeError, TimeoutError) as error:  # the store has ended, or a rank does not write
        _comparisons[process_group] = number
        _logger.warning(
            "fsdp_c: the models of the ranks of process group '%s' are not compared: %s",
            process_group.group_name,
            error,
        )
        return None


def exchange(store: dist.Store, rank: int, size: int, plan: str, deadline: float) -> str:
    """Makes the requests of this rank. Returns the value of the key ``result``.

    Returns ``OFF`` if this rank or rank 0 compares nothing.

    Raises ``TimeoutError`` if a rank does not write before the deadline, on the clock
    ``time.monotonic()``.
    """
    if rank == 0:
        store.set("first", plan)
    first = OFF if plan == OFF else _wait(store, "first", deadline)
    if first == OFF:
        store.compare_set("result", "", OFF)
        return OFF
    if first != plan:
        store.compare_set("result", "", f"{rank} {plan}")
    elif store.add("equal", 1) == size:
        store.compare_set("result", "", _EQUAL)
    return _wait(store, "result", deadline)


def _wait(store: dist.Store, key: str, deadline: float) -> str:
    """Waits for the key and returns its value. Signal handlers run meanwhile."""
    begin = time.monotonic()
    while not store.check([key]):
        now = time.monotonic()
        if now > deadline:
            waited = f"{now - begin:.0f} s"
            raise TimeoutError(f"not all ranks have begun their first forward within {waited}")
        shortest, longest = _POLL_SECONDS
        time.sleep(min(longest, max(shortest, 0.1 * (now - begin))))
    return store.get(key).decode()


def get_timeout(process_group: dist.ProcessGroup, device_type: str) -> datetime.timedelta:
    """Returns the time limit of the collectives on a device, or torch's default if unknown."""
    options = getattr(process_group._get_backend(torch.device(device_type)), "options", None)
    timeout = getattr(options, "_timeout", None)
    return timeout if isinstance(timeout, datetime.timedelta) else default_pg_timeout
