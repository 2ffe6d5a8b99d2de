"""Compares the collectives of NCCL process groups between ranks, while they train.

The host of a rank does not wait for NCCL's collectives, so a comparison must not wait either. The
stall monitor of each rank publishes the hashes of its latest labels in the store of the process
group, and compares them with those of one neighbor. If two labels with the same number differ, the
rank publishes a request (``departures.py``). The ranks of the process group answer it like a
request of a departing rank: their next collective raises the first difference.

So a difference is found after some seconds, when optimizers have used wrong gradients. Each rank
writes one key and reads another one per ``INTERVAL``, whatever the number of ranks is.
"""

from __future__ import annotations

import base64
import contextlib
import json
import threading
import weakref

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from .. import _C
from .departures import Departure, get_departures

INTERVAL = 2.0
"""Seconds between two comparisons."""
LABELS = 128
"""Number of labels that a rank publishes. Hosts of ranks are rarely more collectives apart."""

_lock = threading.Lock()  # held while `_groups` is read or changed
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()
"""The compared process groups, with the number of collectives at the last comparison."""
_different: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
"""Process groups for which this rank has published a request."""


def prepare(process_group: dist.ProcessGroup) -> None:
    """Deletes labels of an earlier process group with this name. Call it before all ranks meet."""
    if process_group not in _groups:
        with contextlib.suppress(RuntimeError):  # the store deletes no keys, or has ended
            _get_store(process_group).delete_key(str(process_group.rank()))


def add(process_group: dist.ProcessGroup) -> None:
    """Compares the collectives of this process group from now on."""
    with _lock:
        _groups.setdefault(process_group, 0)


def remove(process_group: dist.ProcessGroup) -> None:
    """Compares the process group no more: functions of torch issue collectives that have no label,
    perhaps on this rank only."""
    with _lock:
        _groups.pop(process_group, None)


def has_groups() -> bool:
    return len(_groups) > 0


def compare() -> None:
    """Compares all process groups once, and answers the requests of other ranks."""
    with _lock:
        groups = list(_groups.items())
    for process_group, count in groups:
        if process_group in _different:
            continue
        first, labels = _C.collective_labels(process_group.group_name, max(0, count - LABELS))
        dropped = max(0, len(labels) - LABELS)
        if _compare_with_neighbor(process_group, first + dropped, labels[dropped:]):
            _different.add(process_group)
        with _lock:
            _groups[process_group] = first + len(labels)
    get_departures().answer()


def _compare_with_neighbor(process_group: dist.ProcessGroup, first: int, labels: list[int]) -> bool:
    """Returns whether a label differs. Publishes a request then."""
    rank, size = process_group.rank(), process_group.size()
    store = _get_store(process_group)
    store.set(str(rank), json.dumps([first, labels]))
    neighbor = str((rank - 1) % size)
    if not store.check([neighbor]):
        return False
    first_of_neighbor, labels_of_neighbor = json.loads(store.get(neighbor))
    others = dict(enumerate(labels_of_neighbor, first_of_neighbor))
    for number, label in enumerate(labels, first):
        if label and others.get(number, 0) not in (0, label):
            _request(process_group, number, label)
            return True
    return False


def _get_store(process_group: dist.ProcessGroup) -> dist.Store:
    return dist.PrefixStore("fsdp_c/labels", _get_process_group_store(process_group))


def _request(process_group: dist.ProcessGroup, number: int, label: int) -> None:
    name = process_group.group_name
    first, entries = _C.collective_entries(name)
    get_departures().publish(
        Departure(
            name,
            dist.get_process_group_ranks(process_group),
            process_group.rank(),
            number,
            label,
            first,
            base64.b64encode(entries).decode(),
            by_label=True,
        )
    )
