"""Finds a Python with a CUDA build of torch, and runs the workers of tests/cuda with it."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Protocol

import pytest

ROOT = Path(__file__).resolve().parents[2]
WORKERS = Path(__file__).resolve().parent / "workers"
PACKAGE = Path(os.environ.get("FSDP_C_CUDA_PACKAGE") or ROOT / "build/cuda-sim/package")
"""The folder with fsdp_c, built for that torch (``make cuda-sim``)."""
ABORT = re.compile("watchdog thread terminated with exception|Aborting process on rank")
"""Messages of torch's ProcessGroupNCCL before an abort: until torch 2.14, and since 2.15."""


class Runner(Protocol):
    """Runs a worker and returns the object that its last line contains.

    Returns None if the worker printed nothing. Also returns None if torch's watchdog ended the
    worker by SIGABRT with a message that matches ``watchdog_message``, a regular expression.
    """

    def __call__(self, worker: str, *arguments: str, watchdog_message: str = "") -> Any: ...


class PairRunner(Protocol):
    """Runs a worker under torch and under fsdp_c at the same time.

    Returns the results of :class:`Runner` by implementation. The implementation is the first
    argument of the worker, after ``before``.
    """

    def __call__(
        self,
        worker: str,
        *arguments: str,
        before: tuple[str, ...] = (),
        watchdog_message: str = "",
    ) -> dict[str, Any]: ...


def _run(python: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(PACKAGE)}
    # The working directory must not contain fsdp_c, because `python -c` imports from it first.
    return subprocess.run(
        [python, *arguments],
        cwd=WORKERS,
        capture_output=True,
        text=True,
        env=environment,
        timeout=850,
    )


@pytest.fixture(scope="session")
def cuda_python() -> str:
    """A Python whose torch was built for CUDA: FSDP_C_CUDA_PYTHON, or this one."""
    python = os.environ.get("FSDP_C_CUDA_PYTHON") or sys.executable
    built = _run(python, str(WORKERS / "stub_build.py"))
    assert built.returncode == 0, built.stderr
    if "skipped" in built.stdout:
        pytest.skip(built.stdout.strip())
    return python


@pytest.fixture(scope="session")
def run_worker(cuda_python: str) -> Runner:
    """Runs a worker in a process with the simulated device.

    If fsdp_c cannot be imported, tests fail if FSDP_C_CUDA_PYTHON is set. Else they are skipped.
    """
    imported = _run(cuda_python, "-c", "import torch, fsdp_c._C")
    if imported.returncode:
        reason = f"fsdp_c is not built for the torch of {cuda_python}: run make cuda-sim"
        if "FSDP_C_CUDA_PYTHON" in os.environ:
            pytest.fail(f"{reason}\n{imported.stderr}")
        pytest.skip(reason)

    def run(worker: str, *arguments: str, watchdog_message: str = "") -> Any:
        result = _run(cuda_python, str(WORKERS / f"{worker}.py"), *arguments)
        if watchdog_message and result.returncode == -signal.SIGABRT:
            assert ABORT.search(result.stderr), result.stderr[-3000:]
            assert re.search(watchdog_message, result.stderr), result.stderr[-3000:]
            return None
        assert result.returncode == 0, result.stderr[-3000:]
        lines = result.stdout.splitlines()
        return json.loads(lines[-1]) if lines else None

    return run


@pytest.fixture(scope="session")
def run_pair(run_worker: Runner) -> PairRunner:
    """Runs a worker under both implementations."""

    def run(
        worker: str,
        *arguments: str,
        before: tuple[str, ...] = (),
        watchdog_message: str = "",
    ) -> dict[str, Any]:
        def run_one(name: str) -> Any:
            given = (*before, name, *arguments)
            return run_worker(worker, *given, watchdog_message=watchdog_message)

        names = ("torch", "fsdp_c")
        with concurrent.futures.ThreadPoolExecutor(len(names)) as executor:
            return dict(zip(names, executor.map(run_one, names), strict=True))

    return run
