"""Measures time, page faults and memory of a section of the process."""

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

import report  # noqa: F401  it puts this checkout on sys.path

import fsdp_c

PAGE = resource.getpagesize()
MIB = 2**20


class Cost(NamedTuple):
    """Wall and CPU milliseconds (of all threads), page faults, and the peak in MiB above the start.

    The peak is that of resident memory, and ``None`` if the kernel does not allow a reset.
    """

    wall: float
    cpu: float
    faults: int
    peak: float | None


class Meter:
    """Starts measuring when it is constructed."""

    def __init__(self) -> None:
        self._has_peak = reset_peak()
        self._resident = read_resident_bytes()
        self._faults = _count_faults()
        self._cpu = time.process_time()
        self._wall = time.perf_counter()

    def read(self) -> Cost:
        """Returns the cost since the start."""
        wall, cpu = time.perf_counter() - self._wall, time.process_time() - self._cpu
        faults = _count_faults() - self._faults
        peak_mib = (read_peak_bytes() - self._resident) / MIB if self._has_peak else None
        return Cost(wall * 1000, cpu * 1000, faults, peak_mib)


def release_free_memory() -> None:
    """Makes fsdp_c and the C library return free memory, which would hide a peak, to the kernel."""
    fsdp_c.release_memory()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it
    if trim is not None:
        trim(0)


def read_resident_bytes() -> int:
    """Returns the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def _count_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def read_peak_bytes() -> int:
    """Returns the peak of resident memory in bytes since the last ``reset_peak()``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) * 1024


def reset_peak() -> bool:
    """Resets the peak. Returns False if the kernel does not allow a reset."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # 5 sets VmHWM to VmRSS (man 5 proc)
        return True
    return False


# ---- over time -----------------------------------------------------------------------------------

_SAMPLER_SCRIPT = """
import sys, time
with open(f"/proc/{sys.argv[1]}/statm") as source, open(sys.argv[2], "w", buffering=1) as target:
    while True:
        source.seek(0)
        target.write(f"{time.perf_counter()} {source.read().split()[1]}\\n")
        time.sleep(0.0005)
"""


def sample_memory_over_time(call: Callable[[], object]) -> list[tuple[float, float]]:
    """Samples resident memory while it calls ``call``.

    Returns pairs of milliseconds and MiB, both relative to the beginning of the call. Another
    process samples, because a thread of this process would compete with the call for the GIL.
    """
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder, "samples")
        target.touch()
        command = [sys.executable, "-S", "-c", _SAMPLER_SCRIPT, str(os.getpid()), str(target)]
        sampler = subprocess.Popen(command)
        try:
            while not target.read_text():
                if sampler.poll() is not None:
                    raise RuntimeError(f"the sampler ended with exit code {sampler.returncode}")
                time.sleep(0.01)
            resident_before, begin = read_resident_bytes(), time.perf_counter()
            call()
            end = time.perf_counter()
        finally:
            sampler.terminate()
            sampler.wait()
        rows = [line.split() for line in target.read_text().splitlines()[:-1]]
    samples = [(float(seconds), int(pages) * PAGE) for seconds, pages in rows]
    return [
        ((seconds - begin) * 1000, (size - resident_before) / MIB)
        for seconds, size in samples
        if begin <= seconds <= end
    ]
