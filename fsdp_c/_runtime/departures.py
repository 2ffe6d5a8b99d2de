"""Ranks whose next collective over gloo is not the predicted one.

Ranks predict each collective from the earlier ones (``csrc/transport/sequence.h``). A rank whose
collective differs from the prediction departs: it waits before it issues the collective. Either all
ranks depart with the same collective, as at the first evaluation, or their programs differ. Ranks
that follow the prediction have already issued the predicted collective, so the departing ranks
cannot compare theirs through another collective. The ranks use stores:

- Each departing rank increments a counter in the store of the process group. The key of the counter
  has the number and the signature of the collective. When the counter equals the number of ranks,
  the ranks issue the collective.
- If an exception interrupts the wait, the rank sets ``<key>/decision`` with ``compare_set``, unless
  another rank has set it. The rank that sets the key decrements the counter. If the value is
  "issue", the interrupted rank must still issue the collective.
- After ``PATIENCE`` the first departing ranks publish their collective, as a request, in the job's
  default store. Every rank whose thread waits reads the requests (``stall_monitor.py``). If its own
  collective with that number has another signature, the rank publishes the difference.
- Every rank that reads the difference stops the collectives of the process group: waits and later
  collectives raise the same text.

Ranks also read requests to stop a process group, because ranks of another one differ
(``other_groups.py``).
"""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
import weakref
from dataclasses import asdict

import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    _get_default_group,
    _get_default_store,
    _get_process_group_store,
    _resolve_process_group,
)

from .. import _C
from .comparison_requests import ComparisonRequest, Entries, find_issued_entries, make_request
from .plan_store import get_timeout

_logger = logging.getLogger("torch.distributed.fsdp.fully_shard")

PATIENCE = 0.1
"""Seconds that a departing rank waits for the other ranks before it publishes a request."""

MAX_REQUESTING_RANKS = 2
"""Number of departing ranks that publish requests. If one ends, the other remains."""

_REQUESTS = "fsdp_c/departures/requests"
_CLOSED = "closed"
"""Value of a request after the end of the wait. The key remains, because ``get`` of a deleted key
blocks."""
_WRITE_TIMEOUT = 5.0
"""Seconds after which a rank that has not completed its write is assumed to have ended."""
_ISSUE = "issue"
"""Decision of the ranks that are about to issue a collective: no rank can leave any more."""
_REPEAT_SECONDS = (0.3, 1.0, 3.0, 10.0, 30.0)
"""Times after a stop request at which it is published again."""
_POLL_INTERVALS = (0.0005, 0.05)
"""The shortest and the longest time between two reads of a store, in seconds."""
_REMEDY = (
    "Some ranks have issued their collective and wait for it, so the process group cannot be used "
    "any more: restart the ranks, or shard the model over a new process group"
)
_REMEDY_AFTER_ISSUE = (
    "All later gradients may be wrong, and the process group cannot be used any more: restart the "
    "ranks from a checkpoint"
)


def read_count(store: dist.Store, key: str) -> int:
    """Returns the value of a counter. Sets a missing counter to 0.

    ``add(key, 0)`` would make the file of a FileStore longer.
    """
    return int(store.compare_set(key, "", "0"))


