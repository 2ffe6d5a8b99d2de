"""mypy and pyright accept typed_user.py, which uses every public name, and find its type errors."""

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
USER_SCRIPT = Path(__file__).with_name("typed_user.py")
IGNORED = re.compile(r"  # type: ignore\[.*\]")


def run_checker(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)


def lines_with_type_errors() -> list[int]:
    """Returns the numbers of the lines that ignore a type error."""
    lines = USER_SCRIPT.read_text().splitlines()
    return [number for number, line in enumerate(lines, 1) if IGNORED.search(line)]


def test_user_script_uses_all_public_names_and_arguments() -> None:
    """The arguments are those of ``auto_shard``, ``plan`` and ``explain``."""
    text = USER_SCRIPT.read_text()
    arguments = {
        name
        for function in (fsdp_c.auto_shard, fsdp_c.plan, fsdp_c.explain)
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY
    }
    unused = [name for name in fsdp_c.__all__ if not re.search(rf"\b{name}\b", text)]
    assert unused == []
    assert [name for name in sorted(arguments) if not re.search(rf"\b{name}=", text)] == []


@pytest.mark.xdist_group("mypy")  # begins before shorter tests
def test_mypy_strict_accepts_user_script() -> None:
    """mypy reports an unused ``type: ignore`` for each error that it does not find."""
    pytest.importorskip("mypy")
    completed = run_checker(sys.executable, "-m", "mypy", "--strict", str(USER_SCRIPT))
    assert completed.returncode == 0, completed.stdout + completed.stderr
    assert len(lines_with_type_errors()) >= 9


def test_pyright_accepts_user_script_and_finds_its_type_errors(tmp_path: Path) -> None:
    pyright = shutil.which("pyright", path=str(Path(sys.executable).parent))
    if pyright is None:
        pytest.skip("needs pyright")
    without_ignores = tmp_path / "without_ignores.py"
    without_ignores.write_text(IGNORED.sub("", USER_SCRIPT.read_text()))
    # One run, because pyright takes most of its time for torch's types.
    files = [str(USER_SCRIPT), str(without_ignores)]
    completed = run_checker(pyright, "--pythonpath", sys.executable, *files)
    errors = re.findall(r"(\w+)\.py:(\d+):\d+ - error", completed.stdout)
    assert {file for file, _ in errors} == {without_ignores.stem}, completed.stdout
    assert {int(number) for _, number in errors} == {*lines_with_type_errors()}, completed.stdout
