"""Runs torch's own tests of FSDP2 with fsdp_c and with torch's FSDP2, on the CPU, and compares.

    python tests/torch_suite/compare_suite.py SOURCE [--files test_fully_shard_init ...]

SOURCE is a source tree of torch, if possible of the release that this Python imports. Debian's
source package "pytorch" has one: ``apt-get source pytorch``.

Each file runs with ``FSDP_C=1``. Tests that do not pass run again with torch's FSDP2. The script
prints a line per file, then each test that passes with torch's FSDP2 alone. The exit code is 1 if
there is such a test, or if no test passes with fsdp_c. ``--junitxml PATH`` writes the outcomes for
``tests/record_run.py``; tests that pass with neither count as skipped. ``on_cpu/sitecustomize.py``
lets tests for several GPUs run on the CPU.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ON_CPU = Path(__file__).resolve().parent / "on_cpu"
FOLDER = "test/distributed/_composable"
DEFAULT_FILES = (
    "fsdp/test_fully_shard_*.py",
    "test_replicate_training.py",
    "test_replicate_mixed_precision.py",
    "test_composability/test_2d_composability.py",
)
KINDS = ("fsdp_c", "only torch", "neither")
"""The implementation with which a test passes. A test that passes with fsdp_c runs once."""

NOT_PASSED = {"failure": "failed", "error": "failed", "skipped": "skipped"}


def run_tests(path: Path, tests: Sequence[str], use_fsdp_c: bool, seconds: int) -> dict[str, str]:
    """Runs ``tests`` (all, if empty) of a file. Returns "passed", "failed" or "skipped" by test."""
    paths = [str(ON_CPU), str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {
        **os.environ,
        "FSDP_C": str(int(use_fsdp_c)),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
        command += [f"--timeout={seconds}", f"--junitxml={results}"]
        command += [f"{path.name}::{test}" for test in tests] or [path.name]
        with (Path(folder) / "log.txt").open("wb") as log:
            subprocess.run(command, cwd=path.parent, env=env, stdout=log, stderr=subprocess.STDOUT)
        if not results.exists():
            log_text = (Path(folder) / "log.txt").read_text(errors="replace")
            raise SystemExit(f"pytest wrote no results for {path}:\n{log_text[-3000:]}")
        return _read_outcomes(results, path.stem)


def _read_outcomes(results: Path, module: str) -> dict[str, str]:
    """Returns the outcome by test: ``Class::test``, or ``test`` for a function of the module."""
    outcomes = {}
    for case in ElementTree.parse(results).getroot().iter("testcase"):
        owner = str(case.get("classname")).rpartition(".")[2]
        prefix = "" if owner == module else f"{owner}::"
        kinds = [NOT_PASSED[child.tag] for child in case if child.tag in NOT_PASSED]
        outcomes[f"{prefix}{case.get('name')}"] = kinds[0] if kinds else "passed"
    return outcomes


def compare_file(path: Path, seconds: int) -> dict[str, str]:
    """Returns the kind of each test of a file, one of ``KINDS``."""
    with_fsdp_c = run_tests(path, [], True, seconds)
    rest = [test for test, outcome in with_fsdp_c.items() if outcome != "passed"]
    with_torch = {}
    if rest:  # all tests, if none passed: fsdp_c may fail while the file is imported
        selected = rest if len(rest) < len(with_fsdp_c) else []
        with_torch = run_tests(path, selected, False, seconds)
    outcomes = dict.fromkeys(with_fsdp_c, "fsdp_c") | dict.fromkeys(rest, "neither")
    return outcomes | {test: "only torch" for test in with_torch if with_torch[test] == "passed"}


def find_files(source: Path, names: Sequence[str]) -> list[Path]:
    """Returns the test files with these names, or the default ones, of a source tree."""
    folder = source / FOLDER
    found = sorted(path for pattern in DEFAULT_FILES for path in folder.glob(pattern))
    files = [path for path in found if not names or path.stem in names]
    if not files:
        raise SystemExit(f"{folder} has none of the test files {list(names or DEFAULT_FILES)}")
    return files


def write_junit(path: Path, outcomes: dict[str, dict[str, str]]) -> None:
    """Writes the outcomes of all files in the format of ``pytest --junitxml``."""
    suite = ElementTree.Element("testsuite", timestamp=datetime.now().isoformat())
    for file, tests in outcomes.items():
        for test, outcome in tests.items():
            names = {"classname": f"tests.torch_suite.{file}", "name": test}
            case = ElementTree.SubElement(suite, "testcase", names)
            if outcome == "only torch":
                ElementTree.SubElement(case, "failure", message=outcome)
            elif outcome == "neither":
                reason = "passes with neither implementation on the CPU"
                ElementTree.SubElement(case, "skipped", message=reason)
    ElementTree.ElementTree(suite).write(path)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("--files", nargs="*", default=[], help="names of test files, without .py")
    parser.add_argument("--seconds", type=int, default=120, help="time limit of one test")
    parser.add_argument("--junitxml", type=Path, help="a file for the outcomes")
    options = parser.parse_args(arguments)

    outcomes: dict[str, dict[str, str]] = {}
    print(f"{'file':40}" + "".join(f"{kind:>12}" for kind in KINDS))
    for path in find_files(options.source, options.files):
        outcomes[path.stem] = compare_file(path, options.seconds)
        counts = Counter(outcomes[path.stem].values())
        print(f"{path.stem:40}" + "".join(f"{counts[kind]:12}" for kind in KINDS), flush=True)
    failures = [
        f"{file}::{test}"
        for file, tests in outcomes.items()
        for test, outcome in tests.items()
        if outcome == "only torch"
    ]
    for test in failures:
        print(f"passes with torch's FSDP2 alone: {test}")
    if options.junitxml is not None:
        write_junit(options.junitxml, outcomes)
    passed = any("fsdp_c" in tests.values() for tests in outcomes.values())
    if not passed:
        print("no test passed with fsdp_c")
    return int(bool(failures) or not passed)


if __name__ == "__main__":
    sys.exit(main())
