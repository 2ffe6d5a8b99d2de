"""Writes the tables of tested releases in docs/compatibility.md and README.md.

    python docs/compatibility_table.py            # updates both documents
    python docs/compatibility_table.py --check    # fails if a document is out of date

The results are in docs/test_runs, one file per torch release. ``tests/record_run.py`` writes them.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RUNS = ROOT / "docs" / "test_runs"
PAGE, README = ROOT / "docs" / "compatibility.md", ROOT / "README.md"
BEGIN, END = "<!-- begin: compatibility_table.py -->", "<!-- end: compatibility_table.py -->"

LINE_ITEMS = 3
"""Reasons of skipped tests, or names of tests, in a line."""

MAX_FUNCTIONS = 8
"""Failed test functions of a run that are listed by name. More are only counted."""

NO_BUILDS = {("2.15", "3.10")}
"""Pairs of a torch release and a version of Python for which torch has no builds."""

Run = dict[str, Any]
"""The results of one run of a test folder. A file in docs/test_runs has a list of them."""


def find_release(version: str) -> str:
    """Returns the first two parts of a version: 2.15 of 2.15.0+cu132."""
    return ".".join(version.split(".")[:2])


def parse_version(version: str) -> list[int]:
    """Returns the numbers of a version: [2, 15, 0, 132] of 2.15.0+cu132."""
    return [int(number) for number in re.findall(r"\d+", version)]


def find_file(torch: str) -> Path:
    """Returns the file of the runs with a torch release."""
    return RUNS / f"torch-{find_release(torch)}.json"


def read_runs() -> list[Run]:
    """Returns all runs in the order of torch's releases, then of Python's."""
    runs = [run for file in RUNS.glob("*.json") for run in json.loads(file.read_text())]
    return sorted(runs, key=lambda run: [parse_version(run[name]) for name in ("torch", "python")])


def format_row(cells: list[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def format_code(text: str) -> str:
    return f"`{text}`"


def format_folders(run: Run) -> str:
    """Returns the folders below ``tests``."""
    return ", ".join(folder.removeprefix("tests/") for folder in run["folders"])


def format_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} ({count})" for name, count in counts.items())


def count_functions(names: list[str]) -> dict[str, int]:
    """Returns the number of failures by test function, or their sum if the list would be long."""
    functions = Counter(format_code(name.rpartition("::")[2].partition("[")[0]) for name in names)
    if len(functions) <= MAX_FUNCTIONS:
        return functions
    return {f"tests of {len(functions)} functions, listed in docs/test_runs": len(names)}


def format_remarks(run: Run) -> Iterator[str]:
    """Yields the reasons of skipped tests, the failures and the note of a run."""
    folders = format_folders(run)
    for title, counts in (
        ("skipped", run["skip_reasons"]),
        ("failed", count_functions(run["failures"])),
        ("failed, then passed in a second run", count_functions(run["passed_again"])),
    ):
        items = list(counts.items())
        for first in range(0, len(items), LINE_ITEMS):
            line = dict(items[first : first + LINE_ITEMS])
            yield f"    - {folders}, {title}: {format_counts(line)}"
    if "note" in run:
        yield f"    - {folders}: {run['note']}"


def format_runs() -> str:
    """Returns a table of all runs, and a list of their remarks."""
    titles = ["torch", "Python", "folder of tests", "passed", "failed", "skipped", "date", "commit"]
    lines, remarks = [format_row(titles), "| --- " * len(titles) + "|"], []
    previous: list[str] = []
    last = None
    for run in read_runs():
        environment = [run["torch"], run["python"]]
        first = environment if environment != previous else ["", ""]
        counts = [run[key] for key in ("passed", "failed", "skipped", "date", "commit")]
        lines.append(format_row([*first, format_folders(run), *counts]))
        title = f"- **{run['torch']}**, Python {run['python']}, {format_code(run['command'])}:"
        remarks_of_run = [*format_remarks(run)]
        if remarks_of_run and title != last:
            remarks.append(title)
            last = title
        remarks += remarks_of_run
        previous = environment
    return "\n".join([*lines, "", *remarks, ""])


def format_matrix() -> str:
    """Returns a table of torch and Python. Releases with equal cells have one row."""
    project = (ROOT / "pyproject.toml").read_text()
    pythons = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', project)
    bounds = re.search(r'"torch>=2\.(\d+),<2\.(\d+)"', project)
    assert bounds is not None, "pyproject.toml requires no range of torch releases"
    tested = {(find_release(run["torch"]), find_release(run["python"])) for run in read_runs()}
    rows: dict[tuple[str, ...], list[str]] = {}
    for release in (f"2.{minor}" for minor in range(int(bounds[1]), int(bounds[2]))):
        cells = tuple(
            "none" if pair in NO_BUILDS else "yes" if pair in tested else "no"
            for pair in ((release, python) for python in pythons)
        )
        rows.setdefault(cells, []).append(release)
    titles = ["torch", f"Python {pythons[0]}", *pythons[1:]]
    lines = [format_row(titles), "| --- " * len(titles) + "|"]
    lines += [format_row([", ".join(releases), *cells]) for cells, releases in rows.items()]
    return "\n".join([*lines, ""])


def insert_tables(path: Path) -> str:
    """Returns the document's text with current tables."""
    before, begin, rest = path.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{path.name} has no {BEGIN} or no {END}"
    part = format_matrix() if path == README else f"{format_matrix()}\n{format_runs()}"
    return f"{before}{BEGIN}\n\n{part}\n{END}{after}"


def update_pages() -> None:
    for path in (PAGE, README):
        path.write_text(insert_tables(path))


def main() -> int:
    parser = argparse.ArgumentParser(description="Updates the tables of tested releases.")
    parser.add_argument("--check", action="store_true", help="only check the documents")
    check = parser.parse_args().check
    stale = [path.name for path in (PAGE, README) if insert_tables(path) != path.read_text()]
    if not check:
        update_pages()
        return 0
    for name in stale:
        print(f"{name} is out of date: run python docs/compatibility_table.py")
    return int(bool(stale))


if __name__ == "__main__":
    sys.exit(main())
