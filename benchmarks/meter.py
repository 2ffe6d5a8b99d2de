"""What a stretch of a process costs: time, page faults, memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import fsdp_c

PAGE = resource.getpagesize()
MIB = 2**20


class Cost(NamedTuple):
    """Milliseconds of wall and of CPU (all threads), page faults, MiB at the peak above the start.

    The peak is of resident memory; ``None`` where the kernel does not let it be reset.
    """

    wall: float
    cpu: float
    faults: int
    peak: float | None


class Meter:
    """Starts when it is made."""

    def __init__(self) -> None:
        self._resets = reset_peak()
        self._resident = resident()
        self._faults = _faults()
        self._cpu = time.process_time()
        self._wall = time.perf_counter()

    def read(self) -> Cost:
        """What it has cost since the start."""
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        faults = _faults() - self._faults
        most = (peak() - self._resident) / MIB if self._resets else None
        return Cost(wall * 1000, cpu * 1000, faults, most)


def give_back() -> None:
    """Has fsdp_c and the C library give the kernel what they keep free: it would hide a peak."""
    fsdp_c.release_memory()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


def resident() -> int:
    """Bytes of this process that are in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def peak() -> int:
    """Most bytes that were in memory since the last reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def reset_peak() -> bool:
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
        return True
    return False


# ---- over time -----------------------------------------------------------------------------------

_WATCH = """
import sys, time
with open(f"/proc/{sys.argv[1]}/statm") as source, open(sys.argv[2], "w", buffering=1) as target:
    while True:
        source.seek(0)
        target.write(f"{time.perf_counter()} {source.read().split()[1]}\\n")
        time.sleep(0.0005)
"""


def memory_over(call: Callable[[], object]) -> list[tuple[float, float]]:
    """Milliseconds since the call began, and MiB of resident memory above those at its begin.

    Another process looks: a thread here would wait for the GIL, and take it from the call.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "samples")
        target.touch()
        command = [sys.executable, "-S", "-c", _WATCH, str(os.getpid()), str(target)]
        watcher = subprocess.Popen(command)
        try:
            while not target.read_text():
                time.sleep(0.01)
            start, begin = resident(), time.perf_counter()
            call()
            end = time.perf_counter()
        finally:
            watcher.terminate()
            watcher.wait()
        rows = [line.split() for line in target.read_text().splitlines()[:-1]]
    samples = [(float(moment), int(pages) * PAGE) for moment, pages in rows]
    return [((t - begin) * 1000, (b - start) / MIB) for t, b in samples if begin <= t <= end]
