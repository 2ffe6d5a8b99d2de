"""Compares the collectives of NCCL process groups between ranks, while they train.

The host of a rank does not wait for NCCL's collectives, so a comparison must not wait either. Each
collective has a label: its operation, unit, parameters and sizes (``fct_op_label`` in
``csrc/transport/op_tag.h``). The stall monitor of each rank hashes blocks of labels
(``csrc/transport/label_blocks.h``). It publishes the hashes in the store of the process group, and
compares them with those of one neighbor. If hashes of a block differ, the rank publishes a request
(``departures.py``). The ranks of the process group answer it like a request of a departing rank:
their next collective raises the first difference.

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
import time
import weakref

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_process_group_store

from .. import _C
from .comparison_requests import ComparisonRequest, make_checksum_request, make_request
from .departures import get_departures

INTERVAL = 2.0
"""Seconds between two comparisons."""
INTERVAL_WITH_REQUEST = 0.5
"""The same while a request is open: its ranks raise soon after one of them has answered it."""
RETRY = 10.0
"""Seconds until a rank whose request is still open publishes another one."""
KEPT = 15
"""A block of ``count`` labels is dropped after ``KEPT * count`` further collectives."""

Block = tuple[int, int, int]
"""Number of the first collective, number of collectives, hash of the labels."""


class Progress:
    """The numbers of collectives and checksums at this rank's latest comparisons of a group."""

    def __init__(self) -> None:
        self.end = 0  # number of the next collective
        self._issued = self._previous = 0  # between the latest two comparisons; the two before
        self._published = (0, 0)  # the last intervals of the latest two calls of select_intervals

    def select_blocks(self, blocks: list[Block]) -> list[Block]:
        """Begins a comparison. Returns the blocks that the neighbor may need.

        The neighbor reads them up to ``INTERVAL`` seconds later. By then this rank has dropped much
        smaller blocks, so a request for them would remain without an answer. Blocks of more than
        two intervals are not needed either: shorter ones overlap with those of the neighbor.
        """
        end = find_end(blocks)
        self._previous, self._issued, self.end = self._issued, end - self.end, end
        longest = 2 * max(self._issued, self._previous) or end
        return [
            block for block in blocks if self._issued <= KEPT * block[1] and block[1] <= longest
        ]

    def find_difference(self, own: list[Block], of_neighbor: list[Block]) -> Block | None:
        """Returns the first own block that differs, and that the neighbor keeps long enough.

        The neighbor needs it when it answers the request, up to four seconds later. Until then it
        issues about twice as many collectives as this rank since the previous comparison. The
        condition is for three times as many.
        """
        end = find_end(of_neighbor) + 3 * self._issued
        hashes = {(first, count): value for first, count, value in of_neighbor}
        different = [
            (first, count, value)
            for first, count, value in own
            if hashes.get((first, count), value) != value and end <= first + count + KEPT * count
        ]
        return min(different, default=None)

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


_lock = threading.Lock()  # held while `_groups` is changed or copied
_groups: weakref.WeakKeyDictionary[dist.ProcessGroup, Progress] = weakref.WeakKeyDictionary()
"""The compared process groups."""
_requests: weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[str, float]] = (
    weakref.WeakKeyDictionary()
)
"""This rank's latest requests: their keys and times."""


def prepare(process_group: dist.ProcessGroup) -> None:
    """Deletes this rank's key of an earlier process group with this name.

    Call it before the ranks compare their plans, so that no neighbor reads the old key.
    """
    if process_group not in _groups:
        with contextlib.suppress(RuntimeError):  # the store deletes no keys, or has ended
            _get_store(process_group).delete_key(str(process_group.rank()))


def add(process_group: dist.ProcessGroup) -> None:
    """Compares the collectives of this process group from now on."""
    with _lock:
        _groups.setdefault(process_group, Progress())


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
    for process_group, progress in groups:
        key, published_at = _requests.get(process_group, ("", 0.0))
        is_late = time.monotonic() - published_at > RETRY
        if key and not (is_late and get_departures().is_open(key)):
            continue
        try:
            request = _exchange(process_group, progress)
            if request is not None:
                key = get_departures().publish(request)
                _requests[process_group] = (key, time.monotonic())
        except (KeyError, RuntimeError, ValueError):  # the process group has ended
            if progress.end > 0:  # else it has not issued its first collective
                remove(process_group)
    get_departures().answer_requests()


def _exchange(process_group: dist.ProcessGroup, progress: Progress) -> ComparisonRequest | None:
    """Publishes this rank's hashes. Returns a request if those of the neighbor differ."""
    name = process_group.group_name
    blocks = _C.label_blocks(name)
    intervals = _C.checksum_intervals(name)
    store = _get_store(process_group)
    rank, size = process_group.rank(), process_group.size()
    store.set(
        str(rank),
        json.dumps([progress.select_blocks(blocks), progress.select_intervals(intervals)]),
    )
    neighbor = str((rank - 1) % size)
    if not store.check([neighbor]):
        return None
    blocks_of_neighbor, intervals_of_neighbor = json.loads(store.get(neighbor))
    if difference := progress.find_difference(blocks, blocks_of_neighbor):
        number, count, value = difference
        return make_request(process_group, number, value, label_count=count)
    hashes = dict(intervals)
    if number := find_differing_interval(hashes, intervals_of_neighbor):
        return make_checksum_request(process_group, number, hashes[number])
    return None


def find_end(blocks: list[Block]) -> int:
    """Returns the number after the last collective."""
    return max((first + count for first, count, _ in blocks), default=0)


def find_differing_interval(own: dict[int, int], of_neighbor: list[tuple[int, int]]) -> int:
    """Returns the number of the first interval whose hashes differ, or 0. Hash 0 is unknown."""
    for number, value in of_neighbor:
        if value and own.get(number, 0) not in (0, value):
            return number
    return 0


def _get_store(process_group: dist.ProcessGroup) -> dist.Store:
    return dist.PrefixStore("fsdp_c/labels", _get_process_group_store(process_group))
