"""Forks processes from a server that has imported torch, so that they do not import torch again.

The first call of ``start(arguments, env, output)`` starts this process's fork server. Each call
requests a child from the server. The result is a ``ForkedProcess``, which has the methods of
``subprocess.Popen`` that the launcher uses.

The child has its own environment, output file and session. The interpreter shuts down normally,
but it keeps the server's modules, and torch's static destructors do not run. The server never
imports fsdp_c. Its objects are frozen (``gc.freeze``), so that the garbage collector of a rank
neither scans them nor copies their pages.

``start_script``, ``run_script`` and ``run_code`` run a script instead of a rank, without the two
seconds in which a new interpreter imports torch. ``run_module`` calls ``runpy`` after the startup.
``ModuleServer`` forks within the startup, so the interpreter itself runs the module.

The protocol is one JSON document per line over the server's stdin and stdout. The response to
``{"start": ...}`` is a pid. The response to ``{"poll": pid}`` is an exit status (negative: a
signal) or null. The server exits when its client closes the pipe.
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
import tempfile
import time
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Includes modules that torch imports lazily for optimizers, compilation and functional transforms.
IMPORTED = (
    "torch",
    "torch._decomp",
    "torch.distributed.checkpoint.state_dict",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch._dynamo",
)

SCRIPT_LIMIT = 280
"""Seconds of a script, below pytest's limit of a test."""


class ForkedProcess:
    """A rank or a script that the fork server started."""

    def __init__(self, server: Server, pid: int) -> None:
        self.server = server
        self.pid = pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.server.send_request({"poll": self.pid})
        return self.returncode

    def send_signal(self, number: int) -> None:
        if self.poll() is None:  # The server has not reaped the child, so the pid is not reused.
            os.kill(self.pid, number)

    def wait(self, timeout: float | None = None) -> int:
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(f"forked process {self.pid}", timeout)
            time.sleep(0.01)
        return code


class Server:
    """The client's side of a fork server process, which runs ``command`` and :func:`serve`."""

    def __init__(self, command: list[str], env: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env | {"OMP_NUM_THREADS": "1"},
            start_new_session=True,
        )
        atexit.register(self.process.kill)

    def start(self, arguments: list[str], env: dict[str, str], **request: str) -> ForkedProcess:
        """Forks a child. ``request`` has its output file, and optionally ``errors`` and ``cwd``."""
        pid = self.send_request({"start": arguments, "env": env, **request})
        return ForkedProcess(self, pid)

    def send_request(self, request: dict[str, Any]) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())


@functools.cache
def _launcher() -> Server:
    """Returns the fork server of launch.py."""
    return Server([str(Path(__file__).with_name("launch.py")), "--serve"], {**os.environ})


def start(arguments: list[str], env: dict[str, str], output: Path, **request: str) -> ForkedProcess:
    """Forks a child that runs the launcher with ``arguments``. ``request``: see Server.start."""
    return _launcher().start(arguments, env, output=str(output), **request)


def find_pid() -> int:
    """Returns the pid of the fork server, which is the parent of the children."""
    return _launcher().process.pid


def start_script(script: Path, args: list[str], env: dict[str, str], output: Path) -> ForkedProcess:
    """Forks a child that runs ``script`` as ``python`` does. Creates the file ``output``."""
    output.touch()
    return start(["--script", str(script), *args], env, output)


