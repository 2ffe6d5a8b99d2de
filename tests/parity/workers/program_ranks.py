"""Processes that run programs: one server per implementation forks the ranks.

    python program_ranks.py torch|fsdp_c

A server reads ``{"program": [[name, arguments], ...], "world": n, "seconds": s, "mistake": m}`` and
writes, for each rank, a list of lines per operation and how the rank ended ("" is success). A rank
that crashes or hangs has no further lines. Ranks are forked from a process that has imported all
modules, so a program takes a tenth of a second.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

from launch import die_with_parent

HERE = Path(__file__).resolve()
COLLECTIVE_SECONDS = 15
"""Timeout of collectives, which ends mismatched ranks. It is less than the time of a program."""

Step = tuple[str, dict[str, Any]]
"""The name and the arguments of an operation."""
RankOutcome = tuple[list[list[str]], str]
"""The lines of each operation that ran, and how the rank ended."""


class Server:
    """The server process of one implementation, with the pipes to it."""

    def __init__(self, implementation: str) -> None:
        self.implementation = implementation
        self.process = subprocess.Popen(
            [sys.executable, str(HERE), implementation],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            start_new_session=True,
        )

    def send_program(
        self, program: list[Step], world: int, seconds: float, mistake: str = ""
    ) -> None:
        assert self.process.stdin is not None
        request = {"program": program, "world": world, "seconds": seconds, "mistake": mistake}
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()

    def read_outcomes(self) -> list[RankOutcome]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"the server of {self.implementation} has ended")
        return [(lines, end) for lines, end in json.loads(line)]

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


# ---- in a server ----


def serve(implementation: str) -> None:
    for name in ("fork_server", "programs", "program_mistakes", implementation):
        importlib.import_module(name)
    for name in sys.modules["fork_server"].IMPORTED:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    gc.collect()
    gc.freeze()
    responses = os.dup(1)
    os.dup2(2, 1)
    for line in sys.stdin:
        results = run(implementation, **json.loads(line))
        with os.fdopen(os.dup(responses), "wb") as stream:
            stream.write(json.dumps(results).encode() + b"\n")


def run(
    implementation: str, program: list[Any], world: int, seconds: float, mistake: str
) -> list[RankOutcome]:
    """Forks all ranks of a program and waits for them."""
    with tempfile.TemporaryDirectory(prefix="fsdp_c_program_") as folder:
        children = []
        for rank in range(world):
            reading, writing = os.pipe()
            pid = os.fork()
            if pid == 0:
                os.close(reading)
                if mistake:
                    sys.modules["program_mistakes"].MISTAKES[mistake].apply()
                run_forked_rank(implementation, program, rank, world, Path(folder), writing)
            os.close(writing)
            children.append((pid, reading))
        return collect(children, folder, time.monotonic() + seconds)


def run_forked_rank(
    implementation: str, program: list[Any], rank: int, world: int, folder: Path, writing: int
) -> None:
    """Runs a rank in the forked process, and exits."""
    status = 1
    try:
        os.setsid()
        output = os.open(folder / f"output_{rank}", os.O_WRONLY | os.O_CREAT)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.enable()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        die_with_parent()
        with os.fdopen(writing, "w", buffering=1) as stream:
            run_rank(implementation, program, rank, world, folder, stream)
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
    finally:
        os._exit(status)


def run_rank(
    implementation: str, program: list[Any], rank: int, world: int, folder: Path, stream: Any
) -> None:
    from datetime import timedelta

    import torch
    import torch.distributed as dist
    from behavior import Api
    from program_world import World, run_operation
    from programs import OPERATIONS, unpack_arguments

    store: Any = dist.FileStore(str(folder / "store"), world) if world > 1 else dist.HashStore()
    dist.init_process_group(
        "gloo",
        store=store,
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=COLLECTIVE_SECONDS),
    )
    objects = World(Api(implementation, rank, world, folder))
    for number, (name, arguments) in enumerate(program):
        torch.manual_seed(number)
        random.seed(number)
        arguments = unpack_arguments(name, arguments)
        print(number, name, arguments, flush=True)
        function = OPERATIONS[name].function
        lines = run_operation(objects, lambda: function(objects, **arguments))  # noqa: B023
        stream.write(json.dumps(lines) + "\n")
        stream.flush()
    wait_for_peers(store, rank, world)


def wait_for_peers(store: Any, rank: int, world: int) -> None:
    """Waits until all ranks have ended, so that none loses its peer during a collective."""
    if world > 1:
        store.set(f"end/{rank}", "")
        store.wait([f"end/{peer}" for peer in range(world)])


def collect(children: list[tuple[int, int]], folder: str, deadline: float) -> list[RankOutcome]:
    """Collects the lines of all ranks and how they ended. Kills ranks after ``deadline``."""
    texts = {reading: b"" for _, reading in children}
    open_pipes = set(texts)
    while open_pipes and (seconds := deadline - time.monotonic()) > 0:
        for reading in select.select(list(open_pipes), [], [], seconds)[0]:
            data = os.read(reading, 1 << 16)
            texts[reading] += data
            if not data:
                open_pipes.discard(reading)
    results = []
    for rank, (pid, reading) in enumerate(children):
        is_late = reading in open_pipes
        if is_late:
            os.kill(pid, signal.SIGUSR1)
            time.sleep(0.3)
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        os.close(reading)
        code = os.waitstatus_to_exitcode(status)
        end = "" if code == 0 else "hung" if is_late else f"ended with {code}"
        if end:
            output = Path(folder, f"output_{rank}").read_text(errors="replace")
            end = f"{end}\n{output[-6000:]}"
        lines = texts[reading].decode().splitlines()
        results.append(([json.loads(line) for line in lines if line.endswith("]")], end))
    return results


if __name__ == "__main__":
    serve(sys.argv[1])
