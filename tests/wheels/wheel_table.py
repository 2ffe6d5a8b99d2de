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
sys.path.insert(0, str(ROOT / "docs"))

from compatibility_table import format_row, parse_version  # noqa: E402

RESULTS = ROOT / "docs" / "wheels.json"
PAGE = ROOT / "docs" / "compatibility.md"
BEGIN, END = "<!-- begin: wheel_table.py -->", "<!-- end: wheel_table.py -->"


def parse_versions(row: dict[str, Any]) -> list[list[int]]:
    """Returns the versions of torch and Python as lists of numbers."""
    return [parse_version(row[name]) for name in ("torch", "python")]


def merge(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Returns the new results, and the old ones with other versions of torch or Python."""
    merged: dict[str, Any] = {"wheels": dict(sorted((old["wheels"] | new["wheels"]).items()))}
    for kind in ("environments", "ways"):
        replaced = list(map(parse_versions, new[kind]))
        kept = [row for row in old[kind] if parse_versions(row) not in replaced]
        merged[kind] = sorted(kept + new[kind], key=parse_versions)
    return merged


def record(new: dict[str, Any]) -> None:
    """Adds results to docs/wheels.json, and updates the page."""
    results = merge(json.loads(RESULTS.read_text()), new)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    update_page()


def format_tables(results: dict[str, Any]) -> str:
    """Returns the tables in Markdown."""
    lines = ["| wheel | size | torch of its extensions |", "| --- " * 3 + "|"]
    for name, wheel in results["wheels"].items():
        size = f"{wheel['bytes'] / 2**20:.1f} MiB"
        lines.append(format_row([f"`{name}`", size, ", ".join(wheel["torch"])]))
    titles = ["torch", "Python", "built for", "install, CPU", "import, CPU", "`--check`", "parity"]
    lines += ["", format_row([*titles, "date"]), "| --- " * 8 + "|"]
    for row in results["environments"]:
        facts = [row[name] for name in ("torch", "python", "built_for")]
        times = [f"{row['install_seconds']} s", f"{row['import_ms']} ms"]
        lines.append(format_row([*facts, *times, row["check"], row["parity"], row["date"]]))
    if not results["ways"]:
        return "\n".join(lines)
    titles = ["torch", "Python", "way to install", "files", "import, CPU", "`--check`", "date"]
    lines += ["", format_row(titles), "| --- " * 7 + "|"]
    for row in results["ways"]:
        facts = [row["torch"], row["python"], f"`{row['way']}`", row["files"]]
        lines.append(format_row([*facts, f"{row['import_ms']} ms", row["check"], row["date"]]))
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
