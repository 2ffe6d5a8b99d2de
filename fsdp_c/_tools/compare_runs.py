"""Runs of ``compare``: processes of the local ranks, their rendezvous, and their exit statuses.

Each process of torchrun is a supervisor. It starts one child process per run, for its own rank.
Supervisors share a key-value store. Supervisor 0 has another store per run, to which the children
connect as they connect to torchrun's, so runs share no port and no key.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

OBSERVER = Path(__file__).with_name("compare_observer.py")
PACKAGE_ROOT = Path(__file__).resolve().parents[2]

GRACE_SECONDS = 10.0
"""Seconds that ranks may continue after one has failed, so that they can fail with a message."""

ANSWER_SECONDS = 60.0
"""Seconds to wait for a supervisor that has nothing to do but to answer."""

CHUNK_BYTES = 1 << 20
"""The largest number of bytes of one value in the store."""

TAIL_LINES = 25
"""Lines of a failed rank's output that are shown."""


@dataclass(frozen=True)
class Job:
    """The script and the settings that all runs share. ``timeout`` is in seconds per run."""

    arguments: tuple[str, ...]
    as_module: bool
    steps: int
    seed: int
    timeout: float


@dataclass(frozen=True)
class Run:
    """One run of the script. ``number`` counts all runs from 0, ``round`` counts from 1."""

    number: int
    round: int
    implementation: str

    @property
    def name(self) -> str:
        return f"{self.implementation}-{self.round}"


@dataclass
class Exit:
    """The end of one rank's process.

    Attributes:
        error: The reason of the failure; empty if the process succeeded.
        order: The number of processes that had ended before, of all ranks, plus one.
        is_secondary: Whether the process was stopped because another rank had failed.
        tail: The last lines of the output of a failed process.
        log: The file with the whole output of a failed process.
    """

    rank: int
    error: str
    order: int = 0
    is_secondary: bool = False
    tail: str = ""
    log: str = ""


class SupervisorLost(RuntimeError):
    """The supervisor of another rank did not answer."""


# ---- supervisors ---------------------------------------------------------------------------------


