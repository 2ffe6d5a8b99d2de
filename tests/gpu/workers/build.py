"""Builds the extension for the installed torch, the kernels as a library, and the C++ group.

On CUDA this script runs ``setup.py build_ext --inplace`` for sm_90, without pip, build isolation or
network. The build needs cmake, and ninja or make. On other devices the extension must exist.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import kernel_library
import one_rank_group
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
    """Returns the build command. setuptools before 77 cannot parse pyproject.toml's license
    field. With these versions, the command skips pyproject.toml, which the build does not need."""
    arguments = ["setup.py", "build_ext", "--inplace"]
    if int(setuptools.__version__.split(".")[0]) >= 77:
        return [sys.executable, *arguments]
    return [sys.executable, "-c", WITHOUT_PYPROJECT, *arguments]


def build() -> subprocess.Popen[bytes] | None:
    if not ON_CUDA:
        return None
    jobs = os.environ.get("MAX_JOBS") or str(os.cpu_count())
    env = os.environ | {"FSDP_C_CUDA_ARCH": kernel_library.ARCH, "MAX_JOBS": jobs}
    # A newer compiler may emit new warnings, which must not stop the remaining steps.
    env |= {"TORCH_CUDA_ARCH_LIST": "9.0", "FSDP_C_LENIENT": "1"}
    return subprocess.Popen(command(), cwd=ROOT, env=env)


def main() -> None:
    begin = time.perf_counter()
    build_process = build()
    kernels = kernel_library.build_library()
    kernel_seconds = time.perf_counter() - begin
    if DEVICE != "cpu":
        one_rank_group.build_library()
    if DEVICE == "sim":
        import simulated_build

        simulated_build.build_library()
    status = build_process.wait() if build_process is not None else 0
    seconds = time.perf_counter() - begin
    probe = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    print(probe.stdout, probe.stderr)
    kernel_status = probe.stdout.rpartition(" ")[0]
    passed = status == 0 and probe.returncode == 0 and (kernel_status == "kernels" or not ON_CUDA)
    built = f"built in {seconds:.0f} s" if ON_CUDA else "already existed"
    line = f"extension {built} ({kernel_status or 'import failed'}), {kernels.name}"
    conclude(
        passed,
        line,
        seconds_of_build=seconds,
        kernel_seconds=kernel_seconds,
        extension=probe.stdout,
    )


if __name__ == "__main__":
    main()
