"""Every module has tests that tests/find_tests.py finds, and every test that it lists exists.

Folders of tests contain only tests.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import find_tests
import pytest

ROOT = Path(__file__).resolve().parents[2]


def names(*paths: str) -> list[str]:
    """Returns the tests in the commands for files."""
    words = itertools.chain(*find_tests.commands([ROOT / path for path in paths]))
    return [word for word in words if word.startswith("TESTS=") or word.endswith(".py")]


def test_each_module_has_tests() -> None:
    modules = find_tests.modules()
    assert {"gather", "param_group", "shm_ring", "tensor", "fully_shard"} <= modules
    assert len(modules) > 100, "found too few modules: the test would check nothing"
    without = sorted(module for module in modules if not find_tests.tests_of_module(module))
    assert without == [], "add a test file of this name, or an entry to TESTS_OF"


@pytest.mark.parametrize("module", find_tests.TESTS_OF)
def test_module_and_tests_in_table_of_find_tests_exist(module: str) -> None:
    assert module in find_tests.modules()
    missing = set(find_tests.TESTS_OF[module]) - find_tests.all_test_files().keys()
    assert missing == set()


@pytest.mark.parametrize("module", find_tests.TESTS_OF)
def test_table_of_find_tests_omits_tests_named_like_their_module(module: str) -> None:
    found_by_name = find_tests.tests_named_like(module)
    assert set(find_tests.TESTS_OF[module]).isdisjoint(found_by_name)


def test_test_folders_contain_only_test_files() -> None:
    """Scripts that ranks run belong in workers/, and shared helpers in tests/harness."""
    others = [
        str(path.relative_to(ROOT))
        for folder in ("distributed", "parity", "faults")
        for path in sorted((ROOT / "tests" / folder).glob("*.py"))
        if not path.name.startswith("test_") and path.name != "conftest.py"
    ]
    assert others == [], "move these files to workers/ or tests/harness"


def test_module_named_like_the_beginning_of_a_test_file_has_no_tests() -> None:
    assert find_tests.tests_of_module("gathe") == []


def test_find_tests_of_module_without_tests_exits_with_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(find_tests.TESTS_OF, "transitions")
    monkeypatch.setattr(sys, "argv", ["find_tests.py", str(ROOT / "csrc/python/transitions.c")])
    with pytest.raises(SystemExit) as exited:
        find_tests.main()
    assert exited.value.code == 2
    assert "no test is named like these files" in capsys.readouterr().err


def test_commands_run_c_tests_and_python_tests_of_a_module() -> None:
    assert names("csrc/core/gather.c") == [
        "TESTS=test_gather test_gather_checksum test_gather_extended"
    ]
    assert names("csrc/core/plan.c", "fsdp_c/explain.py") == [
        "TESTS=test_plan test_plan_extended",
        "tests/unit/test_plan.py",
        "tests/unit/test_plan_command.py",
        "tests/unit/test_explain.py",
    ]


def test_find_tests_of_worker_returns_tests_that_import_it() -> None:
    assert names("tests/faults/workers/sweep.py") == [
        "tests/accelerator/test_device_faults.py",
        "tests/faults/test_sweep.py",
    ]


def test_find_tests_of_test_file_returns_the_file() -> None:
    assert names("tests/c/test_gather.c") == ["TESTS=test_gather"]
    assert names("tests/unit/test_names.py") == ["tests/unit/test_names.py"]


def test_find_tests_of_missing_file_exits_with_error() -> None:
    command = [sys.executable, str(ROOT / "tests/find_tests.py"), "csrc/core/no_such_file.c"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert "no_such_file.c: no such file" in result.stderr
