"""Interpreter exit waits for torch's threads that need the GIL, and a model cannot train then."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import fsdp_c._compat.shutdown

# A daemon thread runs for sys.argv[1] seconds without the GIL, as torch's threads do. sys.argv[2]
# is the longest wait. Prints whether wait_for_threads returned after the thread's end. The module
# is imported without the package, and therefore without torch.
PROGRAM = f"""
import hashlib, sys, threading, time
sys.path.insert(0, {str(Path(fsdp_c._compat.shutdown.__file__).parent)!r})
import shutdown
ended = threading.Event()
def work():  # pbkdf2_hmac releases the GIL
    while time.monotonic() < until:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)
    ended.set()
until = time.monotonic() + float(sys.argv[1])
threading.Thread(target=work, daemon=True).start()
shutdown.MAX_WAIT = float(sys.argv[2])
shutdown.wait_for_threads()
print(ended.is_set())
"""


# An object in sys.modules trains a model in its finalizer, during interpreter exit.
TRAINING_AT_EXIT = """
import sys, torch, torch.distributed as dist, torch.nn as nn
import fsdp_c
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fsdp_c.fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
x = torch.ones(2, 8)
model(x).sum().backward()
class TrainsInFinalizer:
    def __del__(self, model=model, x=x, no_grad=torch.no_grad, sys=sys):
        with no_grad():
            model(x)
        sys.stderr.write("evaluated\\n")
        try:
            model(x).sum().backward()
        except RuntimeError as error:
            sys.stderr.write(str(error))
sys.modules["freed at exit"] = TrainsInFinalizer()
"""


def run_program(seconds: float, longest_wait: float) -> str:
    command = [sys.executable, "-c", PROGRAM, str(seconds), str(longest_wait)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_wait_for_threads_returns_after_the_end_of_a_running_thread() -> None:
    assert run_program(0.3, float("inf")) == "True"


def test_wait_for_threads_returns_after_timeout() -> None:
    assert run_program(60, fsdp_c._compat.shutdown.MAX_WAIT) == "False"


@pytest.mark.parametrize(
    ("state", "seconds"),
    [
        ("R", fsdp_c._compat.shutdown.MAX_WAIT),
        ("S", fsdp_c._compat.shutdown.MIN_WAIT),
        ("no /proc", fsdp_c._compat.shutdown.MIN_WAIT),
    ],
)
def test_wait_for_threads_takes_the_shortest_time_unless_a_thread_runs(
    state: str, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    clock = SimpleNamespace(sleep=slept.append, monotonic=lambda: sum(slept))
    monkeypatch.setattr(fsdp_c._compat.shutdown, "time", clock)
    threads = tmp_path / "task"
    monkeypatch.setattr(fsdp_c._compat.shutdown, "THREADS", str(threads))
    if state != "no /proc":
        (threads / "1").mkdir(parents=True)
        (threads / "1/stat").write_text(f"1 (thread) {state} 1 2 3\n")
    fsdp_c._compat.shutdown.wait_for_threads()
    assert sum(slept) == pytest.approx(seconds, abs=fsdp_c._compat.shutdown.PAUSE)


def test_forward_registers_wait_for_threads_as_exit_function() -> None:
    """gloo's threads abort a process that exits while they wait for the GIL, so exit must wait."""
    program = (
        "import atexit, fsdp_c._compat.shutdown; waited = []\n"
        "fsdp_c._compat.shutdown.wait_for_threads = lambda: waited.append(1)\n"
        "import torch, torch.nn as nn, torch.distributed as dist, fsdp_c\n"
        "from torch.testing._internal.distributed.fake_pg import FakeStore\n"
        "dist.init_process_group('fake', store=FakeStore(), rank=0, world_size=2)\n"
        "fsdp_c.fully_shard(nn.Linear(2, 2))(torch.ones(1, 2))\n"
        "atexit._run_exitfuncs()\n"
        "print(waited)\n"
    )
    completed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert completed.stdout.endswith("[1]\n"), completed.stderr


def test_sleeping_or_finished_threads_do_not_count_as_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thread names may contain parentheses. Thread 3 has no stat file, as if it had finished."""
    for number, state in (("1", "S"), ("2", "S")):
        (tmp_path / number).mkdir()
        (tmp_path / number / "stat").write_text(f"{number} (R) R 1) {state} 1 2 3\n")
    (tmp_path / "3").mkdir()
    monkeypatch.setattr(fsdp_c._compat.shutdown, "THREADS", str(tmp_path))
    assert not fsdp_c._compat.shutdown._has_running_threads()
    (tmp_path / "2/stat").write_text("2 (pt_autograd_0) R 1 2 3\n")
    assert fsdp_c._compat.shutdown._has_running_threads()


def test_forward_with_gradients_during_interpreter_shutdown_raises() -> None:
    """torch's FSDP2 raises, too, with another message. Training would end in SIGABRT."""
    completed = subprocess.run(
        [sys.executable, "-c", TRAINING_AT_EXIT], capture_output=True, text=True, check=False
    )
    assert completed.returncode == 0
    assert "evaluated\n" in completed.stderr
    assert "Exception ignored" not in completed.stderr
    assert "the root module (FSDPSequential) cannot be trained while the interp" in completed.stderr
