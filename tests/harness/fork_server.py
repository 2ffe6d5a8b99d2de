"""Ranks by fork, from a process that has imported torch: each saves the seconds of that import.

``start(command, env, output)`` asks this process's server, begun on first use, for a child and
returns a ``ForkedRank``, which has what the launcher needs of ``subprocess.Popen``. The child is a
process of its own from the first line of the launcher's part on, with its own environment, output
and session, and its interpreter ends as any does; torch's destructors are left out. fsdp_c is not
imported before the fork. What is there at the fork is frozen: collections in ranks would look at
all of torch's objects, and so copy them.

The server speaks JSON lines over its standard streams: ``{"start": ...}`` is answered with a pid,
``{"poll": pid}`` with an exit status (negative: a signal) or null. It ends with its client.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# With what torch itself imports late, for optimizers, compilation and functional transforms.
IMPORTED = (
    "torch",
    "torch._decomp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
)


class ForkedRank:
    """A child of the server."""

    def __init__(self, server: Server, pid: int) -> None:
        self.server = server
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.server.ask({"poll": self.pid})
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # not waited for, so that the pid is still its own
            os.kill(self.pid, number)

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.01)
        return code


class Server:
    """The client's end of a server."""

    def __init__(self) -> None:
        launcher = Path(__file__).with_name("launch.py")
        self.process = subprocess.Popen(
            [sys.executable, str(launcher), "--serve"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        atexit.register(self.process.kill)

    def ask(self, request: dict[str, Any]) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


_server = functools.cache(Server)


def start(arguments: list[str], env: dict[str, str], output: Path) -> ForkedRank:
    """Run the launcher's part with ``arguments`` in a new child."""
    server = _server()
    request = {"start": arguments, "env": env, "output": str(output)}
    return ForkedRank(server, server.ask(request))


def serve() -> list[str] | None:
    """The life of a server. In a child: its arguments; in the server, at its end: None."""
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()
    _end_before_what_is_registered()
    requests, answers = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # nothing but answers goes to the client
    buffered = b""
    while True:
        line, found, buffered = buffered.partition(b"\n")
        if not found:
            more = os.read(requests, 1 << 20)
            if not more:
                return None
            buffered = line + more
            continue
        request = json.loads(line)
        if "start" in request:
            answer: int | None = os.fork()
            if answer == 0:
                os.close(requests)
                os.close(answers)
                _become(request)
                return list(request["start"])
        else:
            answer = _poll(request["poll"])
        os.write(answers, json.dumps(answer).encode() + b"\n")


def _end_before_what_is_registered() -> None:
    """C's exit() calls last what was registered first. Half of the CPU time of a short rank went to
    destructors that torch registers while it is imported (0.15 s). Python's own end comes before,
    and so do the destructors of what a rank loads after the fork, fsdp_c's too."""
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # with the status


def _poll(pid: int) -> int | None:
    done, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if done else None


def _become(request: dict[str, Any]) -> None:
    """The child leaves the server's session, streams and environment."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    null, output = os.open(os.devnull, os.O_RDONLY), os.open(request["output"], os.O_WRONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(null)
    os.close(output)
    for name in os.environ.keys() - request["env"].keys():
        del os.environ[name]
    os.environ.update(request["env"])
