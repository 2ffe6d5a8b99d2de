"""Runs a function or a script on several gloo ranks, each in its own process.

``run_ranks(target, world_size, args)`` starts ``world_size`` processes and joins them into one
default gloo process group, with a file in a temporary directory as rendezvous. Each process calls
``target(rank, world_size, *args)``; the pickled results are returned in rank order. When a rank
raises, dies or exceeds the time limit, the other ranks are stopped. ``RanksFailed`` then carries
every rank's exit status and the end of its output, with the stacks of all threads after a time-out.

By default the processes are forked from one that has imported torch (fork_server.py). With
``fresh=True`` they are new interpreters. A function target must be importable by name (no lambdas,
no nested functions). A target that is a path runs as a script, with ``args`` as ``sys.argv[1:]``
and the environment variables of torchrun. A script creates its own process group, and its result
is its output.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

if getattr(sys.flags, "safe_path", False):  # as in `make sanitize`: without the script's folder
    sys.path.insert(0, str(Path(__file__).parent))

import fork_server

SHUTDOWN = Path(__file__).resolve().parents[2] / "fsdp_c/_compat/shutdown.py"

OUTPUT_SHOWN = 6000
"""Maximum number of characters at the end of a failed rank's output that its report keeps."""

GRACE_SECONDS = 5.0
"""Seconds that the other ranks may continue after one has failed, so that they can report too."""


@dataclass
class RankReport:
    """One rank's exit status (None if it still runs) and the end of its output."""

    rank: int
    returncode: int | None
    output: str

    @property
    def status(self) -> str:
        if self.returncode is None:
            return "stopped: still running"
        if self.returncode < 0:
            return f"killed by {signal.Signals(-self.returncode).name}"
        return f"exit status {self.returncode}"


class RanksFailed(RuntimeError):
    """At least one rank raised, died, or was still running at the time limit."""

    def __init__(self, reason: str, reports: list[RankReport]) -> None:
        self.reports = reports
        parts = [reason]
        for report in reports:
            parts.append(f"--- rank {report.rank}: {report.status}\n{report.output.rstrip()}")
        super().__init__("\n".join(parts))


def run_ranks(
    target: Callable[..., Any] | str | Path,
    world_size: int,
    args: Sequence[Any] = (),
    *,
    timeout: float = 120.0,
    env: dict[str, str] | None = None,
    backend: str = "gloo",
    collective_timeout: float = 90.0,
    fresh: bool = False,
) -> list[Any]:
    """Runs ``target`` on ``world_size`` ranks and returns their results in rank order.

    ``args`` and the results are pickled. ``timeout`` limits the whole run in seconds, and
    ``collective_timeout`` each collective of the default process group. ``env`` is added to the
    environment. ``fresh`` starts new interpreters, which do not share their hash seed, so the
    iteration order of sets differs between ranks. Raises ``RanksFailed``.
    """
    with tempfile.TemporaryDirectory(prefix="fsdp_c_ranks_") as folder:
        return _Launch(
            Path(folder), target, world_size, args, backend, collective_timeout, fresh
        ).run(timeout, env or {})


Process = subprocess.Popen[bytes] | fork_server.ForkedProcess


