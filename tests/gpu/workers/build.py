"""Builds the extension for this torch, and the kernels as a library of their own beside it.

On CUDA by ``setup.py build_ext --inplace`` for sm_90: no pip, no isolation, no network; without
ninja setuptools compiles one file after the other. Elsewhere the extension has to be there.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import kernel_library
import setuptools
from outcome import DEVICE, ON_CUDA, ROOT, conclude

WITHOUT_PYPROJECT = """
import runpy, sys
from setuptools.config import pyprojecttoml
pyprojecttoml.apply_configuration = lambda dist, *rest, **named: dist
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
PROBE = (
    "import torch, fsdp_c._C as C; print('kernels' if C.CUDA_KERNELS else 'no kernels', C.__file__)"
)


def command() -> list[str]:
    """Builds in place. What setuptools before 77 cannot read of pyproject.toml it need not know."""
    arguments = ["setup.py", "build_ext", "--inplace"]
    if int(setuptools.__version__.split(".")[0]) >= 77:
        return [sys.executable, *arguments]
    return [sys.executable, "-c", WITHOUT_PYPROJECT, *arguments]


def build() -> subprocess.Popen[bytes] | None:
    if not ON_CUDA:
        return None
    jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count())
    env = os.environ | {"FSDP_C_CUDA_ARCH": kernel_library.ARCH, "MAX_JOBS": jobs}
    # A warning of a compiler that is newer than ours is no reason to see nothing else.
    env |= {"TORCH_CUDA_ARCH_LIST": "9.0", "FSDP_C_LENIENT": "1"}
    return subprocess.Popen(command(), cwd=ROOT, env=env)


def main() -> None:
    begin = time.perf_counter()
    running = build()
    kernels = kernel_library.library()
    kernel_seconds = time.perf_counter() - begin
    if DEVICE == "sim":
        import simulated_build

        simulated_build.library()
    status = running.wait() if running is not None else 0
    seconds = time.perf_counter() - begin
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    print(probe.stdout, probe.stderr)
    word = probe.stdout.rpartition(" ")[0]
    good = status == 0 and probe.returncode == 0 and (word == "kernels" or not ON_CUDA)
    built = f"built in {seconds:.0f} s" if ON_CUDA else "was there"
    line = f"extension {built} ({word or 'does not import'}), {kernels.name}"
    conclude(
        good, line, seconds_of_build=seconds, kernel_seconds=kernel_seconds, extension=probe.stdout
    )


if __name__ == "__main__":
    main()
