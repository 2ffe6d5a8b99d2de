"""The end of the interpreter: threads of torch's that still want the GIL are waited for."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import fsdp_c.ending

PROGRAM = """
import hashlib, sys, threading, time
from fsdp_c import ending
ended = threading.Event()
def work():  # without the GIL, as torch's threads do
    while time.monotonic() < until:
        hashlib.pbkdf2_hmac("sha256", b"", b"", 100_000)
    ended.set()
begin = time.monotonic()
until = begin + float(sys.argv[1])
threading.Thread(target=work, daemon=True).start()
if sys.argv[2] == "no /proc":
    ending.THREADS = "/nowhere"
ending.wait_for_threads()
print(ended.is_set(), time.monotonic() - begin < until - begin + 1)
"""


LATE = """
import sys, torch, torch.distributed as dist, torch.nn as nn
import fsdp_c
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
model = fsdp_c.fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)))
x = torch.ones(2, 8)
model(x).sum().backward()
class Late:
    def __del__(self, model=model, x=x, no_grad=torch.no_grad, sys=sys):
        with no_grad():
            model(x)
        try:
            model(x).sum().backward()
        except RuntimeError as error:
            sys.stderr.write(str(error))
sys.modules["outlives the program"] = Late()
"""


def ends(seconds: float, machine: str = "Linux") -> str:
    command = [sys.executable, "-c", PROGRAM, str(seconds), machine]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_a_thread_that_runs_is_waited_for() -> None:
    assert ends(0.3) == "True True"


def test_but_not_for_ever() -> None:
    assert ends(60) == "False True"


def test_where_threads_cannot_be_seen_only_a_moment() -> None:
    assert ends(60, "no /proc") == "False True"


def test_a_thread_that_sleeps_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither is one whose name has a parenthesis in it, nor one that has ended meanwhile."""
    for number, state in (("1", "S"), ("2", "S")):
        (tmp_path / number).mkdir()
        (tmp_path / number / "stat").write_text(f"{number} (R) R 1) {state} 1 2 3\n")
    (tmp_path / "3").mkdir()
    monkeypatch.setattr(fsdp_c.ending, "THREADS", str(tmp_path))
    assert not fsdp_c.ending._others_run()
    (tmp_path / "2/stat").write_text("2 (pt_autograd_0) R 1 2 3\n")
    assert fsdp_c.ending._others_run()


def test_a_model_is_not_trained_by_what_outlives_the_program() -> None:
    """It was, and the process ended by SIGABRT; torch's FSDP2 raises, if in other words."""
    found = subprocess.run(
        [sys.executable, "-c", LATE], capture_output=True, text=True, check=False
    )
    assert found.returncode == 0
    assert "the root module (FSDPSequential) cannot be trained while the interp" in found.stderr
