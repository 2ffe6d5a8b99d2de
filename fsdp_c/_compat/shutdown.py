"""Exit handler that waits for threads of torch before the interpreter ends.

gloo's threads, and autograd's on devices with streams, take the GIL to release Python objects.
Before Python 3.14 a thread that waits for the GIL while the interpreter ends aborts the process:
SIGABRT, "terminate called without an active exception". A successful job would count as failed.
This file imports only the standard library, because the tests' ranks run it without fsdp_c.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable

MIN_WAIT, MAX_WAIT, PAUSE = 0.05, 1.0, 0.01
"""Limits of the wait for other threads, and the pause between two checks, in seconds."""

THREADS = "/proc/self/task"


def _is_running(thread: str) -> bool:
    """Whether the thread runs, is runnable, or sleeps without interruption (state D)."""
    try:
        with open(f"{THREADS}/{thread}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "RD"
    except OSError:  # the thread has ended
        return False


def _has_running_threads() -> bool:
    own_thread = str(threading.get_native_id())
    try:
        return any(thread != own_thread and _is_running(thread) for thread in os.listdir(THREADS))
    except OSError:  # not Linux
        return False


def wait_for_threads() -> None:
    """Waits 50 ms, and on Linux until no other thread runs, but at most one second.

    Threads that wait for the GIL get it during the pauses. A thread that will need the GIL later is
    still running or runnable. Two consecutive checks must find no such thread: a thread that starts
    to wait for the GIL during a check sleeps, because the check holds the GIL.
    """
    begin = time.monotonic()
    idle_checks = 0
    while True:
        time.sleep(PAUSE)
        elapsed = time.monotonic() - begin
        idle_checks = 0 if _has_running_threads() else idle_checks + 1
        if elapsed >= MAX_WAIT or (elapsed >= MIN_WAIT and idle_checks >= 2):
            return


def register_at_exit() -> Callable[[], bool]:
    """Makes the interpreter call :func:`wait_for_threads` at its end. Returns the undo."""
    atexit.register(wait_for_threads)

    def undo() -> bool:
        atexit.unregister(wait_for_threads)
        return True

    return undo
