"""A program that tests run in place of the Python interpreter, without the import of torch.

``make_program()`` returns the path of the program. Like ``python``, it runs a script, a module
(``-m``) or code (``-c``), with its own environment, folder, standard files, signals and exit
status. A server, which the fork server (fork_server.py) has forked, forks the process. In that
process ``sys.executable`` is the program, so that further processes are forked, too.

The program starts a new interpreter for options other than ``-u``, and for ``FSDP_C=1``, which
takes effect at the import of torch.
"""

from __future__ import annotations

import ast
import atexit
import contextlib
import functools
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import fork_server

SHUTDOWN = Path(__file__).resolve().parents[2] / "fsdp_c/_compat/shutdown.py"
PROGRAM = """#!{python} -IS
import os, signal, socket, sys

words = sys.argv[1:]
if words[:1] == ["-u"]:
    del words[0]
first = "".join(words[:1])
is_forked = first in ("-m", "-c") or first[:1] not in ("", "-")
if not is_forked or os.environ.get("FSDP_C", "0") not in ("", "0"):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
server.connect({path!r})

def forward(number, _):
    try:
        server.send(bytes([number]))
    except OSError:  # the process has ended
        pass

for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, forward)
request = (words, {{**os.environ}}, os.getcwd(), os.getppid(), __file__)
socket.send_fds(server, [repr(request).encode()], [0, 1, 2])
status = int(server.recv(100) or 1)
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
"""


@functools.cache
def make_program() -> str:
    """Starts the server. Returns the path of the program."""
    folder = Path(tempfile.mkdtemp(prefix="fsdp_c_python_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    program, path = folder / "python", folder / "socket"
    program.write_text(PROGRAM.format(python=sys.executable, path=str(path)))
    program.chmod(0o755)
    output = folder / "output"
    server = fork_server.start_script(Path(__file__), [str(path)], {**os.environ}, output)
    deadline = time.monotonic() + 60
    while not path.exists():
        assert server.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.01)
    return str(program)


def main(path: str) -> None:
    """Runs the server, until the fork server ends."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps the children
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path + ".new")
        listener.listen()
        os.rename(path + ".new", path)
        while True:
            connection, _ = listener.accept()
            if os.fork() == 0:
                break
            connection.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, files, _, _ = socket.recv_fds(connection, 1 << 20, 3)
    if not request:  # the program was killed
        os._exit(0)
    if pid := os.fork():
        for file in files:
            os.close(file)
        _wait(connection, pid)
        os._exit(0)
    connection.close()
    _run(files, *ast.literal_eval(request.decode()))


def _wait(connection: socket.socket, pid: int) -> None:
    """Waits for the forked process, sends it the program's signals, and sends its exit status.

    If the program is killed, so are the process and its group.
    """
    process, program_lives = os.pidfd_open(pid), True
    while program_lives and process not in select.select([connection, process], [], [])[0]:
        if number := connection.recv(1):
            os.kill(pid, number[0])
        else:
            with contextlib.suppress(ProcessLookupError):  # it has not made its group yet
                os.killpg(pid, signal.SIGKILL)
            os.kill(pid, signal.SIGKILL)
            program_lives = False
    _, status = os.waitpid(pid, 0)
    if program_lives:
        connection.send(str(os.waitstatus_to_exitcode(status)).encode())


def _split_path(environment: Mapping[str, str]) -> list[str]:
    return [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry]


def _run(
    files: list[int],
    words: list[str],
    environment: dict[str, str],
    cwd: str,
    parent: int,
    program: str,
) -> None:
    """Runs ``words`` as ``python`` does, with ``files`` as the standard files."""
    os.setpgid(0, 0)
    for target, file in enumerate(files):
        os.dup2(file, target)
        os.close(file)
    os.chdir(cwd)
    server_path = [str(Path(__file__).parent), *_split_path(os.environ)]
    os.environ.clear()
    os.environ.update(environment)
    os.getppid = lambda: parent  # the parent of the program
    sys.executable = program
    sys.stdout.reconfigure(write_through=True)
    sys.modules.pop("fork_server", None)  # the process may have another copy of the tests
    kind, name = (words[0], words[1]) if words[0].startswith("-") else ("", words[0])
    sys.argv = ["-c" if kind == "-c" else name, *words[2 if kind else 1 :]]
    first = {"-m": cwd, "-c": ""}.get(kind, str(Path(name).resolve().parent))
    installed = [entry for entry in sys.path if entry not in server_path]
    sys.path[:] = [first, *_split_path(environment), *installed]
    if "PYTHONSAFEPATH" in environment:
        del sys.path[0]
    # As in launch.py: a thread that requests the GIL at the end would abort the process.
    runpy.run_path(str(SHUTDOWN))["register_at_exit"]()
    if kind == "-m":
        runpy.run_module(name, run_name="__main__", alter_sys=True)
    elif kind == "-c":
        exec(compile(name, "<string>", "exec"), {"__name__": "__main__"})
    else:
        runpy.run_path(name, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1])