class Supervisor:
    """The ranks of this process, and the store that it shares with the other supervisors."""

    def __init__(
        self, ranks: list[int], world_size: int, store: Any, is_torchrun: bool = False
    ) -> None:
        self.ranks = ranks
        self.world_size = world_size
        self.store = store
        self.is_torchrun = is_torchrun
        self.is_first = ranks[0] == 0

    @classmethod
    def connect(cls, processes: int | None) -> Supervisor:
        """Joins the supervisors of torchrun's ranks, or supervises ``processes`` local ranks.

        Raises:
            ValueError: ``processes`` is given, and torchrun has started this process.
        """
        if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
            if processes is not None:
                raise ValueError(
                    "give --nproc-per-node to torchrun, which started this rank, not to compare"
                )
            store, rank, world = next(
                dist.rendezvous("env://", timeout=timedelta(seconds=ANSWER_SECONDS))
            )
            store = dist.PrefixStore("fsdp_c_compare", store)
            return cls([rank], world, store, is_torchrun=True)
        return cls(list(range(processes or 1)), processes or 1, dist.HashStore())

    def make_environment(self, rank: int) -> dict[str, str]:
        """Returns the variables that torchrun would set for ``rank``; empty under torchrun."""
        if self.is_torchrun:
            return {}
        world = str(self.world_size)
        variables = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": world}
        variables |= {"LOCAL_WORLD_SIZE": world, "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1"}
        variables |= {"MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "compare"}
        if self.world_size > 1 and "OMP_NUM_THREADS" not in os.environ:
            variables["OMP_NUM_THREADS"] = "1"
        return variables

    def put(self, key: str, value: Any) -> None:
        """Stores a value that JSON can represent."""
        data = zlib.compress(json.dumps(value).encode())
        chunks = [data[i : i + CHUNK_BYTES] for i in range(0, len(data), CHUNK_BYTES)]
        for i, chunk in enumerate(chunks):
            self.store.set(f"{key}/{i}", chunk)
        self.store.set(key, str(len(chunks)))

    def get(self, key: str, limit: float = ANSWER_SECONDS) -> Any:
        """Waits at most ``limit`` seconds for a value.

        Raises:
            SupervisorLost: There is no value within that time.
        """
        deadline = time.monotonic() + limit
        try:
            while not self.store.check([key]):
                if time.monotonic() > deadline:
                    raise SupervisorLost(f"no answer to {key} within {limit:g} s")
                time.sleep(0.05)
            count = int(self.store.get(key))
            data = b"".join(self.store.get(f"{key}/{i}") for i in range(count))
        except (dist.DistError, RuntimeError) as error:
            if isinstance(error, SupervisorLost):
                raise
            raise SupervisorLost(f"the store of the supervisors is closed: {error}") from None
        return json.loads(zlib.decompress(data))

    def finish(self, code: int | None) -> int:
        """Ends all supervisors with the exit code of the first one.

        Only the first one gives ``code``; the others give None. torchrun stops the other ranks as
        soon as one has failed, so none may exit before the first supervisor has printed its report.
        """
        if self.is_first:
            self.put("code", code)
        else:
            code = self.get("code", limit=600)
        with contextlib.suppress(dist.DistError, RuntimeError):
            acknowledged = self.store.add("acknowledged", len(self.ranks))
            deadline = time.monotonic() + 5
            while self.is_first and acknowledged < self.world_size and time.monotonic() < deadline:
                time.sleep(0.02)
                acknowledged = self.store.add("acknowledged", 0)
        assert code is not None
        return code


# ---- one run -------------------------------------------------------------------------------------


@dataclass
class Child:
    """The process of one rank, and the files of its records and its output."""

    rank: int
    process: subprocess.Popen[bytes]
    record: Path
    log: Path
    error: str | None = None  # None while it runs
    is_secondary: bool = False


@dataclass
class Launch:
    """The processes of the local ranks in one run."""

    job: Job
    run: Run
    supervisor: Supervisor
    folder: Path
    children: list[Child] = field(default_factory=list)

    def execute(self) -> list[Exit]:
        """Runs the script once on all ranks. Returns the end of each rank, in order."""
        supervisor, key = self.supervisor, f"run/{self.run.number}"
        server = None
        if supervisor.is_first:
            server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
            supervisor.put(f"{key}/port", server.port)
        try:
            port = supervisor.get(f"{key}/port", self.job.timeout + ANSWER_SECONDS)
            for rank in supervisor.ranks:
                self.children.append(self._start(rank, port))
            self._wait(key)
        finally:
            for child in self.children:
                stop_group(child.process)
        limit = self.job.timeout + GRACE_SECONDS + ANSWER_SECONDS
        exits = [supervisor.get(f"{key}/exit/{r}", limit) for r in range(supervisor.world_size)]
        del server  # the children that used it have exited
        return [Exit(**fields) for fields in exits]

    def _start(self, rank: int, port: int) -> Child:
        stem = self.folder / f"{self.run.name}-rank{rank}"
        record, log, settings = (
            stem.with_name(stem.name + end) for end in (".jsonl", ".log", ".json")
        )
        arguments = [part.replace("{run}", self.run.name) for part in self.job.arguments]
        settings.write_text(
            json.dumps(
                {
                    "arguments": arguments,
                    "as_module": self.job.as_module,
                    "implementation": self.run.implementation,
                    "steps": self.job.steps,
                    "seed": self.job.seed,
                    "count_collectives": self.run.round == 1,
                    "stacks_after": max(self.job.timeout - 2, self.job.timeout / 2),
                    "record": str(record),
                    "package_root": str(PACKAGE_ROOT),
                    "supervisor": os.getpid(),
                    "world_size": self.supervisor.world_size,
                }
            )
        )
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *_interpreter_options(), str(OBSERVER), str(settings)],
                env=self._make_environment(rank, port),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Child(rank, process, record, log)

    def _make_environment(self, rank: int, port: int) -> dict[str, str]:
        environment = {**os.environ, **self.supervisor.make_environment(rank)}
        for name in ("FSDP_C", "TORCHELASTIC_ERROR_FILE"):
            environment.pop(name, None)
        if self.run.implementation == "fsdp_c":
            environment["FSDP_C"] = "1"
        environment |= {
            "MASTER_PORT": str(port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # supervisor 0 has the store
            "TORCHELASTIC_RESTART_COUNT": "0",
            "PYTHONUNBUFFERED": "1",
        }
        environment.setdefault("PYTHONHASHSEED", str(self.job.seed))
        return environment

    def _wait(self, key: str) -> None:
        """Waits for the children and publishes their ends. Stops them after another's failure."""
        store = self.supervisor.store
        deadline = time.monotonic() + self.job.timeout
        stop_at = float("inf")
        while any(child.error is None for child in self.children):
            for child in self.children:
                if child.error is None and child.process.poll() is not None:
                    child.error = describe_end(child)
                    self._publish(key, child)
            now = time.monotonic()
            if stop_at == float("inf") and store.check([f"{key}/failed"]):
                stop_at = now + GRACE_SECONDS
            if now > min(deadline, stop_at):
                self._stop_all(key, is_late=now > deadline)
            time.sleep(0.05)

    def _stop_all(self, key: str, is_late: bool) -> None:
        for child in self.children:
            if child.error is None:
                stop_group(child.process)
                child.is_secondary = not is_late
                child.error = "stopped, because another rank had failed"
                if is_late:
                    child.error = f"still running after {self.job.timeout:g} s (--timeout)"
                self._publish(key, child)

    def _publish(self, key: str, child: Child) -> None:
        store = self.supervisor.store
        order = store.add(f"{key}/order", 1)
        end = Exit(child.rank, child.error or "", order, child.is_secondary)
        if end.error:
            end.tail, end.log = read_tail(child.log), str(child.log)
            store.set(f"{key}/failed", "1")
        self.supervisor.put(f"{key}/exit/{child.rank}", vars(end))


def _interpreter_options() -> list[str]:
    return subprocess._args_from_interpreter_flags()  # type: ignore[attr-defined]


def describe_end(child: Child) -> str:
    """Returns the error of a process that has ended, or "" if it succeeded.

    A process that made all its steps has succeeded, whatever its exit code is.
    """
    code = child.process.returncode
    if code == 0 or any("stopped" in record for record in read_records(child.record)):
        return ""
    if code < 0:
        return f"killed by {name_signal(-code)}"
    return f"exit code {code}"


def name_signal(number: int) -> str:
    """Returns ``SIGSEGV``, for example. Real-time signals have no names: ``signal 40``."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """Yields the records of a process. The last line may be incomplete."""
    with contextlib.suppress(FileNotFoundError, json.JSONDecodeError), path.open() as file:
        for line in file:
            yield json.loads(line)


def read_tail(path: Path) -> str:
    """Returns the last lines of a file."""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - 20_000))
        lines = file.read().decode(errors="replace").splitlines()
    return "\n".join(lines[-TAIL_LINES:])


def stop_group(process: subprocess.Popen[bytes]) -> None:
    """Ends a process and those that it started: SIGTERM, and SIGKILL after two seconds."""
    if process.poll() is None:
        _signal_group(process, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(2)
    _signal_group(process, signal.SIGKILL)
    process.wait()


def _signal_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


def find_first_failure(exits: list[Exit]) -> Exit | None:
    """Returns the end of the rank that failed first, or None. Ranks that were stopped come last."""
    failed = [end for end in exits if end.error]
    return min(failed, key=lambda end: (end.is_secondary, end.order), default=None)
