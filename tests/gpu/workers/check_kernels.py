"""Compares the CUDA kernels with the CPU's on random launches, byte by byte.

Destinations are filled with a poison value and compared completely, which detects missing writes
and writes outside of the expected bytes. ``--under TOOL`` runs some launches in compute-sanitizer.
The tool memcheck reports accesses outside of the allocations, which end at a launch's last byte.
The tool initcheck reports reads outside of a launch's inputs, because only these are initialized.
Without CUDA the kernels run on the host (tests/c/fake_cuda).
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import time
from typing import Any, NoReturn

import kernel_cases
import kernel_library
import numpy as np
from kernel_cases import Case, Run
from kernel_library import Backend, Range
from outcome import ON_CUDA, SMALL, conclude, skip

POISON = 0xA5
LAUNCHES = f"{len(kernel_cases.KINDS)} launches"


class Memory:
    """A device allocation of ``size`` bytes."""

    def __init__(self, size: int) -> None:
        self.library = kernel_library.load()
        self.size = size
        self.address = self.library.device_allocate(_c_size(max(size, 1)))
        if not self.address:
            raise MemoryError(f"device allocation of {size} bytes failed")

    def write(self, data: Any, runs: list[Run]) -> None:
        for offset, size in runs:
            self._copy("copy_to_device", self.address + offset, data.ctypes.data + offset, size)

    def read(self, data: Any, runs: list[Run]) -> None:
        for offset, size in runs:
            self._copy("copy_to_host", data.ctypes.data + offset, self.address + offset, size)

    def _copy(self, name: str, destination: int, source: int, size: int) -> None:
        if size and getattr(self.library, name)(
            _pointer(destination), _pointer(source), _c_size(size)
        ):
            raise RuntimeError(f"{name} failed; the cause may be an earlier launch")

    def free(self) -> None:
        self.library.device_free(_pointer(self.address))


def _pointer(address: int) -> Any:
    return kernel_library.ctypes.c_void_p(address)


def _c_size(size: int) -> Any:
    return kernel_library.ctypes.c_size_t(size)


def expected(case: Case) -> Any:
    """Returns the destination after the CPU's kernels. Checks that exactly ``case.written`` was
    written, by comparing runs with two poison values."""
    result, other_result = (_run_on_cpu(case, poison) for poison in (POISON, POISON ^ 0xFF))
    written = np.zeros(len(result), bool)
    for offset, size in case.written:
        written[offset : offset + size] = True
    if not np.array_equal(result == other_result, written):
        raise AssertionError(f"{case.name}: the CPU's kernels wrote other bytes than case.written")
    return result


def _run_on_cpu(case: Case, poison: int) -> Any:
    target = np.full(max(case.size, 1), poison, np.uint8)
    case.launch(kernel_library.cpu(), case.source.ctypes.data, target.ctypes.data)
    return target


def actual(case: Case, bare: bool, kernels: Backend | None = None) -> Any:
    """Returns the destination after ``kernels`` (default: the GPU's).

    If ``bare``, only the bytes that the launch reads are initialized.
    """
    source, target = Memory(len(case.source)), Memory(case.size)
    result = np.full(max(case.size, 1), POISON, np.uint8)
    everything = [(0, len(result))] if case.size else []
    if bare:
        source.write(case.source, case.read)
    else:
        source.write(case.source, [(0, len(case.source))])
        target.write(result, everything)
    case.launch(kernels or kernel_library.cuda(), source.address, target.address)
    if kernel_library.load().device_synchronize():
        raise RuntimeError(f"{case.name}: the launch failed")
    target.read(result, case.written if bare else everything)
    source.free()
    target.free()
    return result


def differences(rounds: int, bare: bool, kernels: Backend | None = None) -> list[str]:
    """Lists the launches whose bytes differ. Stops after five."""
    result: list[str] = []
    for seed in range(rounds):
        for kind in kernel_cases.KINDS:
            case = kind(np.random.default_rng([seed, kernel_cases.KINDS.index(kind)]))
            mismatches = np.flatnonzero(expected(case) != actual(case, bare, kernels))
            if len(mismatches):
                where = f"byte {mismatches[0]} of {case.size}, {len(mismatches)} in all"
                result.append(f"{case.name}, seed {seed}: {where}")
            if len(result) == 5:
                return result
    return result


def expected_checksum(data: Any) -> int:
    """Returns the checksum of csrc/kernels/checksums.cuh."""
    padded = np.zeros(-(-len(data) // 8) * 8, np.uint8)
    padded[: len(data)] = data
    positions = np.arange(len(padded) // 8, dtype=np.uint64)
    words = padded.view(np.uint64) + positions * np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ words >> np.uint64(32)) * np.uint64(0xD6E8FEB86659FD93)
    return int((words ^ words >> np.uint64(32)).sum())


def differing_checksums(rounds: int, kernels: Backend | None = None) -> list[str]:
    """Compares sums of two ranges in the memory of the device. Stops at the first difference."""
    for seed in range(rounds):
        random = np.random.default_rng(seed)
        data = random.integers(0, 256, int(random.integers(1, 2 << (seed % 22))), dtype=np.uint8)
        begin = int(random.integers(0, len(data) + 1)) // 8 * 8
        factors = [int(factor) for factor in random.integers(0, 1 << 63, 2)]
        memory, total = Memory(len(data)), Memory(8)
        result = np.full(1, seed, np.uint64)
        memory.write(data, [(0, len(data))])
        total.write(result, [(0, 8)])
        ranges = [
            Range(memory.address, len(data), factors[0]),
            Range(memory.address + begin, len(data) - begin, factors[1]),
        ]
        (kernels or kernel_library.cuda()).add_checksums(ranges, total.address)
        if kernel_library.load().device_synchronize():
            raise RuntimeError("add_checksums: the launch failed")
        total.read(result, [(0, 8)])
        parts = [expected_checksum(data), expected_checksum(data[begin:])]
        right = seed + sum(factor * part for factor, part in zip(factors, parts, strict=True))
        memory.free()
        total.free()
        if int(result[0]) != right % (1 << 64):
            return [f"add_checksums, seed {seed}: {result[0]:x}, expected {right % (1 << 64):x}"]
    return []


def run_under_sanitizer(tool: str, rounds: int) -> NoReturn:
    """Runs this file under compute-sanitizer, reports the result of the step, and exits."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        skip("compute-sanitizer is not installed")
    kernel_library.build_library()
    options = ["--tool", tool, "--error-exitcode", "9"]
    command = [sys.executable, __file__, "--rounds", str(rounds)]
    command += ["--bare"] if tool == "initcheck" else []
    completed = subprocess.run([sanitizer, *options, *command], capture_output=True, text=True)
    text = completed.stdout + completed.stderr
    print(text[-8000:])
    if "Device not supported" in text:
        skip("compute-sanitizer does not run on this machine: Device not supported")
    errors = re.findall(r"ERROR SUMMARY: (\d+) error", text)
    passed = completed.returncode == 0 and errors == ["0"]
    line = f"{rounds} rounds of {LAUNCHES}, errors: {', '.join(errors) or 'no summary'}"
    conclude(passed, line, errors=errors, status=completed.returncode)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--bare", action="store_true")
    parser.add_argument("--under", choices=("memcheck", "initcheck"))
    options = parser.parse_args()
    if options.under:
        run_under_sanitizer(options.under, options.rounds or 40)
    rounds = options.rounds or (40 if SMALL else 400)
    begin = time.perf_counter()
    result = differences(rounds, options.bare) + differing_checksums(rounds)
    seconds = time.perf_counter() - begin
    where = "the GPU" if ON_CUDA else "the host (fake CUDA)"
    line = f"{rounds} rounds of {LAUNCHES} on {where}: " + (result[0] if result else "equal bytes")
    conclude(not result, line, rounds=rounds, differences=result, seconds_of_checks=seconds)


if __name__ == "__main__":
    main()
