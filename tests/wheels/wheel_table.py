"""Writes the tables of wheels in docs/compatibility.md from docs/wheels.json.

    python tests/wheels/wheel_table.py            # updates the page
    python tests/wheels/wheel_table.py --check    # fails if the page is out of date

``check_wheels.py`` writes docs/wheels.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "wheels.json"
PAGE = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- begin: wheel_table.py -->", "<!-- end: wheel_table.py -->"


def format_row(cells: list[Any]) -> str:
    return f"| {' | '.join(map(str, cells))} |"


def format_tables(results: dict[str, Any]) -> str:
    """Returns the tables in Markdown."""
    lines = [f"`make wheels-check` on {results['date']} installed these wheels:", ""]
    for name, size in results["wheels"].items():
        lines.append(f"- `{name}` ({size / 2**20:.1f} MiB)")
    lines.append("")
    lines.append("| torch | Python | built for | install, CPU | import, CPU | `--check` | parity |")
    lines.append("| --- " * 7 + "|")
    for row in results["environments"]:
        facts = [row[name] for name in ("torch", "python", "built_for")]
        times = [f"{row['install_seconds']} s", f"{row['import_ms']} ms"]
        lines.append(format_row([*facts, *times, row["check"], row["parity"]]))
    if not results["ways"]:
        return "\n".join(lines)
    lines += ["", "Ways to install:", ""]
    lines += ["| torch | Python | way | files | import, CPU | `--check` |", "| --- " * 6 + "|"]
    for row in results["ways"]:
        facts = [row["torch"], row["python"], f"`{row['way']}`", row["files"]]
        lines.append(format_row([*facts, f"{row['import_ms']} ms", row["check"]]))
    return "\n".join(lines)


def update(text: str, results: dict[str, Any]) -> str:
    """Returns the page's text with current tables."""
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin and end, f"{PAGE.name} has no {BEGIN} or no {END}"
    return f"{before}{BEGIN}\n\n{format_tables(results)}\n\n{END}{after}"


def update_page() -> None:
    PAGE.write_text(update(PAGE.read_text(), json.loads(RESULTS.read_text())))


def main() -> int:
    if sys.argv[1:] != ["--check"]:
        update_page()
        return 0
    text = PAGE.read_text()
    if update(text, json.loads(RESULTS.read_text())) == text:
        return 0
    print(f"{PAGE.name} is out of date: run python tests/wheels/wheel_table.py")
    return 1


if __name__ == "__main__":
    sys.exit(main())
