"""Compares the kernels that NVRTC compiles at first use with the CPU's and nvcc's.

Random launches must give the CPU's bytes, as in check_kernels.py. Short trainings, in which the
core launches the kernels on streams and in backward threads, must give the bits of nvcc's kernels.
"""

from __future__ import annotations

import contextlib
import ctypes
import re
import time
import warnings
from collections.abc import Iterator

import check_kernels
import kernel_library
import loop_group
import race
import torch
import variants
from kernel_library import Backend
from outcome import SMALL, conclude, start_device

ROUNDS = 20 if SMALL else 200
TRAININGS = ("mixed", "uneven", "second_dim", "hsdp_mixed", "offload")


def compile_kernels(device: torch.device) -> tuple[Backend, int]:
    """Compiles the kernels for this device. Returns them, and the address of their fck_backend."""
    from fsdp_c._runtime import jit

    return kernel_library.jit(jit.build_kernels(device))


@contextlib.contextmanager
def kernels_replaced(address: int) -> Iterator[None]:
    """Makes the core launch the kernels of the fck_backend at ``address`` instead of its own."""
    from fsdp_c import _C

    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    _C._testing.simulate_kernels(new_capsule(address, b"fck_backend", None))
    _C._testing.hide_kernels(True)
    try:
        yield
    finally:
        _C._testing.hide_kernels(False)
        _C._testing.simulate_kernels(None)


def differing_trainings(device: torch.device, address: int) -> list[str]:
    """Lists the trainings whose results differ between the two sets of kernels."""
    tools = race.make_tools("fsdp_c", device)
    mismatches = []
    for name in TRAININGS:
        expected, _ = race.run(name, tools, 1)
        with kernels_replaced(address):
            actual, _ = race.run(name, tools, 1)
        if actual != expected or not re.fullmatch(r"[0-9a-f]{16}", expected):
            mismatches.append(f"training {name!r}: digest {actual}, expected {expected}")
    return mismatches


def main() -> None:
    warnings.simplefilter("ignore")
    device = start_device()
    begin = time.perf_counter()
    try:
        kernels, address = compile_kernels(device)
    except (RuntimeError, OSError, AttributeError) as error:
        conclude(False, f"NVRTC did not compile the kernels: {error}")
    seconds = time.perf_counter() - begin
    loop_group.join(variants.WORLD, device)
    mismatches = check_kernels.differences(ROUNDS, bare=False, kernels=kernels)
    mismatches += differing_trainings(device, address)
    line = f"compiled in {seconds:.1f} s; {ROUNDS} rounds of {check_kernels.LAUNCHES}"
    line += f", {len(TRAININGS)} trainings: " + (mismatches[0] if mismatches else "equal bytes")
    conclude(not mismatches, line, seconds_of_compilation=seconds, differences=mismatches)


if __name__ == "__main__":
    main()
