"""Threads as ranks that share a virtual clock and a store, for tests with a thousand ranks.

One thread runs at a time. A thread gives way only in ``Clock.wait`` and in calls of the store. If
all threads wait, the clock advances to the end of the first wait. So a run is deterministic.
"""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from collections.abc import Callable

STACK_BYTES = 1 << 18
LATENCY = 2e-4
"""Seconds from a message of a rank to the answer, beside the time in the server."""
SERVER_TIME = 2e-5
"""Seconds of the server for each key of a message. The server handles one message at a time."""


class Clock:
    """The virtual clock, and the threads that wait."""

    def __init__(self) -> None:
        self.now = 0.0
        self._waiting: list[tuple[float, int, threading.Semaphore]] = []
        self._count = 0
        self._main = threading.Semaphore(0)
        self.errors: list[BaseException] = []

    def wait(self, seconds: float) -> None:
        woken = threading.Semaphore(0)
        self._push(self.now + seconds, woken)
        self._wake_next()
        woken.acquire()

    def run(self, functions: list[Callable[[], None]]) -> None:
        """Runs each function in a thread until all have returned."""
        size = threading.stack_size(STACK_BYTES)
        threads = []
        for function in functions:
            start = threading.Semaphore(0)
            self._push(self.now, start)
            thread = threading.Thread(target=self._run, args=(function, start), daemon=True)
            threads.append(thread)
            thread.start()
        threading.stack_size(size)
        self._wake_next()
        self._main.acquire()
        for thread in threads:
            thread.join()
        for error in self.errors:
            raise error

    def _run(self, function: Callable[[], None], start: threading.Semaphore) -> None:
        start.acquire()
        try:
            function()
        except BaseException as error:
            self.errors.append(error)
        self._wake_next()

    def _push(self, at: float, woken: threading.Semaphore) -> None:
        self._count += 1  # threads with equal times run in the order of their calls
        heapq.heappush(self._waiting, (at, self._count, woken))

    def _wake_next(self) -> None:
        if not self._waiting:
            self._main.release()
            return
        at, _, woken = heapq.heappop(self._waiting)
        self.now = max(self.now, at)
        woken.release()


class Server:
    """The data of the store, and the time at which the server has handled all messages."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.values: dict[str, bytes] = {}
        self.free_at = 0.0


class Store:
    """The part of torch's TCPStore that the stall monitor uses, for one rank."""

    def __init__(self, server: Server) -> None:
        self.server = server
        self.messages: Counter[str] = Counter()
        """Number of messages by method."""
        self.bytes_read = 0

    def has_extended_api(self) -> bool:
        return True

    def set(self, key: str, value: str) -> None:
        self._send("set")
        self.server.values[key] = value.encode()

    def append(self, key: str, value: str) -> None:
        self._send("append")
        self.server.values[key] = self.server.values.get(key, b"") + value.encode()

    def add(self, key: str, amount: int) -> int:
        self._send("add")
        value = int(self.server.values.get(key, b"0")) + amount
        self.server.values[key] = str(value).encode()
        return value

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        self._send("compare_set")
        value = self.server.values.get(key, b"")
        if value == expected.encode():
            self.server.values[key] = value = desired.encode()
        return value

    def get(self, key: str) -> bytes:
        return self._read("get", [key])[0]

    def multi_get(self, keys: list[str]) -> list[bytes]:
        return self._read("multi_get", keys)

    def check(self, keys: list[str]) -> bool:
        self._send("check", len(keys))
        return all(key in self.server.values for key in keys)

    def _read(self, method: str, keys: list[str]) -> list[bytes]:
        self._send(method, len(keys))
        values = [self.server.values[key] for key in keys]  # TCPStore waits for a missing key
        self.bytes_read += sum(map(len, values))
        return values

    def _send(self, method: str, keys: int = 1) -> None:
        self.messages[method] += 1
        server = self.server
        server.free_at = max(server.free_at, server.clock.now) + keys * SERVER_TIME
        server.clock.wait(server.free_at - server.clock.now + LATENCY)