class Departures:
    """This process's own departures, and the open requests of all ranks."""

    def __init__(self) -> None:
        self._default_group = weakref.ref(_get_default_group())
        self._store = _get_default_store()
        self._rank = dist.get_rank()
        self._lock = threading.RLock()  # a thread departs while the stall monitor answers
        self._own_departures: dict[str, ComparisonRequest] = {}  # by process group
        self._differences: dict[str, str] = {}  # of own departures, by process group
        # Requests up to this number are ignored: an earlier job with the same store has made them.
        self._newest_read = read_count(self._store, _REQUESTS)
        self._unset_requests: dict[int, float] = {}  # number -> end of the wait for the key
        # By number. Not closed, and without a published difference.
        self._open_requests: dict[int, ComparisonRequest] = {}
        self._logged: set[str] = set()  # process groups whose difference was logged
        self._stop_requests: list[ComparisonRequest] = []  # of this rank
        self._repeat_at: list[float] = []  # times at which they are published again

    def is_current(self) -> bool:
        return self._default_group() is dist.group.WORLD

    def depart(
        self, departure: ComparisonRequest, group: dist.ProcessGroup
    ) -> BaseException | None:
        """Waits until all ranks of the process group depart with the same collective.

        Returns None if this rank may issue the collective now. Otherwise returns the exception, for
        example of a signal handler, that interrupted this rank. The other ranks issue the
        collective. The caller raises the exception, and this rank's next collective must be the
        same one.

        Raises:
            RuntimeError: another rank issues another collective, or does not depart within the
                time limit of the process group.
        """
        store, size = _get_process_group_store(group), group.size()
        key = f"fsdp_c/departures/{departure.number}/{departure.signature:x}"
        # Not None: this call is in a signal handler that interrupted another depart().
        outer = self._own_departures.get(departure.group)
        is_agreed = False
        try:
            try:
                self._own_departures[departure.group] = departure
                may_request = store.add(key, 1) <= MAX_REQUESTING_RANKS
                self._wait(departure, store, key, group, may_request)
                is_agreed = True
                self._delete_when_all_have_read(store, key, size)
            finally:
                if outer is None:
                    del self._own_departures[departure.group]
                else:
                    self._own_departures[departure.group] = outer
                self._differences.pop(departure.group, None)
        except BaseException as error:  # also of a signal handler: the rank may depart again
            if is_agreed:
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
        end = time.monotonic() + _WRITE_TIMEOUT
        with contextlib.suppress(RuntimeError):  # the store has ended
            while (decision := store.compare_set(f"{key}/decision", "", own).decode()) != own:
                if decision == _ISSUE:
                    return False
                if time.monotonic() > end:
                    break  # the rank that leaves has ended
                time.sleep(_POLL_INTERVALS[0])  # another rank leaves
            store.add(key, -1)
            store.delete_key(f"{key}/decision")
        return True

    def _wait(
        self,
        departure: ComparisonRequest,
        store: dist.Store,
        key: str,
        group: dist.ProcessGroup,
        may_request: bool,
    ) -> None:
        """Waits until ``key`` counts all ranks. ``may_request``: publishes a request, too."""
        size, limit = group.size(), get_timeout(group, "cpu").total_seconds()
        begin = time.monotonic()
        request = ""
        try:
            while (count := read_count(store, key)) < size or not self._decide(store, key):
                seconds = time.monotonic() - begin
                if seconds > PATIENCE:
                    if may_request and not request:
                        # Stored first: if a signal handler raises in _publish, `finally` closes it.
                        request = self._make_key()
                        self._publish(request, departure)
                    self.answer_requests()
                if departure.group in self._differences:
                    raise RuntimeError(self._differences[departure.group])
                if seconds > limit:
                    raise RuntimeError(
                        f"Timed out after {seconds:.0f} s: {count} of {size} ranks of process "
                        f"group '{departure.group}' are about to issue this collective, "
                        f"{size - count} are not. A rank may have skipped a batch or an "
                        "evaluation: run the same collectives on all ranks"
                    )
                shortest, longest = _POLL_INTERVALS
                time.sleep(min(longest, max(shortest, 0.1 * seconds)))
        finally:
            if request:
                with contextlib.suppress(RuntimeError):  # the store has ended
                    self._close(request, departure)

    def _decide(self, store: dist.Store, key: str) -> bool:
        """Returns whether the ranks issue the collective. Precondition: all are counted."""
        return store.compare_set(f"{key}/decision", "", _ISSUE).decode() == _ISSUE

    def _close(self, key: str, departure: ComparisonRequest) -> None:
        """Closes a request, unless a rank has published a difference: all ranks must read it."""
        text = self._store.compare_set(f"{key}/difference", "", _CLOSED).decode()
        if text == _CLOSED:
            self._store.set(key, _CLOSED)  # releases the memory
        else:
            self._stop(departure, text)

    def _make_key(self) -> str:
        return f"{_REQUESTS}/{self._store.add(_REQUESTS, 1)}"

    def _publish(self, key: str, request: ComparisonRequest) -> None:
        self._store.set(key, json.dumps(asdict(request)))

    def publish(self, request: ComparisonRequest) -> str:
        """Publishes a request of this rank, and returns its key.

        The request is never closed: all ranks must read its result.
        """
        key = self._make_key()
        self._publish(key, request)
        return key

    def stop(self, request: ComparisonRequest) -> None:
        """Publishes a stop request (``make_stop_request``), and stops this rank's collectives."""
        self._stop(request, request.difference)
        self.publish(request)
        with self._lock:
            self._stop_requests.append(request)
            self._repeat_at = [time.monotonic() + seconds for seconds in _REPEAT_SECONDS]

    def repeat_stops(self) -> None:
        """Publishes the stop requests again if it is time.

        A rank does not read requests that were published before its own first forward.
        """
        with self._lock:
            if self._repeat_at and time.monotonic() >= self._repeat_at[0]:
                del self._repeat_at[0]
                for request in self._stop_requests:
                    self.publish(request)

    def is_open(self, key: str) -> bool:
        """Whether the request has no published difference."""
        return not self._store.check([f"{key}/difference"])

    def has_open_requests(self) -> bool:
        """Whether this rank has read, or waits for, a request without a published difference."""
        return bool(self._open_requests or self._unset_requests)

    def answer_requests(self) -> None:
        """Compares the open requests with this rank's collectives.

        Stops the process groups whose ranks differ.
        """
        with self._lock:
            self._read_requests()
            for number, request in list(self._open_requests.items()):
                text = self._find_difference(number, request)
                if text:
                    self._open_requests.pop(number, None)  # a signal handler may have answered
                if text and text != _CLOSED:
                    self._stop(request, text)

    def _read_requests(self) -> None:
        newest, now = read_count(self._store, _REQUESTS), time.monotonic()
        for number in range(self._newest_read + 1, newest + 1):
            self._unset_requests[number] = now + _WRITE_TIMEOUT
        self._newest_read = newest
        for number, deadline in list(self._unset_requests.items()):
            key = f"{_REQUESTS}/{number}"
            if self._store.check([key]):
                text = self._store.get(key).decode()
                request = ComparisonRequest(**json.loads(text)) if text != _CLOSED else None
                if request is not None and self._rank in request.ranks:
                    self._open_requests[number] = request
            elif now < deadline:
                continue
            self._unset_requests.pop(number, None)  # a signal handler may have read it

    def _find_difference(self, number: int, request: ComparisonRequest) -> str:
        """Returns the published difference, or finds and publishes it.

        Returns "" without one, and ``_CLOSED`` if the request is closed.
        """
        if request.difference:
            return request.difference
        key = f"{_REQUESTS}/{number}/difference"
        if self._store.check([key]):
            return str(self._store.get(key).decode())
        own = self._find_own_entries(request)
        if own is None:
            return ""
        rank = request.ranks.index(self._rank)
        first, second = sorted([(rank, *own), (request.rank, *request.latest)])
        difference = _C.collective_difference(first, second, request.was_issued)
        remedy = _REMEDY_AFTER_ISSUE if request.was_issued else _REMEDY
        text = f"{difference} (process group '{request.group}'). {remedy}"
        return str(self._store.compare_set(key, "", text).decode())

    def _find_own_entries(self, request: ComparisonRequest) -> Entries | None:
        """Returns this rank's latest collectives if its own with that number differs."""
        own = self._own_departures.get(request.group)
        if own is not None and own.number == request.number and not request.was_issued:
            return own.latest if own.signature != request.signature else None
        return find_issued_entries(request)

    def _stop(self, request: ComparisonRequest, text: str) -> None:
        if request.was_issued and request.group not in self._logged:
            self._logged.add(request.group)
            # Logged now: the exception is raised only when the host next waits for a collective.
            _logger.error("fsdp_c: %s", text)
        if request.group in self._own_departures:
            self._differences[request.group] = text
        with contextlib.suppress(RuntimeError, ValueError):  # the process group has ended
            _C.stop_collectives(request.group, text)


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
    ``number`` and ``signature`` are those of the collective; ``entry`` is its ``op_entry``. Returns
    None, or the exception that interrupted this rank, as :meth:`Departures.depart`.

    Raises:
        RuntimeError: see :meth:`Departures.depart`.
    """
    try:
        process_group = _resolve_process_group(group)  # type: ignore[arg-type]
    except RuntimeError:
        return None  # destroy_process_group() was called, and a reference to the group still works
    departure = make_request(process_group, number, signature, entry)
    return get_departures().depart(departure, process_group)
