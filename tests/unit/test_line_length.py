"""C sources have at most 100 columns, comments included. clang-format does not break comments."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = 100


def long_lines(text: str) -> list[int]:
    """Returns the numbers, from 1, of the lines of more than ``COLUMNS`` characters."""
    lines = text.splitlines()
    return [number for number, line in enumerate(lines, 1) if len(line) > COLUMNS]


def test_c_sources_have_no_line_over_100_columns() -> None:
    suffixes = {".c", ".h", ".cpp", ".hpp", ".cu", ".cuh"}
    folders = [ROOT / "csrc", ROOT / "tests"]
    paths = [p for folder in folders for p in sorted(folder.rglob("*")) if p.suffix in suffixes]
    assert len(paths) > 80, "too few sources found: this test would check nothing"
    findings = {str(path.relative_to(ROOT)): long_lines(path.read_text()) for path in paths}
    assert {name: lines for name, lines in findings.items() if lines} == {}


def test_long_lines_returns_the_number_of_a_long_line() -> None:
    assert long_lines("\n".join(["x" * 100, "/* " + "x" * 98, "", "x" * 100])) == [2]
