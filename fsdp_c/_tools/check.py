"""``python -m fsdp_c --version`` and ``--check``: describe and test the installation."""

from __future__ import annotations

import importlib.metadata
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch

import fsdp_c._C as _C

from .._compat.build_info import read_build
from .._runtime import kernels
from ..version import __version__
from .compare_runs import name_signal

TIMEOUT = 120  # seconds for the self-test


def format_version() -> str:
    """Returns one line with the releases of fsdp_c, of its build, and of the environment."""
    build = read_build()
    built = f"built for torch {build.torch}" if build is not None else "built for an unknown torch"
    python = _format_python_version()
    return f"fsdp_c {__version__} ({built}); torch {torch.__version__}, Python {python}"


def _format_python_version() -> str:
    return ".".join(map(str, sys.version_info[:3]))


def main() -> int:
    """Prints one line per check. Returns 0 if all checks pass, else 1."""
    print(format_version())
    failed = False
    for subject, is_ok, text in _run_checks():
        failed = failed or not is_ok
        print(f"  {subject:<12} {'ok' if is_ok else 'WRONG':<6} {text}", flush=True)
    return int(failed)


def _run_checks() -> Iterator[tuple[str, bool, str]]:
    """Yields (name of the check, whether it passed, its finding).

    Only trainings can fail: ``import fsdp_c`` has raised if the extension does not fit torch.
    """
    build = read_build()
    yield "extension", True, str(_C.__file__)
    yield "torch", True, _describe_torch(build.torch if build is not None else "")
    yield "kernels", True, _describe_kernels()
    yield "devices", True, _describe_devices()
    yield "entry point", True, _describe_entry_point()
    yield "two ranks", *_train("cpu", 2)
    if torch.cuda.is_available():
        devices = min(2, torch.cuda.device_count())
        yield "one GPU" if devices == 1 else "two GPUs", *_train("cuda", devices)


def _describe_torch(built: str) -> str:
    if not built:
        return f"{torch.__version__}; fsdp_c was built for an unknown release"
    if built == torch.__version__:
        return f"{built}, for which fsdp_c was built"
    return f"{torch.__version__}; fsdp_c was built for {built}, the same release"


def _describe_kernels() -> str:
    if _C.CUDA_KERNELS:
        return "CPU and CUDA"
    if not torch.cuda.is_available():
        return "CPU"
    device = torch.device("cuda", torch.cuda.current_device())
    reason = kernels.add_missing_kernels(device)
    if reason:
        return f"CPU; on CUDA, torch's operations move the data: {reason}"
    return f"CPU; on CUDA, {kernels.describe_kernels(device)}"


def _describe_devices() -> str:
    if not torch.accelerator.is_available():
        return "cpu"
    kind = torch.accelerator.current_accelerator()
    return f"cpu, {torch.accelerator.device_count()} of {kind}"


def _describe_entry_point() -> str:
    entries = importlib.metadata.entry_points(group="torch.backends")
    if any(entry.value == "fsdp_c_autoload:autoload" for entry in entries):
        return "installed: FSDP_C=1 replaces fully_shard in a job"
    return "not installed with pip: FSDP_C=1 does nothing, python -m fsdp_c and imports work"


def _train(device: str, ranks: int) -> tuple[bool, str]:
    """Trains in ``ranks`` processes on the device type, with torch's FSDP2 and with fsdp_c."""
    backend = "NCCL" if device == "cuda" else "gloo"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [_start(device, rank, ranks, folder) for rank in range(ranks)]
        try:
            failed = _wait_for_first_failure(processes)
        finally:
            unfinished = [process for process in processes if process.poll() is None]
            for process in unfinished:
                process.kill()
                process.wait()
        if not failed and unfinished:
            return False, f"{ranks} processes on {backend} did not finish within {TIMEOUT} s"
        for rank in failed or range(ranks):
            reason = _find_reason(folder, rank, has_failed=bool(failed))
            if reason:
                ended = _describe_signal(processes[rank].returncode)
                return False, f"training on {backend} failed{ended}: {reason}"
    return True, f"trained on {backend} with torch's FSDP2 and with fsdp_c: the same bits"


def _start(device: str, rank: int, ranks: int, folder: Path) -> subprocess.Popen[bytes]:
    """Starts the self-test of a rank. Its output goes to files in the folder."""
    environment = {name: value for name, value in os.environ.items() if name != "FSDP_C"}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(Path(__file__).resolve().parents[2]), environment.get("PYTHONPATH", "")]
    )
    command = [sys.executable, "-m", f"{__package__}.self_test", device]
    command += [str(rank), str(ranks), str(folder / "store")]
    with open(folder / f"out{rank}", "w") as out, open(folder / f"err{rank}", "w") as error:
        return subprocess.Popen(command, env=environment, stdout=out, stderr=error)


def _find_reason(folder: Path, rank: int, has_failed: bool) -> str:
    """Returns the last line that the rank printed, or "" if it found the same bits.

    The line is that of standard error if the process has failed, else that of standard output.
    """
    out, error = ((folder / f"{name}{rank}").read_text(errors="replace") for name in ("out", "err"))
    if not has_failed and "same" in out.split("\n"):
        return ""
    texts = (error, out) if has_failed else (out, error)
    return next((text.strip().splitlines()[-1] for text in texts if text.strip()), "nothing")


def _wait_for_first_failure(processes: list[subprocess.Popen[bytes]]) -> list[int]:
    """Waits for all processes, for the first that fails, or for the time limit.

    A process that loses its peer may fail, too, but later. Returns the ranks that have failed.
    """
    deadline = time.monotonic() + TIMEOUT
    while time.monotonic() < deadline:
        statuses = [process.poll() for process in processes]
        failed = [rank for rank, status in enumerate(statuses) if status]
        if failed or None not in statuses:
            return failed
        time.sleep(0.05)
    return []


def _describe_signal(status: int) -> str:
    """Returns ``" (SIGSEGV)"`` for the exit status of a process that this signal ended, else
    ``""``."""
    return f" ({name_signal(-status)})" if status < 0 else ""
