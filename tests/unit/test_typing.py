"""What a user's type checker sees: mypy and pyright pass on a script that uses everything."""

from __future__ import annotations

import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fsdp_c

ROOT = Path(__file__).resolve().parents[2]
USER = Path(__file__).with_name("typed_user.py")
IGNORED = re.compile(r"  # type: ignore\[.*\]")


def check(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)


def mistaken_lines() -> list[int]:
    lines = USER.read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if IGNORED.search(line)]


def test_the_script_uses_everything() -> None:
    """Every public name, and every argument of what shards, plans and explains."""
    text = USER.read_text()
    arguments = {
        name
        for function in (fsdp_c.auto_shard, fsdp_c.plan, fsdp_c.explain)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    unused = [name for name in fsdp_c.__all__ if not re.search(rf"\b{name}\b", text)]
    assert unused == []
    assert [name for name in sorted(arguments) if not re.search(rf"\b{name}=", text)] == []


def test_mypy_passes_on_a_users_script() -> None:
    """Strictly: a mistake that it does not see is an ignore without use, which it reports."""
    pytest.importorskip("mypy")
    done = check(sys.executable, "-m", "mypy", "--strict", str(USER))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(mistaken_lines()) >= 9


def test_pyright_passes_on_a_users_script_and_sees_its_mistakes(tmp_path: Path) -> None:
    pyright = shutil.which("pyright", path=str(Path(sys.executable).parent))
    if pyright is None:
        pytest.skip("needs pyright")
    done = check(pyright, "--pythonpath", sys.executable, str(USER))
    assert done.returncode == 0, done.stdout + done.stderr
    bare = tmp_path / "bare.py"
    bare.write_text(IGNORED.sub("", USER.read_text()))
    done = check(pyright, "--pythonpath", sys.executable, str(bare))
    found = {int(n) for n in re.findall(r"bare\.py:(\d+):\d+ - error", done.stdout)}
    assert found == set(mistaken_lines()), done.stdout
