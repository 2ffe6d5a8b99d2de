"""100 columns in C files, comments too: clang-format breaks code and leaves comments alone."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
COLUMNS = 100


def too_long(text: str) -> list[int]:
    """The numbers of the lines that no editor of 100 columns shows whole."""
    lines = text.splitlines()
    return [number for number, line in enumerate(lines, 1) if len(line) > COLUMNS]


def test_no_line_of_the_sources_is_wider_than_an_editor() -> None:
    suffixes = {".c", ".h", ".cpp", ".cu", ".cuh"}
    folders = [ROOT / "csrc", ROOT / "tests"]
    paths = [p for folder in folders for p in sorted(folder.rglob("*")) if p.suffix in suffixes]
    assert len(paths) > 80, "no sources: the guard would guard nothing"
    found = {str(path.relative_to(ROOT)): too_long(path.read_text()) for path in paths}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_a_line_that_is_too_long_is_found() -> None:
    assert too_long("\n".join(["x" * 100, "/* " + "x" * 98, "", "x" * 100])) == [2]
