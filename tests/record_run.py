"""Records the results of pytest in docs/test_runs, for docs/compatibility.md and README.md.

    pytest --junitxml=build/tests.xml tests/unit tests/faults
    python tests/record_run.py --python .venv/bin/python --command "make test" build/tests.xml

Each folder of tests becomes one run in the file of the torch release that PYTHON imports. The run
replaces earlier runs of that folder with that release and that version of Python (3.11, 3.13).
Several XML files are parts of one run. If several files contain a test, its last result counts; a
later skip does not replace a result. The record names tests that failed and passed in a later file.
If only some test files of the folder ran, it also names these. The script updates both pages.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "docs"))

import compatibility_table  # noqa: E402

VERSIONS = "import platform, torch; print(platform.python_version(), torch.__version__)"
OUTCOMES = {"failure": "failed", "error": "failed", "skipped": "skipped"}
"""The outcome for each element inside of a test's element. A test without one has passed."""


class Result(NamedTuple):
    """One test of an XML file. ``reason`` is that of a skipped test."""

    folder: str
    name: str
    date: str
    outcome: str
    reason: str


def read_results(path: Path) -> Iterator[Result]:
    """Yields the tests of a file that ``pytest --junitxml`` wrote."""
    for suite in ElementTree.parse(path).getroot().iter("testsuite"):
        date = suite.get("timestamp", "")[:10]
        for case in suite.iter("testcase"):
            # A skipped module has an empty class and the module's name.
            module = case.get("classname") or case.get("name") or ""
            if not module.startswith("tests."):
                continue  # an error of a worker
            name = re.sub(r"@[^\]]*$", "", f"{module.replace('.', '/')}::{case.get('name')}")
            found = next((child for child in case if child.tag in OUTCOMES), None)
            outcome = "passed" if found is None else OUTCOMES[found.tag]
            message = "" if found is None else found.get("message", "")
            # The part that is equal for all tests: "needs torch 2.15; this is torch 2.13.0".
            reason = re.split(r"[;:]|, which", message)[0].strip()
            yield Result("/".join(module.split(".")[:2]), name, date, outcome, reason)


def merge_results(paths: Sequence[Path]) -> dict[str, list[tuple[Result, bool]]]:
    """Returns the last result of each test, and whether an earlier one failed, by folder."""
    last: dict[str, Result] = {}
    failed: set[str] = set()
    for path in paths:
        for result in read_results(path):
            if result.outcome == "skipped" and result.name in last:
                continue
            last[result.name] = result
            if result.outcome == "failed":
                failed.add(result.name)
    folders: defaultdict[str, list[tuple[Result, bool]]] = defaultdict(list)
    for name, result in last.items():
        folders[result.folder].append((result, name in failed))
    return folders


def make_run(folder: str, results: list[tuple[Result, bool]], **origin: str) -> dict[str, Any]:
    """Returns the run of one folder as it is recorded."""
    counts = Counter(result.outcome for result, _ in results)
    reasons = Counter(result.reason for result, _ in results if result.outcome == "skipped")
    return {
        "folders": [folder],
        **origin,
        "date": max(result.date for result, _ in results),
        **{outcome: counts[outcome] for outcome in ("passed", "failed", "skipped")},
        "failures": sorted(result.name for result, _ in results if result.outcome == "failed"),
        "passed_again": sorted(
            result.name for result, failed in results if failed and result.outcome == "passed"
        ),
        "skip_reasons": dict(reasons.most_common()),
    }


def describe_files(folder: str, results: list[tuple[Result, bool]]) -> dict[str, str]:
    """Returns a note with the test files that ran, or {} if all files of the folder ran."""
    prefix, all_files = f"{folder}/test_", {path.stem for path in (ROOT / folder).glob("test_*.py")}
    # The name of a test is FOLDER/test_FILE::NAME, or FOLDER/test_FILE/CLASS::NAME.
    ran = sorted({re.split(r"/|::", result.name.removeprefix(prefix))[0] for result, _ in results})
    if all_files <= {f"test_{name}" for name in ran}:
        return {}
    return {"note": f"{len(ran)} of {len(all_files)} files: {', '.join(ran)}"}


def record(runs: list[dict[str, Any]], file: Path) -> None:
    """Adds runs to a file. Removes earlier runs of the same folders and Python versions."""

    def keys(run: dict[str, Any]) -> set[tuple[str, str]]:
        python = compatibility_table.find_release(run["python"])
        return {(python, folder) for folder in run["folders"]}

    replaced = set[tuple[str, str]]().union(*map(keys, runs))
    old = json.loads(file.read_text()) if file.exists() else []
    kept = [run for run in old if not replaced & keys(run)]
    runs = sorted(kept + runs, key=lambda run: sorted(keys(run)))
    file.parent.mkdir(exist_ok=True)
    file.write_text(json.dumps(runs, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--python", default=sys.executable, help="the Python of the tests")
    parser.add_argument("--command", required=True, help="the command that ran the tests")
    parser.add_argument("--commit", help="the tested commit; default: that of this checkout")
    parser.add_argument("files", nargs="+", type=Path, help="files of pytest --junitxml, in order")
    options = parser.parse_args()
    interpreter = os.path.abspath(options.python)
    versions = subprocess.check_output([interpreter, "-c", VERSIONS], text=True, cwd="/")
    python, torch = versions.split()
    head = ["git", "rev-parse", "--short", "HEAD"]
    commit = options.commit or subprocess.check_output(head, text=True, cwd=ROOT).strip()
    origin = {"torch": torch, "python": python, "commit": commit, "command": options.command}
    folders = merge_results(options.files)
    runs = [
        make_run(folder, results, **origin, **describe_files(folder, results))
        for folder, results in folders.items()
    ]
    file = compatibility_table.find_file(torch)
    record(runs, file)
    compatibility_table.update_pages()
    for run in runs:
        print(
            f"{file.relative_to(ROOT)}: {run['folders'][0]}, {run['passed']} passed, "
            f"{run['failed']} failed, {run['skipped']} skipped"
        )


if __name__ == "__main__":
    main()
