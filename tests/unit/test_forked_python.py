"""forked_python.py: the program behaves as the Python interpreter that it replaces."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import forked_python
import pytest

FACTS = """
import os, sys
print(sys.argv[1:], __name__, os.getcwd(), os.getppid(), os.environ["NAME"])
print(sys.path[:2], sys.stdin.read(), file=sys.stderr)
"""


def run(python: str, *arguments: str, cwd: Path) -> tuple[int, str, str]:
    """Returns the exit status, the output, and the last line of the errors.

    With torch 2.15 a forked process has imported Triton. At its exit, nanobind writes a list.
    """
    env = os.environ | {"NAME": "value", "PYTHONPATH": str(cwd)}
    completed = subprocess.run(
        [python, *arguments], cwd=cwd, env=env, input="input", capture_output=True, text=True
    )
    errors = completed.stderr.partition("nanobind: leaked")[0].strip()
    return completed.returncode, completed.stdout, errors.rpartition("\n")[2]


@pytest.mark.parametrize(
    "arguments",
    [
        ["facts.py", "a", "b c"],
        ["-u", "-m", "facts", "-x"],
        ["-c", FACTS, "a"],
        ["-E", "-c", "import sys; print(sys.executable, sys.flags.ignore_environment)"],
        ["-c", "raise SystemExit(3)"],
        ["-c", "raise ValueError('text')"],
        ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGTERM)"],
        ["-c", "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"],
    ],
    ids=str,
)
def test_forked_python_has_output_and_exit_status_of_python(
    arguments: list[str], tmp_path: Path
) -> None:
    (tmp_path / "facts.py").write_text(FACTS)
    expected = run(sys.executable, *arguments, cwd=tmp_path)
    assert run(forked_python.make_program(), *arguments, cwd=tmp_path) == expected


def test_forked_python_starts_processes_with_imported_torch() -> None:
    code = "import subprocess, sys; print('torch' in sys.modules, flush=True)"
    code += "\nif sys.argv[1:]: subprocess.run([sys.executable, '-c', sys.argv[1]], check=True)"
    command = [forked_python.make_program(), "-c", code, code]
    completed = subprocess.run(command, capture_output=True, text=True)
    assert completed.stdout == "True\nTrue\n", completed.stderr


def test_forked_python_with_fsdp_c_variable_starts_new_interpreter() -> None:
    command = [forked_python.make_program(), "-c", "import sys; print('torch' in sys.modules)"]
    env = os.environ | {"FSDP_C": "1"}
    completed = subprocess.run(command, env=env, capture_output=True, text=True)
    assert completed.stdout == "False\n", completed.stderr


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_signal_to_forked_python_ends_the_process(number: signal.Signals) -> None:
    code = "import signal; print('started', flush=True); signal.pause()"
    command = [forked_python.make_program(), "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "started\n"
        process.send_signal(number)
        assert process.communicate(timeout=50)[0] == ""  # the process has closed its output
    assert process.returncode == -number
