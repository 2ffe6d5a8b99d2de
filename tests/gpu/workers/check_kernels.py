"""The CUDA kernels beside the CPU's on random launches, byte by byte.

Destinations are poisoned and compared as a whole: a byte that is not written, and one that is
written where none belongs, both show. ``--under TOOL`` runs a part of that under compute-sanitizer:
memcheck sees accesses outside of the memory, which ends where the last byte of a launch does;
initcheck sees reads of bytes that no launch names, since for it only the others are written.
Without CUDA the kernels run on the host (tests/c/fake_cuda).
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from typing import Any

import kernel_cases
import kernel_library
import numpy as np
from kernel_cases import Case, Run
from kernel_library import Backend
from outcome import ON_CUDA, conclude, skip

POISON = 0xA5


class Memory:
    """A piece of device memory of so many bytes."""

    def __init__(self, size: int) -> None:
        self.library = kernel_library.load()
        self.size = size
        self.address = self.library.visit_allocate(_c_size(max(size, 1)))
        if not self.address:
            raise MemoryError(f"no {size} bytes on the device")

    def write(self, data: Any, runs: list[Run]) -> None:
        for at, size in runs:
            self._copy("visit_to_device", self.address + at, data.ctypes.data + at, size)

    def read(self, data: Any, runs: list[Run]) -> None:
        for at, size in runs:
            self._copy("visit_to_host", data.ctypes.data + at, self.address + at, size)

    def _copy(self, name: str, to: int, source: int, size: int) -> None:
        if size and getattr(self.library, name)(_pointer(to), _pointer(source), _c_size(size)):
            raise RuntimeError(f"{name} failed: an earlier launch may have")

    def free(self) -> None:
        self.library.visit_free(_pointer(self.address))


def _pointer(address: int) -> Any:
    return kernel_library.ctypes.c_void_p(address)


def _c_size(size: int) -> Any:
    return kernel_library.ctypes.c_size_t(size)


def expected(case: Case) -> Any:
    """The destination after the CPU's kernels, which write what they have to and nothing else."""
    found, other = (_on_the_cpu(case, poison) for poison in (POISON, POISON ^ 0xFF))
    written = np.zeros(len(found), bool)
    for at, size in case.written:
        written[at : at + size] = True
    if not np.array_equal(found == other, written):
        raise AssertionError(f"{case.name}: the CPU's kernels do not write what is expected here")
    return found


def _on_the_cpu(case: Case, poison: int) -> Any:
    target = np.full(max(case.size, 1), poison, np.uint8)
    case.launch(kernel_library.cpu(), case.source.ctypes.data, target.ctypes.data)
    return target


def actual(case: Case, bare: bool, kernels: Backend | None = None) -> Any:
    """The destination after the GPU's (``kernels``: after those); ``bare``: nothing is written but
    what the launch reads."""
    source, target = Memory(len(case.source)), Memory(case.size)
    found = np.full(max(case.size, 1), POISON, np.uint8)
    whole = [(0, len(found))] if case.size else []
    if bare:
        source.write(case.source, case.read)
    else:
        source.write(case.source, [(0, len(case.source))])
        target.write(found, whole)
    case.launch(kernels or kernel_library.cuda(), source.address, target.address)
    if kernel_library.load().visit_synchronize():
        raise RuntimeError(f"{case.name}: the launch failed")
    target.read(found, case.written if bare else whole)
    source.free()
    target.free()
    return found


def differences(rounds: int, bare: bool, kernels: Backend | None = None) -> list[str]:
    """What differs, by round; stops at the fifth."""
    found: list[str] = []
    for seed in range(rounds):
        for kind in kernel_cases.KINDS:
            case = kind(np.random.default_rng([seed, kernel_cases.KINDS.index(kind)]))
            wrong = np.flatnonzero(expected(case) != actual(case, bare, kernels))
            if len(wrong):
                where = f"byte {wrong[0]} of {case.size}, {len(wrong)} in all"
                found.append(f"{case.name}, seed {seed}: {where}")
            if len(found) == 5:
                return found
    return found


def under(tool: str, rounds: int) -> None:
    """The step that runs this file under compute-sanitizer."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        skip("compute-sanitizer is not there")
    kernel_library.library()
    options = ["--tool", tool, "--error-exitcode", "9"]
    command = [sys.executable, __file__, "--rounds", str(rounds)]
    command += ["--bare"] if tool == "initcheck" else []
    done = subprocess.run([sanitizer, *options, *command], capture_output=True, text=True)
    text = done.stdout + done.stderr
    print(text[-8000:])
    if "Device not supported" in text:
        skip("compute-sanitizer does not run on this machine: Device not supported")
    errors = re.findall(r"ERROR SUMMARY: (\d+) error", text)
    good = done.returncode == 0 and errors == ["0"]
    line = f"{rounds} rounds of 3 launches, errors: {', '.join(errors) or 'no summary'}"
    conclude(good, line, errors=errors, status=done.returncode)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--under", choices=("memcheck", "initcheck"))
    options = parser.parse_args()
    if options.under:
        under(options.under, options.rounds or 40)
    rounds = options.rounds or (400 if ON_CUDA else 40)
    begin = time.perf_counter()
    found = differences(rounds, options.bare)
    seconds = time.perf_counter() - begin
    where = "the GPU" if ON_CUDA else "the host (fake CUDA)"
    line = f"{rounds} rounds of 3 launches on {where}: " + (found[0] if found else "equal bytes")
    conclude(not found, line, rounds=rounds, differences=found, seconds_of_checks=seconds)


if __name__ == "__main__":
    main()