class _Launch:
    """The ranks of one run, with their processes, output files and results."""

    def __init__(
        self,
        folder: Path,
        target: Callable[..., Any] | str | Path,
        world_size: int,
        args: Sequence[Any],
        backend: str,
        collective_timeout: float,
        fresh: bool,
    ) -> None:
        self.folder = folder
        self.world_size = world_size
        self.is_script = isinstance(target, (str, Path))
        self.fresh = fresh
        if self.is_script:
            self.reserved = _reserve_port()
        payload = {
            "target": str(target) if self.is_script else _name_of(target),
            "is_script": self.is_script,
            "args": pickle.dumps(tuple(args)),
            "path": [entry or os.getcwd() for entry in sys.path],
            "backend": backend,
            "collective_timeout": collective_timeout,
        }
        (folder / "payload.pkl").write_bytes(pickle.dumps(payload))

    def run(self, timeout: float, env: dict[str, str]) -> list[Any]:
        processes = [self._start(rank, env) for rank in range(self.world_size)]
        try:
            reason = self._wait(processes, timeout)
        finally:
            codes = [process.poll() for process in processes]
            for process in processes:
                _stop(process)
            if self.is_script:
                self.reserved.close()
        if reason is not None:
            raise RanksFailed(reason, [self._report(r, code) for r, code in enumerate(codes)])
        if self.is_script:
            return [self._read_output(rank) for rank in range(self.world_size)]
        return [
            pickle.loads((self.folder / f"result_{rank}.pkl").read_bytes())
            for rank in range(self.world_size)
        ]

    def _start(self, rank: int, extra: dict[str, str]) -> Process:
        env = os.environ | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.world_size),
            "OMP_NUM_THREADS": "1",
            "PYTHONUNBUFFERED": "1",
        }
        if self.is_script:
            port = self.reserved.getsockname()[1]
            env |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        arguments = [str(self.folder), str(rank)]
        with self._output(rank).open("wb") as output:
            if not self.fresh:
                return fork_server.start(arguments, env | extra, self._output(rank))
            return subprocess.Popen(
                [sys.executable, __file__, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env | extra,
                start_new_session=True,
            )

    def _wait(self, processes: list[Process], timeout: float) -> str | None:
        """Waits for all ranks. Returns the reason of a failure, or None if all ranks succeeded."""
        started = time.monotonic()
        deadline = started + timeout
        reason = None
        while True:
            codes = [process.poll() for process in processes]
            failed = [rank for rank, code in enumerate(codes) if code]
            if None not in codes:
                return f"rank {failed[0]} failed" if failed and reason is None else reason
            if failed and reason is None:
                reason = f"rank {failed[0]} failed"
                deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
            if time.monotonic() > deadline:
                if reason is None:
                    running = [rank for rank, code in enumerate(codes) if code is None]
                    reason = f"ranks {running} still running after {timeout:g} s"
                _print_stacks(processes)
                return reason
            # Each poll is a request to the fork server, so long runs are polled less often.
            time.sleep(min(0.005 + (time.monotonic() - started) / 50, 0.2))

    def _output(self, rank: int) -> Path:
        return self.folder / f"output_{rank}.txt"

    def _read_output(self, rank: int) -> str:
        """Returns a rank's output without the report that Triton's bindings print at exit."""
        text = self._output(rank).read_text(errors="replace")
        return text.partition("nanobind: leaked")[0]

    def _report(self, rank: int, returncode: int | None) -> RankReport:
        return RankReport(rank, returncode, self._read_output(rank)[-OUTPUT_SHOWN:])


def _name_of(target: Callable[..., Any]) -> tuple[str, str]:
    """Returns the module and qualified name by which a new interpreter imports ``target``."""
    name = target.__qualname__
    if "<" in name or target.__module__ == "__main__":
        raise ValueError(f"{target!r} cannot be imported by name in a fresh interpreter")
    return target.__module__, name


def _reserve_port() -> socket.socket:
    """Returns a socket that is bound to a free port, and keeps other programs from this port.

    Rank 0 can listen on the port, because its store and this socket set SO_REUSEADDR.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind(("127.0.0.1", 0))
    return reserved


def _print_stacks(processes: list[Process]) -> None:
    """Signals every running rank to write the stacks of its threads to its output."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGUSR1)
    time.sleep(0.5)


def _stop(process: Process) -> None:
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _main(folder: Path, rank: int) -> None:
    """Runs one rank: reads the payload, joins the process group and calls the target."""
    payload = pickle.loads((folder / "payload.pkl").read_bytes())
    sys.path[:] = payload["path"]
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    # A killed parent cannot stop its ranks; the kernel does.
    die_with_parent()
    if payload["is_script"]:
        sys.argv = [payload["target"], *map(str, pickle.loads(payload["args"]))]
        sys.path.insert(0, str(Path(payload["target"]).parent))  # as `python SCRIPT` does
        runpy.run_path(payload["target"], run_name="__main__")
        wait_for_gloo_threads()
        return

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    world_size = int(os.environ["WORLD_SIZE"])
    module, qualname = payload["target"]
    function: Any = importlib.import_module(module)
    for part in qualname.split("."):
        function = getattr(function, part)
    gc.freeze()  # no collection of the modules that the rank has imported
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group(
        payload["backend"],
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=payload["collective_timeout"]),
    )
    # A rank that exits early would break gloo's connections while the other ranks still set up.
    store.set(f"joined/{rank}", "")
    store.wait([f"joined/{peer}" for peer in range(world_size)])
    result = function(rank, world_size, *pickle.loads(payload["args"]))
    partial = folder / f"result_{rank}.partial"
    partial.write_bytes(pickle.dumps(result))
    partial.rename(folder / f"result_{rank}.pkl")
    if dist.is_initialized():
        dist.destroy_process_group()
    wait_for_gloo_threads()


def wait_for_gloo_threads() -> None:
    """Waits until gloo's threads have released their tensors.

    gloo's threads take the GIL to release tensors that have Python objects, and DTensor's caches
    keep the group alive after its destruction. A thread that waits for the GIL during interpreter
    shutdown aborts the process, under torch and under fsdp_c. fsdp_c waits for these threads at
    exit. Ranks that run torch's FSDP2 need the same wait.
    """
    runpy.run_path(str(SHUTDOWN))["wait_for_threads"]()


def die_with_parent() -> None:
    """Requests SIGKILL for this process when its parent dies (Linux only)."""
    import ctypes

    try:
        set_death_signal = 1  # PR_SET_PDEATHSIG
        ctypes.CDLL(None).prctl(set_death_signal, signal.SIGKILL)
    except (OSError, AttributeError):
        pass


if __name__ == "__main__":
    arguments: list[str] | None = sys.argv[1:]
    if arguments == ["--serve"]:
        die_with_parent()
        arguments = fork_server.serve()
    try:
        if arguments is not None and arguments[0] == "--script":
            die_with_parent()
            sys.argv = arguments[1:]
            # As `python SCRIPT` does, except that the server's entries come last.
            sys.path[0] = str(Path(sys.argv[0]).parent)
            entries = os.environ.get("PYTHONPATH", "").split(os.pathsep)
            sys.path[1:1] = [entry for entry in entries if entry and entry not in sys.path]
            runpy.run_path(sys.argv[0], run_name="__main__")
        elif arguments is not None:
            _main(Path(arguments[0]), int(arguments[1]))
    except Exception:
        traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        # A failed rank exits at once: interpreter shutdown could wait for its peers.
        os._exit(1)
