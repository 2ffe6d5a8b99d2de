"""Ranks whose next collective over gloo is not the predicted one.

Ranks predict each collective from the earlier ones (``csrc/transport/sequence.h``). A rank whose
collective differs from the prediction departs: it waits before it issues the collective. Either all
ranks depart with the same collective, as at the first evaluation, or their programs differ. Ranks
that follow the prediction have issued another collective, and take part in no exchange. So the
ranks use stores:

- Each departing rank increments a counter in the store of the process group. The key of the counter
  has the number and the signature of the collective. When the counter equals the number of ranks,
  the ranks issue the collective. A rank that an exception interrupts decrements the counter, or
  stays bound to the collective. One key decides: ``compare_set`` lets either a rank leave, or all
  ranks issue the collective.
- After ``PATIENCE`` the first departing ranks publish a request in the store of the job. Every rank
  whose thread waits reads the requests (``stall_monitor.py``). If its own collective with that
  number has another signature, the rank publishes the difference.
- Every rank that reads the difference stops the collectives of the process group: waits and later
  collectives raise the same text.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import logging
import threading
import time
import weakref
from dataclasses import asdict, dataclass

import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    _get_default_group,
    _get_default_store,
    _get_process_group_store,
    _resolve_process_group,
)

from .. import _C
from .plan_store import get_timeout

_logger = logging.getLogger("torch.distributed.fsdp.fully_shard")

PATIENCE = 0.1
"""Seconds that a departing rank waits for the other ranks before it publishes a request."""

REQUESTING_RANKS = 2
"""Number of departing ranks that publish requests. If one ends, the other remains."""

_REQUESTS = "fsdp_c/departures/requests"
_CLOSED = "closed"
"""Value of a request whose rank has ended its wait. Without the key, a read would block."""
_UNSET_LIMIT = 5.0
"""Seconds after which a rank that has not completed its write is assumed to have ended."""
_ISSUE = "issue"
"""Decision of the ranks that are about to issue a collective: no rank can leave any more."""
_SLEEP = (0.0005, 0.05)
"""The shortest and the longest time between two reads of a store, in seconds."""
_REMEDY = (
    "Some ranks have issued their collective and wait for it, so the process group cannot be used "
    "any more: restart the ranks, or shard the model over a new process group"
)
_REMEDY_AFTER_ISSUE = (
    "All later gradients may be wrong, and the process group cannot be used any more: restart the "
    "ranks from a checkpoint"
)

Entries = tuple[int, bytes]
"""The latest collectives: the number of the oldest one, and all as ``op_entry`` structs."""


@dataclass
class Departure:
    """A collective that was not predicted.

    ``ranks``: those of the process group in the job. With a ``label_count``, that many collectives
    from ``number`` on were issued, and ``signature`` is the hash of their labels
    (``label_comparison.py``). With ``has_checksums``, ``number`` is that of an interval,
    ``signature`` the hash of its checksums, and ``entries`` are these checksums.
    """

    group: str
    ranks: list[int]
    rank: int
    number: int
    signature: int
    first: int
    entries: str
    label_count: int = 0
    has_checksums: bool = False

    @property
    def was_issued(self) -> bool:
        return self.label_count > 0 or self.has_checksums

    @property
    def latest(self) -> Entries:
        return self.first, base64.b64decode(self.entries)


def make_departure(
    process_group: dist.ProcessGroup,
    number: int,
    signature: int,
    entry: bytes = b"",
    label_count: int = 0,
) -> Departure:
    """Describes a collective of this rank. ``entry`` follows the latest issued collectives."""
    first, entries = _C.collective_entries(process_group.group_name)
    departure = _make_request(process_group, number, signature, (first, entries + entry))
    departure.label_count = label_count
    return departure


def make_checksum_request(
    process_group: dist.ProcessGroup, number: int, signature: int
) -> Departure:
    """Describes an interval of checksums (``csrc/transport/checksums.h``)."""
    entries = _C.checksum_entries(process_group.group_name, number)
    request = _make_request(process_group, number, signature, entries)
    request.has_checksums = True
    return request


def _make_request(
    process_group: dist.ProcessGroup, number: int, signature: int, entries: Entries
) -> Departure:
    return Departure(
        process_group.group_name,
        dist.get_process_group_ranks(process_group),
        process_group.rank(),
        number,
        signature,
        entries[0],
        base64.b64encode(entries[1]).decode(),
    )


def read_count(store: dist.Store, key: str) -> int:
    """Returns the value of a counter. ``add(key, 0)`` would make the file of a FileStore longer."""
    return int(store.compare_set(key, "", "0"))


class Departures:
    """This process's own departures, and the open requests of other ranks."""

    def __init__(self) -> None:
        self._job = weakref.ref(_get_default_group())
        self._store = _get_default_store()
        self._rank = dist.get_rank()
        self._lock = threading.RLock()  # a thread departs while the stall monitor answers
        self._own_departures: dict[str, Departure] = {}  # by process group
        self._differences: dict[str, str] = {}  # of own departures, by process group
        # Later requests are new. The store may have requests of an earlier job.
        self._newest_read = read_count(self._store, _REQUESTS)
        self._unset_requests: dict[int, float] = {}  # number -> end of the wait for the key
        self._open_requests: dict[int, Departure] = {}  # by number; not closed, without difference
        self._logged: set[str] = set()  # process groups whose difference was logged

    def is_current(self) -> bool:
        return self._job() is dist.group.WORLD

    def depart(self, departure: Departure, group: dist.ProcessGroup) -> BaseException | None:
        """Waits until all ranks of the process group depart with the same collective.

        Returns an exception, as of a signal handler, that arrived when it was certain that the
        other ranks issue the collective. This rank may issue no other one.

        Raises:
            RuntimeError: another rank issues another collective, or does not depart within the
                time limit of the process group.
        """
        store, size = _get_process_group_store(group), group.size()
        key = f"fsdp_c/departures/{departure.number}/{departure.signature:x}"
        outer = self._own_departures.get(departure.group)  # not None: a signal handler departs
        is_certain = False
        try:
            try:
                self._own_departures[departure.group] = departure
                is_first = store.add(key, 1) <= REQUESTING_RANKS
                self._wait(departure, store, key, group, is_first)
                is_certain = True
                self._delete_when_all_have_read(store, key, size)
            finally:
                if outer is None:
                    del self._own_departures[departure.group]
                else:
                    self._own_departures[departure.group] = outer
                self._differences.pop(departure.group, None)
        except BaseException as error:  # also of a signal handler: the rank may depart again
            if is_certain:
                return error
            if not self._leave(store, key):
                self._delete_when_all_have_read(store, key, size)
                return error
            raise
        return None

    @staticmethod
    def _delete_when_all_have_read(store: dist.Store, key: str, size: int) -> None:
        if store.add(f"{key}/read", 1) == size:
            for suffix in ("", "/read", "/decision"):
                store.delete_key(key + suffix)

    def _leave(self, store: dist.Store, key: str) -> bool:
        """Decrements the counter. Returns False if other ranks issue the collective."""
        own = f"rank {self._rank} leaves"
        end = time.monotonic() + _UNSET_LIMIT
        with contextlib.suppress(RuntimeError):  # the store has ended
            while (decision := store.compare_set(f"{key}/decision", "", own).decode()) != own:
                if decision == _ISSUE:
                    return False
                if time.monotonic() > end:
                    break  # the rank that leaves has ended
                time.sleep(_SLEEP[0])  # another rank leaves
            store.add(key, -1)
            store.delete_key(f"{key}/decision")
        return True

    def _wait(
        self,
        departure: Departure,
        store: dist.Store,
        key: str,
        group: dist.ProcessGroup,
        is_first: bool,
    ) -> None:
        """Waits until ``key`` counts all ranks. ``is_first``: publishes a request if necessary."""
        size, limit = group.size(), get_timeout(group, "cpu").total_seconds()
        begin = time.monotonic()
        request = ""
        try:
            while (count := read_count(store, key)) < size or not self._decide(store, key):
                seconds = time.monotonic() - begin
                if seconds > PATIENCE:
                    if is_first and not request:
                        request = self._make_key()  # known before a signal handler can run
                        self._publish(request, departure)
                    self.answer()
                if departure.group in self._differences:
                    raise RuntimeError(self._differences[departure.group])
                if seconds > limit:
                    raise RuntimeError(
                        f"Timed out after {seconds:.0f} s: {count} of {size} ranks of process "
                        f"group '{departure.group}' are about to issue this collective, "
                        f"{size - count} are not. A rank may have skipped a batch or an evaluation"
                    )
                shortest, longest = _SLEEP
                time.sleep(min(longest, max(shortest, 0.1 * seconds)))
        finally:
            if request:
                with contextlib.suppress(RuntimeError):  # the store has ended
                    self._close(request, departure)

    def _decide(self, store: dist.Store, key: str) -> bool:
        """Returns whether the ranks issue the collective. Precondition: all are counted."""
        return store.compare_set(f"{key}/decision", "", _ISSUE).decode() == _ISSUE

    def _close(self, request: str, departure: Departure) -> None:
        """Closes a request, unless a rank has published a difference: all ranks must read it."""
        text = self._store.compare_set(f"{request}/difference", "", _CLOSED).decode()
        if text == _CLOSED:
            self._store.set(request, _CLOSED)  # releases the memory
        else:
            self._stop(departure, text)

    def _make_key(self) -> str:
        return f"{_REQUESTS}/{self._store.add(_REQUESTS, 1)}"

    def _publish(self, key: str, departure: Departure) -> None:
        self._store.set(key, json.dumps(asdict(departure)))

    def publish(self, departure: Departure) -> None:
        """Publishes a request of this rank, which remains open."""
        self._publish(self._make_key(), departure)

    def has_open_requests(self) -> bool:
        """Whether a difference may exist that no rank has described yet."""
        return bool(self._open_requests or self._unset_requests)

    def answer(self) -> None:
        """Answers requests of other ranks. Stops the process groups whose ranks differ."""
        with self._lock:
            self._read_requests()
            for number, departure in list(self._open_requests.items()):
                text = self._find_difference(number, departure)
                if text:
                    self._open_requests.pop(number, None)  # a signal handler may have answered
                if text and text != _CLOSED:
                    self._stop(departure, text)

    def _read_requests(self) -> None:
        newest, now = read_count(self._store, _REQUESTS), time.monotonic()
        for number in range(self._newest_read + 1, newest + 1):
            self._unset_requests[number] = now + _UNSET_LIMIT
        self._newest_read = newest
        for number, give_up in list(self._unset_requests.items()):
            key = f"{_REQUESTS}/{number}"
            if self._store.check([key]):
                text = self._store.get(key).decode()
                departure = Departure(**json.loads(text)) if text != _CLOSED else None
                if departure is not None and self._rank in departure.ranks:
                    self._open_requests[number] = departure
            elif now < give_up:
                continue
            self._unset_requests.pop(number, None)  # a signal handler may have read it

    def _find_difference(self, number: int, departure: Departure) -> str:
        """Returns the published difference, or finds and publishes it.

        Returns "" without one, and ``_CLOSED`` if the request is closed.
        """
        key = f"{_REQUESTS}/{number}/difference"
        if self._store.check([key]):
            return str(self._store.get(key).decode())
        own = self._get_own(departure)
        if own is None:
            return ""
        rank = departure.ranks.index(self._rank)
        sides = sorted([(rank, *own), (departure.rank, *departure.latest)])
        difference = _C.collective_difference(*sides)
        remedy = _REMEDY_AFTER_ISSUE if departure.was_issued else _REMEDY
        text = f"{difference} (process group '{departure.group}'). {remedy}"
        return str(self._store.compare_set(key, "", text).decode())

    def _get_own(self, departure: Departure) -> Entries | None:
        """Returns this rank's latest collectives if its own with that number differs."""
        own = self._own_departures.get(departure.group)
        if own is not None and own.number == departure.number and not departure.was_issued:
            return own.latest if own.signature != departure.signature else None
        with contextlib.suppress(RuntimeError, ValueError):  # the process group has ended
            if _get_signature(departure) not in (0, departure.signature):
                return (
                    _C.checksum_entries(departure.group, departure.number)
                    if departure.has_checksums
                    else _C.collective_entries(departure.group)
                )
        return None

    def _stop(self, departure: Departure, text: str) -> None:
        if departure.was_issued and departure.group not in self._logged:
            self._logged.add(departure.group)
            _logger.error("fsdp_c: %s", text)  # a host that waits for the device raises later
        if departure.group in self._own_departures:
            self._differences[departure.group] = text
        with contextlib.suppress(RuntimeError, ValueError):  # the process group has ended
            _C.stop_collectives(departure.group, text)


