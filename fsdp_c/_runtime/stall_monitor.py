"""The thread that reports long and failed waits for other ranks, and answers departing ranks.

Every process of a job has one such thread, from the first lazy init of a root on. Once per
``INTERVAL`` the thread reads the recorder (``records.py``). If there is no new collective, it also
reads one counter in the job's store:

- A rank that waits adds 1 to the counter shortly before the limit: a request.
- Every rank without a new collective answers a request: it publishes its position under one key,
  and writes its records to a file.
- At the limit, the first waiting rank formats a report and publishes it. Every waiting rank logs
  the report. The next limit is twice as long.
- If an exception ends a wait, the first rank that fails in the collective makes a request at its
  next check, and formats the report. Every rank that fails in it logs the report.

The thread also answers the requests of departing ranks (``departures.py``) and compares collectives
of NCCL (``label_comparison.py``). If ranks differ, it stops the collectives of their process group.
Otherwise it does not change training.

The thread ends with the default process group, not with the last root. A rank that has freed its
model after an exception therefore still answers the other ranks. If the process with the store
ends, the thread logs the first long or failed wait, without the other ranks.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_group, _get_default_store

from . import label_comparison, roots
from .departures import PATIENCE, get_departures, read_count
from .records import (
    COMPLETE,
    Record,
    make_path,
    read_own_records,
    write_on_signals,
    write_own_records,
)
from .roots import find_interrupted_pass
from .stall_report import (
    Position,
    can_answer,
    describe_wait,
    find_failure,
    format_report,
    make_position,
    measure_wait,
)

logger = logging.getLogger("torch.distributed.fsdp.fully_shard")

DEFAULT_LIMIT = 10.0
INTERVAL = 0.5
"""Seconds between two checks of a process in which no thread waits."""
WAIT_INTERVAL = 0.2
"""Seconds between two checks of a process that waits."""
ANSWER_TIME = 0.5
"""Seconds for which a report waits for answers to a request that was made before the limit."""
EXIT_LIMIT = 0.9
"""Seconds for which a process that ends waits for the report of another rank."""
FIRST_POLL_PAUSE = 0.05
"""Seconds between the first two readings of the store while a rank waits for answers or a report.
Later pauses are longer, up to WAIT_INTERVAL."""
REQUEST_READ_INTERVAL = 0.8
"""Longest time between two readings of the requests of departing ranks, while a thread waits."""
REQUEST_LEAD = 2.5
"""Seconds before a report at which the other ranks are requested to publish their positions."""
READ_COUNT = 256
"""Number of the newest records that the thread reads. It also reads all that a thread waits for."""

NEWEST_COUNT = 4
"""Number of the newest records that decide whether a process that ends writes its file."""

_PREFIX = "fsdp_c/stall"
_REQUESTS = f"{_PREFIX}/requests"
_PUBLISHED = f"{_PREFIX}/published"
"""The ranks that have published a position, in a store that has ``append``."""

BACKENDS_WITHOUT_WAITS = ("fake", "threaded")
"""Backends of tests: a group without other ranks, and ranks that are threads of one process."""

_start_lock = threading.RLock()  # held while a thread is started; a signal handler may run a model
_monitor: list[StallMonitor] = []


def get_limit() -> float:
    """Returns the wait in seconds after which a report is made; 0: none.

    Raises:
        ValueError: ``FSDP_C_STALL_SECONDS`` is not a number of at least 0.
    """
    text = os.environ.get("FSDP_C_STALL_SECONDS", "")
    try:
        limit = float(text) if text else DEFAULT_LIMIT
    except ValueError:
        limit = -1
    if not limit >= 0:
        raise ValueError(f"FSDP_C_STALL_SECONDS must be a number of at least 0, got {text}")
    return limit


def watch(root: Any) -> None:
    """Starts the thread, if the job has several ranks. ``root``: the state of a root."""
    limit = get_limit() or math.inf
    roots.add(root)
    if not dist.is_initialized() or dist.get_world_size() < 2:
        return
    if dist.get_backend() in BACKENDS_WITHOUT_WAITS:
        return
    with _start_lock:
        if not (_monitor and _monitor[0].is_watching()):
            stop()
            monitor = StallMonitor(limit)
            _monitor.append(monitor)
            write_on_signals(monitor.path, dist.get_rank(), dist.get_world_size())
            monitor.publish_start()
            monitor.start()
            atexit.register(stop)


def stop() -> None:
    """Stops the thread. At exit, an unfinished step or an exception leaves a file."""
    while _monitor:
        monitor = _monitor.pop()
        monitor.finish()
        atexit.unregister(stop)


def has_uncaught_exception() -> bool:
    """Whether an exception ends the program, or has ended a command of an interactive session.

    The interpreter sets ``sys.last_type`` before it calls ``sys.excepthook`` and functions of
    ``atexit``. It does not set it for ``SystemExit`` and for exceptions of other threads.
    """
    return getattr(sys, "last_type", None) is not None


class StallMonitor(threading.Thread):
    """Watches the waits of this process; see the module's docstring."""

    def __init__(self, limit: float) -> None:
        super().__init__(name="fsdp_c stall monitor", daemon=True)
        self._limit = limit
        self._interval = min(INTERVAL, limit / 5)
        self._group = weakref.ref(_get_default_group())
        self._store = _get_default_store()
        self._has_extended_api = self._store.has_extended_api()  # type: ignore[attr-defined]
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._pid = os.getpid()
        self._stopped = False
        self._woken = threading.Event()
        self._answered = -1  # number of the latest request that this rank has answered
        self._requested_for = (0, 0.0)  # wait and limit of this rank's latest request
        self._next_limit = limit
        self._newest = 0  # number of the newest record at the last check
        self._last_failed = 0
        self._has_logged_store_error = False
        self._compared = 0.0  # time of the last comparison of collectives
        self._read_at = 0.0  # time of the last reading of requests of departing ranks
        self._store_error = ""  # the error of the first call after the process with the store ended
        try:
            get_departures()  # counts the requests of earlier jobs before this job's first request
        except RuntimeError as error:
            self._store_error = str(error).partition("\n")[0]
        self.path = make_path(self._rank)
        self._file = ""  # path of the latest file, or the reason why there is none

    def is_watching(self) -> bool:
        return self.is_alive() and self._is_current()

    def _is_current(self) -> bool:
        return dist.is_initialized() and self._group() is dist.group.WORLD

    def wake(self) -> None:
        if os.getpid() == self._pid:  # in a forked child, the lock of the event may be held forever
            self._woken.set()

    def finish(self) -> None:
        """Stops the thread. No thread inside of C++ may wait for the GIL when the process ends."""
        if os.getpid() != self._pid:  # a forked child has neither the thread nor the collectives
            return
        self._stopped = True
        self.wake()
        if self.is_alive() and threading.current_thread() is not self:
            self.join(1.0)
        _, records = read_own_records(READ_COUNT)
        # Of older collectives that did not complete, the program has caught the exception.
        unfinished = any(record.state != COMPLETE for record in records[:NEWEST_COUNT])
        if unfinished or find_interrupted_pass() or has_uncaught_exception():
            self._write_records()

    def publish_start(self) -> None:
        """Publishes host and process before the first collective: the rank may end in it.

        Does not read the frames of the main thread, which calls this method. The frame of this
        method would refer to itself, and keep the model until a garbage collection.
        """
        with contextlib.suppress(RuntimeError):  # the store has ended; the next check finds this
            self._store.set(f"{_PREFIX}/{self._rank}", Position(self._rank).to_json())
            if self._has_extended_api:
                self._store.append(_PUBLISHED, f"{self._rank} ")  # type: ignore[attr-defined]

    def run(self) -> None:
        while True:
            self._woken.clear()  # before the conditions, so that no later wake-up is lost
            if self._stopped or not self._is_current():
                break
            waits = self._run_check(self._check)
            self._woken.wait(min(WAIT_INTERVAL, self._interval) if waits else self._interval)
        self._run_check(self._check_end)

    def _run_check(self, check: Callable[[], Any]) -> Any:
        """Returns the result of a check. Without the store, logs the first long or failed wait."""
        least_seconds = self._limit if self._store_error else 0.0
        if not self._store_error:
            try:
                return check()
            except RuntimeError as error:
                self._store_error = str(error).partition("\n")[0]
            except ValueError:
                if self._is_current():
                    raise
                return False  # the process group was destroyed during the check
        self._report_lost_store(least_seconds)
        return False

    def _report_lost_store(self, least_seconds: float) -> None:
        """Logs, once, that no report will come, if this rank has waited that long or has failed."""
        now, records = read_own_records(READ_COUNT)
        (record, seconds), failure = measure_wait(now, records), find_failure(records)
        if seconds < least_seconds:
            record = None
        if record is None and failure is not None and failure.number > self._last_failed:
            record = failure
        if record is not None and not self._has_logged_store_error:
            self._has_logged_store_error = True
            logger.warning(
                "fsdp_c: rank %d waits, or failed, in %s, and cannot read where the other ranks "
                "are: the process with the store of the job has ended (%s)\n  records: %s",
                self._rank, describe_wait(record), self._store_error, self._write_records(),
            )  # fmt: skip

    def _check(self) -> bool:
        """Answers requests, reports a long wait. Returns whether a thread waits."""
        now, records = read_own_records(READ_COUNT)
        wait, seconds = measure_wait(now, records)
        self._compare(seconds)
        get_departures().repeat_stops()
        newest = records[0].number if records else 0
        is_progressing = newest != self._newest and seconds < self._interval
        self._newest = newest
        self._report_new_failure(now, records)
        if is_progressing and self._answered >= 0:
            return False
        if wait is not None:
            self._request_if_due(wait, seconds)
        request = read_count(self._store, _REQUESTS)
        if request != self._answered:
            self._publish(request, now, records)
        if wait is not None and seconds >= self._next_limit:
            self._next_limit *= 2
            self._report(wait, seconds, request)
        return wait is not None

    def _compare(self, seconds: float) -> None:
        """Answers ranks whose collective differs. Compares collectives of NCCL process groups."""
        now = time.monotonic()
        if label_comparison.is_due(now - self._compared):
            self._compared = now
            label_comparison.compare()
            return
        pause = min(REQUEST_READ_INTERVAL, max(WAIT_INTERVAL / 2, seconds / 4))
        if seconds >= PATIENCE and now - self._read_at >= pause:
            self._read_at = now
            get_departures().answer_requests()

    def _check_end(self) -> None:
        """Reports a failure, and publishes whether an exception ends the process within a pass."""
        now, records = read_own_records(READ_COUNT)
        self._report_new_failure(now, records)
        if find_interrupted_pass():
            self._publish(read_count(self._store, _REQUESTS), now, records)

    def _request_if_due(self, wait: Record, seconds: float) -> None:
        if wait.number != self._requested_for[0]:
            self._next_limit = self._limit
        due = (wait.number, self._next_limit)
        lead = min(REQUEST_LEAD, self._limit / 2)
        if seconds >= self._next_limit - lead and self._requested_for != due:
            self._requested_for = due
            self._store.add(_REQUESTS, 1)

    def _publish(self, request: int, now: int, records: list[Record]) -> None:
        position = make_position(self._rank, request, now, records)
        position.interrupted_pass = find_interrupted_pass()
        self._store.set(f"{_PREFIX}/{self._rank}", position.to_json())
        if request > 0:
            self._file = self._write_records()
        self._answered = request

    def _report(self, wait: Record, seconds: float, request: int) -> None:
        key = f"{_PREFIX}/report/{request}/{self._next_limit:g}"
        is_writer = self._store.add(f"{key}/writers", 1) == 1
        report = self._share_report(key, is_writer, request, ANSWER_TIME)
        logger.warning(
            "fsdp_c: rank %d has waited %.1f s for %s. The ranks of the job:\n%s\n  records: %s",
            self._rank, seconds, describe_wait(wait), report, self._file,
        )  # fmt: skip

    def _report_new_failure(self, now: int, records: list[Record]) -> None:
        failure = find_failure(records)
        if failure is None or failure.number <= self._last_failed:
            return
        self._file = self._write_records()
        # The text of a later failure may be equal. Ranks that fail together have equal numbers.
        key = f"{_PREFIX}/report/{describe_wait(failure)}/{failure.number}"
        is_writer = self._store.add(f"{key}/writers", 1) == 1
        request = self._store.add(_REQUESTS, int(is_writer))
        self._publish(request, now, records)
        # The request is new, so ranks may answer only at their next check.
        report = self._share_report(key, is_writer, request, INTERVAL + ANSWER_TIME)
        logger.warning(
            "fsdp_c: rank %d left the wait for %s by an exception. The ranks of the job:\n%s\n"
            "  records: %s", self._rank, describe_wait(failure), report, self._file,
        )  # fmt: skip
        self._last_failed = failure.number

    def _share_report(self, key: str, is_writer: bool, request: int, seconds: float) -> str:
        """Returns a report that one rank writes: only this rank reads the positions of all ranks.

        If that rank does not write the report, one of the others does.
        """
        for _ in range(2):
            if is_writer:
                return self._write_report(key, request, seconds)
            if self._poll(lambda: self._store.check([key]), seconds + 1.5, EXIT_LIMIT):
                return str(self._store.get(key).decode())
            if self._stopped:
                break
            is_writer = self._store.add(f"{key}/substitutes", 1) == 1
        return "  another rank logs the report"

    def _write_report(self, key: str, request: int, seconds: float) -> str:
        """Waits for answers, for at most ``seconds``, and shares the report."""
        self._poll(lambda: self._have_all_answered(request), seconds, ANSWER_TIME)
        # Read again: a rank may have published and ended in the meantime.
        report = format_report(self._read_positions(), self._world, request)
        self._store.set(key, report)
        return report

    def _have_all_answered(self, request: int) -> bool:
        """Whether all ranks that can answer have answered."""
        positions = self._read_positions()
        late = [p for p in positions.values() if p.request < request and can_answer(p)]
        return len(positions) == self._world and not late

    def _poll(self, condition: Callable[[], bool], seconds: float, at_exit: float) -> bool:
        """Returns False after ``seconds``, or after ``at_exit`` seconds if the process ends."""
        begin, pause = time.monotonic(), FIRST_POLL_PAUSE
        while not condition():
            left = (min(seconds, at_exit) if self._stopped else seconds) + begin - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(pause, left))
            pause = min(2 * pause, WAIT_INTERVAL)
            if not self._stopped:  # ranks that depart do not wait for the end of a report
                self._compare(measure_wait(*read_own_records(READ_COUNT))[1])
        return True

    def _read_positions(self) -> dict[int, Position]:
        if self._has_extended_api:  # the number of messages does not depend on the number of ranks
            published = self._store.get(_PUBLISHED).decode()
            ranks = sorted({int(rank) for rank in published.split()})
            texts = self._store.multi_get([f"{_PREFIX}/{rank}" for rank in ranks])
        else:
            keys = [f"{_PREFIX}/{rank}" for rank in range(self._world)]
            texts = [self._store.get(key) for key in keys if self._store.check([key])]
        positions = map(Position.from_json, texts)
        return {position.rank: position for position in positions}

    def _write_records(self) -> str:
        """Writes the file. Returns its path, or the error."""
        try:
            write_own_records(self.path, self._rank, self._world)
        except OSError as error:
            return f"not written ({error})"
        return self.path
