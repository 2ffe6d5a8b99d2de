"""The kernels that NVRTC compiles at first use (FSDP_C_JIT=1), beside the CPU's and nvcc's.

Random launches give the CPU's bytes, as in check_kernels.py; short trainings in which the core
launches them, on streams and in backward's threads, give the bits of those with nvcc's kernels.
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
from outcome import conclude, start_device

ROUNDS = 200
TRAININGS = ("mixed", "uneven", "second_dim", "hsdp_mixed", "offload")


def compiled(device: torch.device) -> tuple[Backend, int]:
    """The kernels, made for this device as fsdp_c makes them."""
    from fsdp_c import jit

    return kernel_library.jit(*jit.kernels_for(device))


@contextlib.contextmanager
def in_use(address: int) -> Iterator[None]:
    """The core launches the kernels of this fck_backend in the place of all others."""
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


def trained_apart(device: torch.device, address: int) -> list[str]:
    """The trainings that come to other bits."""
    stage = race.make_stage("fsdp_c", device)
    wrong = []
    for name in TRAININGS:
        right, _ = race.run(name, stage, 1)
        with in_use(address):
            found, _ = race.run(name, stage, 1)
        if found != right or not re.fullmatch(r"[0-9a-f]{16}", right):
            wrong.append(f"trained otherwise: {name}, {found} and not {right}")
    return wrong


def main() -> None:
    warnings.simplefilter("ignore")
    device = start_device()
    begin = time.perf_counter()
    try:
        kernels, address = compiled(device)
    except (RuntimeError, OSError, AttributeError) as error:
        conclude(False, f"NVRTC has made no kernels: {error}")
    seconds = time.perf_counter() - begin
    loop_group.join(variants.WORLD, device)
    wrong = check_kernels.differences(ROUNDS, bare=False, kernels=kernels)
    wrong += trained_apart(device, address)
    line = f"compiled in {seconds:.1f} s; {ROUNDS} rounds of 3 launches, {len(TRAININGS)} "
    line += "trainings: " + (wrong[0] if wrong else "equal bytes")
    conclude(not wrong, line, seconds_of_compilation=seconds, differences=wrong)


if __name__ == "__main__":
    main()