def hash_labels(labels: list[int]) -> int:
    """Returns a hash of the labels, 0 if one of them is unknown."""
    if 0 in labels:
        return 0
    data = b"".join(label.to_bytes(8, "little") for label in labels)
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def _get_signature(departure: Departure) -> int:
    """Returns this rank's value of ``departure.signature``; 0: unknown."""
    if departure.has_checksums:
        return dict(_C.checksum_intervals(departure.group)).get(departure.number, 0)
    count = departure.label_count
    if not count:
        return _C.collective_signature(departure.group, departure.number)
    first, labels = _C.collective_labels(departure.group, departure.number)
    is_known = first == departure.number and len(labels) >= count
    return hash_labels(labels[:count]) if is_known else 0


_departures: list[Departures] = []


def get_departures() -> Departures:
    """Returns the departures of the current job."""
    if not _departures or not _departures[0].is_current():
        _departures[:] = [Departures()]
    return _departures[0]


def wait_for_departures(
    group: str, number: int, signature: int, entry: bytes
) -> BaseException | None:
    """Waits until all ranks of the process group ``group`` depart with the same collective.

    csrc/python/sequence.c calls it before a collective that differs from the prediction.
    ``number`` and ``signature`` are those of the collective; ``entry`` describes it. Returns an
    exception that the caller must raise, although all ranks issue the collective.

    Raises:
        RuntimeError: see :meth:`Departures.depart`.
    """
    try:
        process_group = _resolve_process_group(group)  # type: ignore[arg-type]
    except RuntimeError:
        return None  # destroy_process_group() has ended the store, and the group still works
    departure = make_departure(process_group, number, signature, entry)
    return get_departures().depart(departure, process_group)
