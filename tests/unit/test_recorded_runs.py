"""docs/compatibility.md and README.md have the recorded results of the tests with each release."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "docs"), str(ROOT / "tests")]

import compatibility_table  # noqa: E402
import record_run  # noqa: E402

DOCUMENTS = [compatibility_table.PAGE, compatibility_table.README]

CASES = """<testsuites><testsuite name="pytest" timestamp="{date}T10:00:00+00:00">
<testcase classname="" name="" /><testcase classname="" name="tests.faults.test_a">
<skipped message="could not import 'x': no" /></testcase>{cases}</testsuite></testsuites>"""


def case(name: str, outcome: str = "", message: str = "") -> str:
    inner = f'<{outcome} message="{message}" />' if outcome else ""
    return f'<testcase classname="tests.unit.test_a" name="{name}">{inner}</testcase>'


def write_cases(path: Path, date: str, *cases: str) -> Path:
    path.write_text(CASES.format(date=date, cases="".join(cases)))
    return path


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Two parts of a run. The second one repeats three tests of the first one."""
    old = "needs torch 2.15; this is torch 2.13"
    first = [case("passes@group"), case("fails", "failure"), case("raises", "error"), case("late")]
    second = [case("passes", "skipped", old), case("fails"), case("late", "failure")]
    skipped = case("skipped", "skipped", old)
    return [
        write_cases(tmp_path / "first.xml", "2026-01-01", *first, skipped),
        write_cases(tmp_path / "second.xml", "2026-01-02", *second),
    ]


@pytest.fixture
def runs_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the records, and of the documents that are made from them."""
    folder = tmp_path / "docs" / "test_runs"
    shutil.copytree(compatibility_table.RUNS, folder)
    for name in ("PAGE", "README"):
        copy = tmp_path / getattr(compatibility_table, name).name
        shutil.copy(getattr(compatibility_table, name), copy)
        monkeypatch.setattr(compatibility_table, name, copy)
    monkeypatch.setattr(compatibility_table, "RUNS", folder)
    return folder


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.name))
def test_tables_of_document_are_those_of_the_recorded_runs(document: Path) -> None:
    updated = compatibility_table.insert_tables(document)
    assert document.read_text() == updated, "run python docs/compatibility_table.py"


def test_record_has_the_last_result_of_each_test_by_folder(files: list[Path]) -> None:
    folders = record_run.merge_results(files)
    assert set(folders) == {"tests/unit", "tests/faults"}
    run = record_run.make_run("tests/unit", folders["tests/unit"], commit="abc")
    assert run == {
        "folders": ["tests/unit"],
        "commit": "abc",
        "date": "2026-01-02",
        "passed": 2,
        "failed": 2,
        "skipped": 1,
        "failures": ["tests/unit/test_a::late", "tests/unit/test_a::raises"],
        "passed_again": ["tests/unit/test_a::fails"],
        "skip_reasons": {"needs torch 2.15": 1},
    }


def test_recorded_run_replaces_runs_of_its_folder_and_python_and_updates_both_documents(
    files: list[Path], runs_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = compatibility_table.find_file(torch.__version__)
    run = {"torch": "2.1", "commit": "old", "failures": [], "passed_again": [], "skip_reasons": {}}
    python = ".".join(map(str, sys.version_info[:3]))
    run |= {"python": python, "date": "2025-01-01", "command": "old", "failed": 0, "skipped": 0}
    old = [
        run | {"folders": ["tests/faults", "tests/gpu"], "passed": 7},
        run | {"folders": ["tests/parity"], "passed": 3},
        run | {"folders": ["tests/unit"], "passed": 4, "python": "3.99.1"},
    ]
    file.write_text(json.dumps(old))
    arguments = ["record_run.py", "--command", "make x", "--commit", "abc", *map(str, files)]
    for name in ("unit/test_a.py", "unit/test_b.py", "faults/test_a.py"):
        path = runs_folder.parents[1] / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(record_run, "ROOT", runs_folder.parents[1])
    record_run.main()
    recorded: list[dict[str, Any]] = json.loads(file.read_text())
    assert [(run["folders"], run["passed"], run["commit"]) for run in recorded] == [
        (["tests/faults"], 0, "abc"),
        (["tests/parity"], 3, "old"),
        (["tests/unit"], 2, "abc"),
        (["tests/unit"], 4, "old"),
    ]
    assert recorded[2]["torch"] == torch.__version__
    page = compatibility_table.PAGE.read_text()
    assert "| unit | 2 | 2 | 1 | 2026-01-02 | abc |" in page
    assert "    - unit, failed: `late` (1), `raises` (1)\n" in page
    assert "    - unit: 1 of 2 files: a\n" in page and "faults: 1 of" not in page
    result = record_run.Result("tests/unit", "tests/unit/test_b/TestB::test", "", "passed", "")
    assert record_run.describe_files("tests/unit", [(result, False)]) == {"note": "1 of 2 files: b"}
    for path in (compatibility_table.PAGE, compatibility_table.README):
        assert compatibility_table.insert_tables(path) == path.read_text()


def test_compatibility_matrix_has_yes_for_recorded_torch_and_python_releases_only(
    runs_folder: Path,
) -> None:
    for file in runs_folder.glob("*.json"):
        file.unlink()
    matrix = compatibility_table.format_matrix()
    assert "yes" not in matrix and "| 2.11, 2.12, 2.13, 2.14 | no | no | no | no |" in matrix
    assert "| 2.15 | none | no | no | no |" in matrix
    runs = [{"torch": "2.13.1+cpu", "python": "3.10.2"}]
    (runs_folder / "torch-2.13.json").write_text(json.dumps(runs))
    matrix = compatibility_table.format_matrix()
    assert "| 2.13 | yes | no | no | no |" in matrix and matrix.count("yes") == 1
