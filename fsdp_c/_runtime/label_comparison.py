"""Compares the collectives of NCCL process groups between ranks, while they train.

The host of a rank does not wait for NCCL's collectives, so a comparison must not wait either. Each
collective has a label, an integer: the hash of its operation, unit, parameters and sizes
(``fct_op_label`` in ``csrc/transport/op_tag.h``). The stall monitor of each rank publishes hashes
of its latest labels in the store of the process group.
It compares its hashes with those of one neighbor. If hashes with the same numbers differ, the rank
publishes a request (``departures.py``). The ranks of the process group answer it like a request of
a departing rank: their next collective raises the first difference.

With the guard mode "hash" the ranks also compare the checksums of data, by intervals that usually
end with a backward (``csrc/core/device_checksums.h``).

A difference is usually raised 2 to 6 seconds later, when optimizers have used wrong gradients.
Every ``INTERVAL`` seconds a rank writes one key per process group and reads another one, whatever
the number of ranks is.
"""

from __future__ import annotations

import contextlib
import json
import threading
import weakref

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from .. import _C
from .comparison_requests import (
    ComparisonRequest,
    hash_labels,
    make_checksum_request,
    make_request,
)
from .departures import get_departures

INTERVAL = 2.0
"""Seconds between two comparisons."""
INTERVAL_WITH_REQUEST = 0.5
"""The same while a request is open: its ranks raise soon after one of them has answered it."""
BLOCK = 16
"""Number of labels with a common hash."""
BLOCKS = 64
"""Number of blocks that a rank publishes. The key of the neighbor may be two seconds old."""


class Labels:
    """The latest labels of a process group, by number. A label or a hash of 0 is unknown."""

    def __init__(self) -> None:
        self.end = 0  # number of the next label
        self.labels: dict[int, int] = {}
        self.blocks: dict[int, int] = {}  # hashes of complete blocks, by number of the first label
        self._published = (0, 0)  # the last intervals of the latest two calls of select_intervals

    def read(self, group: str) -> None:
        """Adds the labels since the last call."""
        first, labels = _C.collective_labels(group, self.end)
        for number, label in enumerate(labels, first):
            self.labels[number] = label
            if (number + 1) % BLOCK == 0:
                block = range(number + 1 - BLOCK, number + 1)
                self.blocks[block.start] = hash_labels([self.labels.get(n, 0) for n in block])
        self.end = max(self.end, first + len(labels))
        oldest = self.end - BLOCK * BLOCKS
        self.labels = {number: label for number, label in self.labels.items() if number >= oldest}
        self.blocks = {start: value for start, value in self.blocks.items() if start >= oldest}

    def to_lists(self) -> list[list[tuple[int, int]]]:
        """The hashes of the blocks, and the labels after the last complete block."""
        tail = range(self.end - self.end % BLOCK, self.end)
        return [[*self.blocks.items()], [(n, self.labels.get(n, 0)) for n in tail]]

    def select_intervals(self, intervals: list[tuple[int, int]]) -> list[tuple[int, int]]:
        """Returns those since the last call but one, and at least the latest 16.

        The neighbor may read the key two seconds late, and may have the hash of an interval of
        checksums only after this rank.
        """
        recent = sum(number > self._published[0] for number, _ in intervals)
        selected = intervals[-max(recent, 16) :]
        newest = intervals[-1][0] if intervals else 0
        self._published = (self._published[1], newest)
        return selected

    def find_difference(
        self, of_neighbor: list[list[tuple[int, int]]]
    ) -> tuple[int, int, int] | None:
        """Returns number, hash and count of the first labels that differ from the neighbor's."""
        blocks, tail = of_neighbor
        for start, value in blocks:
            if self.blocks.get(start, 0) not in (0, value) and value:
                return start, self.blocks[start], BLOCK
        for number, label in tail:
            if self.labels.get(number, 0) not in (0, label) and label:
                return number, hash_labels([self.labels[number]]), 1
        return None


_lock = threading.Lock()  # held while `_groups` is changed or copied
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Labels] = weakref.WeakKeyDictionary()
"""The compared process groups."""
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
        _groups.setdefault(process_group, Labels())


def remove(process_group: dist.ProcessGroup) -> None:
    """Ends the comparison of the process group.

    Its collectives have no labels from now on, because functions of torch issue them, perhaps on
    this rank only.
    """
    with _lock:
        _groups.pop(process_group, None)


def is_due(seconds: float) -> bool:
    """Whether to call :func:`compare`, ``seconds`` after its last call."""
    if not _groups or seconds < INTERVAL_WITH_REQUEST:
        return False
    return seconds >= INTERVAL or get_departures().has_open_requests()


def compare() -> None:
    """Compares all process groups once, and answers the requests of other ranks."""
    with _lock:
        groups = list(_groups.items())
    for process_group, labels in groups:
        if process_group in _different:
            continue
        try:
            request = _exchange(process_group, labels)
            if request is not None:
                _different.add(process_group)
                get_departures().publish(request)
        except (KeyError, RuntimeError, ValueError):  # the process group has ended
            if labels.end > 0:  # else it has not issued its first collective
                remove(process_group)
    get_departures().answer_requests()


def _exchange(process_group: dist.ProcessGroup, labels: Labels) -> ComparisonRequest | None:
    """Publishes this rank's hashes. Returns a request if those of the neighbor differ."""
    name = process_group.group_name
    labels.read(name)
    intervals = _C.checksum_intervals(name)
    store = _get_store(process_group)
    rank, size = process_group.rank(), process_group.size()
    store.set(str(rank), json.dumps([labels.to_lists(), labels.select_intervals(intervals)]))
    neighbor = str((rank - 1) % size)
    if not store.check([neighbor]):
        return None
    labels_of_neighbor, intervals_of_neighbor = json.loads(store.get(neighbor))
    if difference := labels.find_difference(labels_of_neighbor):
        number, value, count = difference
        return make_request(process_group, number, value, label_count=count)
    hashes = dict(intervals)
    if number := find_interval(hashes, intervals_of_neighbor):
        return make_checksum_request(process_group, number, hashes[number])
    return None


def find_interval(own: dict[int, int], of_neighbor: list[tuple[int, int]]) -> int:
    """Returns the number of the first interval whose hashes differ, or 0. Hash 0 is unknown."""
    for number, value in of_neighbor:
        if value and own.get(number, 0) not in (0, value):
            return number
    return 0


def _get_store(process_group: dist.ProcessGroup) -> dist.Store:
    return dist.PrefixStore("fsdp_c/labels", _get_process_group_store(process_group))