def run_script(
    script: Path, *args: str, env: Mapping[str, str] = os.environ, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs ``script`` as ``python`` does, with PYTHONPATH of ``env``.

    Start a new interpreter to test imports at startup, or finalization.
    """
    with tempfile.TemporaryDirectory(prefix="fsdp_c_script_") as folder:
        output, errors = Path(folder, "output"), Path(folder, "errors")
        output.touch()
        errors.touch()
        child = start(
            ["--script", str(script), *args],
            {**env},
            output,
            errors=str(errors),
            cwd=str(cwd or Path.cwd()),
        )
        try:
            status = child.wait(SCRIPT_LIMIT)
        except subprocess.TimeoutExpired:
            child.send_signal(signal.SIGKILL)
            raise
        return subprocess.CompletedProcess(
            [script, *args], status, output.read_text(), errors.read_text()
        )


def run_code(
    code: str, env: Mapping[str, str] = os.environ, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` as :func:`run_script` runs a script."""
    with tempfile.TemporaryDirectory(prefix="fsdp_c_code_") as folder:
        script = Path(folder, "code.py")
        script.write_text(code)
        return run_script(script, env=env, cwd=cwd)


def make_module_script(module: str, cwd: Path) -> str:
    """Returns a script that runs ``module`` as ``python -m`` does in the folder ``cwd``."""
    return (
        f"import runpy, sys\nsys.path[0] = {str(cwd)!r}\n"
        f"runpy.run_module({module!r}, run_name='__main__', alter_sys=True)\n"
    )


def run_module(
    module: str, *args: str, env: Mapping[str, str] = os.environ, cwd: Path
) -> subprocess.CompletedProcess[str]:
    """Runs ``module`` with ``runpy``, after the startup of the interpreter."""
    code = f"import sys\nsys.argv[1:] = {[*args]!r}\n"
    return run_code(code + make_module_script(module, cwd), env=env, cwd=cwd)


class ModuleServer:
    """Forks interpreters that have imported torch, and then run ``python -m MODULE``.

    The server is a process ``python -m MODULE``. Its startup stops in ``sitecustomize``, which
    calls :func:`serve`. In a child, ``serve`` returns, ``sitecustomize`` sets ``sys.argv``, and the
    interpreter continues with the module.
    """

    def __init__(self, module: str, folder: Path, env: dict[str, str]) -> None:
        """``folder``: an empty folder. ``env`` contains the environment of the module's imports."""
        self.folder = folder
        (folder / "sitecustomize.py").write_text(
            f"import os, sys\nsys.path.insert(0, {str(Path(__file__).parent)!r})\n"
            "import fork_server\ndel sys.path[0]\n"
            "arguments = fork_server.serve(('torch', 'torch.distributed.fsdp'))\n"
            "if arguments is None:\n    os._exit(0)\nsys.argv[1:] = arguments\n"
        )
        path = os.pathsep.join([str(folder), env["PYTHONPATH"]])
        self.server = Server(["-m", module], env | {"PYTHONPATH": path})

    def run(
        self, *arguments: str, env: dict[str, str], cwd: Path
    ) -> subprocess.CompletedProcess[str]:
        """Runs the module in ``cwd``. Returns its exit status and output."""
        output, errors = self.folder / "output", self.folder / "errors"
        for path in (output, errors):
            path.write_text("")
        child = self.server.start(
            [*arguments], env, output=str(output), errors=str(errors), cwd=str(cwd)
        )
        return subprocess.CompletedProcess(
            arguments, child.wait(), output.read_text(), errors.read_text()
        )


def serve(imported: tuple[str, ...] = IMPORTED) -> list[str] | None:
    """Runs the server loop. Returns the arguments in a child, and None in the server at its end."""
    gc.disable()  # collections took a quarter of the time of the imports
    _import_modules(imported)
    gc.enable()
    gc.collect()
    gc.freeze()
    _skip_static_destructors_at_exit()
    requests, responses = os.dup(0), os.dup(1)
    os.dup2(2, 1)  # stdout carries responses only; other output goes to stderr
    buffered = b""
    while True:
        line, newline, buffered = buffered.partition(b"\n")
        if not newline:
            received = os.read(requests, 1 << 20)
            if not received:
                return None
            buffered = line + received
            continue
        request = json.loads(line)
        if "start" in request:
            response: int | None = os.fork()
            if response == 0:
                os.close(requests)
                os.close(responses)
                _detach_from_server(request)
                return list(request["start"])
        else:
            response = _poll(request["poll"])
        os.write(responses, json.dumps(response).encode() + b"\n")


def _import_modules(names: tuple[str, ...]) -> None:
    """Imports ``names``. A forked child does not finalize these modules or their imports at exit.

    The finalization would write to pages that are shared with the server, 0.09 s of CPU time per
    rank. A child still finalizes modules that it imports after the fork, such as fsdp_c.
    """
    before = {*sys.modules}
    imported: list[str] = []
    kept: list[Any] = []
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # the list outlives the interpreter

    def keep_modules() -> None:
        kept.extend(sys.modules.pop(name, None) for name in imported)

    atexit.register(keep_modules)  # before all handlers of the modules, and therefore called last
    for name in names:
        importlib.import_module(name)
    imported.extend(sys.modules.keys() - before)
    for finalizer in weakref.finalize._registry:
        finalizer.atexit = False  # torch unregisters its operators, which changes many pages


def _skip_static_destructors_at_exit() -> None:
    """Makes the process exit before torch's static destructors run.

    C's exit() calls handlers in reverse order of registration. torch registers destructors while it
    is imported; they took 0.15 s, half of the CPU time of a short rank. Python's finalization and
    the destructors of libraries loaded after the fork, such as fsdp_c, still run.
    """
    libc = ctypes.CDLL(None)
    libc.on_exit(libc._exit, None)  # on_exit passes the exit status to _exit


def _poll(pid: int) -> int | None:
    ended_pid, status = os.waitpid(pid, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if ended_pid else None


def _detach_from_server(request: dict[str, Any]) -> None:
    """Moves the child to a new session, with the request's files, folder and environment."""
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    null, output = os.open(os.devnull, os.O_RDONLY), os.open(request["output"], os.O_WRONLY)
    errors = os.open(request["errors"], os.O_WRONLY) if "errors" in request else os.dup(output)
    for source, target in ((null, 0), (output, 1), (errors, 2)):
        os.dup2(source, target)
        os.close(source)
    os.chdir(request.get("cwd", "."))
    for name in os.environ.keys() - request["env"].keys():
        del os.environ[name]
    os.environ.update(request["env"])
