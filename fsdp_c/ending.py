"""The end of the interpreter, which not every thread of torch's survives.

gloo's threads, and on devices with streams autograd's, take the GIL to drop what Python has seen.
Before Python 3.14 one that waits for it while the interpreter ends takes the process down (SIGABRT,
"terminate called without an active exception"): a job that had ended well would count as failed.
This file needs nothing but the standard library: the tests' own ranks run it, too.
"""

from __future__ import annotations

import atexit
import functools
import os
import threading
import time

LEAST, MOST, PAUSE = 0.05, 1.0, 0.01
"""How long to wait for other threads, and between two looks at them, in seconds."""

THREADS = "/proc/self/task"


def _runs(thread: str) -> bool:
    """Whether it has something to do, be it only in a queue for a processor."""
    try:
        with open(f"{THREADS}/{thread}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in "RD"
    except OSError:  # it has ended
        return False


def _others_run() -> bool:
    own = str(threading.get_native_id())
    try:
        return any(thread != own and _runs(thread) for thread in os.listdir(THREADS))
    except OSError:  # no Linux
        return False


def wait_for_threads() -> None:
    """Waits 50 ms, and on Linux until no other thread runs, but no longer than a second.

    Who waits for the GIL gets it meanwhile. Who would want it later is still at work, however few
    processors there are for how many processes. Two looks in a row must find nobody: who begins to
    wait for the GIL during a look, which has it, seems to sleep.
    """
    begin = time.monotonic()
    quiet = 0
    while True:
        time.sleep(PAUSE)
        waited = time.monotonic() - begin
        quiet = 0 if _others_run() else quiet + 1
        if waited >= MOST or (waited >= LEAST and quiet >= 2):
            return


@functools.cache
def linger_at_exit() -> None:
    """Has the interpreter wait for threads when it ends."""
    atexit.register(wait_for_threads)
