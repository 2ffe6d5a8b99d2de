"""Writes the same memory on two streams of the substitute of libcudart.

Prints a JSON object. For each pair of streams it has the findings about the second write. The CUDA
manual orders the legacy default stream after all streams without the flag cudaStreamNonBlocking,
and these after it. The object also has the priorities of streams.
"""

from __future__ import annotations

import ctypes
import json
import threading
from collections.abc import Callable
from typing import Any

import stub_runtime
from capture_rules import Cudart

LEGACY, LEGACY_HANDLE, PER_THREAD = (ctypes.c_void_p(number) for number in range(3))
BLOCKING, NON_BLOCKING = 0, 1
"""Flags of cudaStreamCreateWithFlags."""


def run_in_thread(function: Callable[[], None]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


class Streams(Cudart):
    """Streams, and writes on them."""

    def __init__(self) -> None:
        super().__init__()
        self.device = stub_runtime.start()
        self.device.set(checks=1)

    def new(self, flag: int, priority: int = 0) -> ctypes.c_void_p:
        stream = ctypes.c_void_p()
        create = self.lib.cudaStreamCreateWithPriority
        assert create(ctypes.byref(stream), ctypes.c_uint(flag), priority) == 0
        return stream

    def priority(self, stream: ctypes.c_void_p) -> int:
        priority = ctypes.c_int()
        assert self.lib.cudaStreamGetPriority(stream, ctypes.byref(priority)) == 0
        return priority.value

    def priorities(self) -> list[int]:
        """Returns the lowest and the highest priority."""
        lowest, highest = ctypes.c_int(), ctypes.c_int()
        get = self.lib.cudaDeviceGetStreamPriorityRange
        assert get(ctypes.byref(lowest), ctypes.byref(highest)) == 0
        return [lowest.value, highest.value]

    def findings(
        self, first: ctypes.c_void_p, second: ctypes.c_void_p, in_thread: bool = False
    ) -> list[str]:
        """Writes memory on ``first``, then on ``second``: in another thread with ``in_thread``."""
        self.device.reset()
        memory = ctypes.c_void_p()
        assert self.lib.cudaMalloc(ctypes.byref(memory), ctypes.c_size_t(64)) == 0

        def write(stream: ctypes.c_void_p) -> None:
            assert self.lib.cudaMemsetAsync(memory, 0, ctypes.c_size_t(64), stream) == 0

        write(first)
        if in_thread:
            run_in_thread(lambda: write(second))
        else:
            write(second)
        return self.device.findings()


def main() -> dict[str, Any]:
    cuda = Streams()
    blocking, non_blocking = cuda.new(BLOCKING), cuda.new(NON_BLOCKING)
    pairs = {
        "legacy, blocking": (LEGACY, blocking),
        "blocking, legacy": (blocking, LEGACY),
        "legacy, non-blocking": (LEGACY, non_blocking),
        "non-blocking, legacy": (non_blocking, LEGACY),
        "blocking, another blocking": (blocking, cuda.new(BLOCKING)),
        "two handles of legacy": (LEGACY, LEGACY_HANDLE),
        "legacy and high priority": (LEGACY, cuda.new(BLOCKING, -1)),
        "low and high priority": (cuda.new(BLOCKING, 0), cuda.new(BLOCKING, -1)),
        "per thread": (PER_THREAD, PER_THREAD),
        "per thread, legacy": (PER_THREAD, LEGACY),
        "per thread, non-blocking": (PER_THREAD, non_blocking),
    }
    findings = {name: cuda.findings(*pair) for name, pair in pairs.items()}
    for name, first in (("per thread", PER_THREAD), ("legacy", LEGACY)):
        findings[f"{name}, per thread in another thread"] = cuda.findings(first, PER_THREAD, True)
    made = {number: cuda.priority(cuda.new(NON_BLOCKING, number)) for number in (0, -1, -5)}
    return {"findings": findings, "range": cuda.priorities(), "priorities": made}


if __name__ == "__main__":
    print(json.dumps(main()))
