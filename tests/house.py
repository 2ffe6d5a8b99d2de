"""Dependencies between the C modules of one folder.

A C module ("room") is a source file with its header. A dependency ("arrow") is an include, or the
use of a function or table. Modules are assigned to layers. ``python tests/house.py`` prints, for
``csrc/core`` and ``csrc/python``, the dependencies that violate the layers, the cycles, and facts
about the group's struct. ``tests/unit/test_c_rooms.py`` checks that there are no violations.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

CSRC = Path(__file__).resolve().parents[1] / "csrc"

FLOORS = {
    "core": (
        {"status"},
        {"layout", "order", "link", "divide", "dtype", "chunks", "extension"},
        {"param", "comm"},
        {"host", "plan"},
        {"members", "foreach", "offload"},
        {"transfer", "unsharded"},
        {"bucket", "gather", "gradient", "reduction"},
        {"reduce"},
        {"group"},
        {"state"},
    ),
    "python": (
        {"seen"},
        {"objects"},
        {"dtensor"},
        {"errors", "retired", "dynamo", "admit", "shard", "guard", "clip", "local_lists"},
        {"attributes", "ready", "transitions", "extension"},
        {"slots", "tree", "comm_context", "iteration_context", "group_attributes"},
        {"param", "step"},
        {"host", "hook", "state"},
        {"param_group"},
        {"module"},
    ),
}
"""The layers of each folder, lowest first. A module uses only modules of lower layers.
csrc/README.md describes the modules."""

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.M)
_DEFINITION = re.compile(r"^(?!static\b|typedef\b|#)[A-Za-z_][\w *]*?\b(\w+)\([^;{}]*\)\s*\{", re.M)
_TABLE = re.compile(r"^(?!static\b)(?:const )?\w+ (\w+)(?:\[\])? = ", re.M)
"""Matches tables of functions and other constants that other modules may use."""
_NAME = re.compile(r"\b[a-z]\w*\b")


def code_of(path: Path) -> str:
    """Returns the text of a file without comments."""
    return _COMMENT.sub(" ", path.read_text())


def rooms_of(folder: str) -> dict[str, list[Path]]:
    """Maps each module of ``csrc/folder`` to its files."""
    rooms: dict[str, list[Path]] = {}
    for path in sorted((CSRC / folder).glob("*.[ch]")):
        rooms.setdefault(path.stem, []).append(path)
    return rooms


def arrows_of(rooms: dict[str, list[Path]]) -> dict[str, dict[str, set[str]]]:
    """Maps each module to the modules it uses, and these to the headers, functions and tables."""
    texts = {room: [code_of(path) for path in paths] for room, paths in rooms.items()}
    home = {
        name: room
        for room, parts in texts.items()
        for text in parts
        for name in _DEFINITION.findall(text) + _TABLE.findall(text)
    }
    arrows: dict[str, dict[str, set[str]]] = {room: {} for room in rooms}
    for room, parts in texts.items():
        for text in parts:
            for header in _INCLUDE.findall(text):
                stem = Path(header).stem
                if "/" not in header and stem in rooms and stem != room:
                    arrows[room].setdefault(stem, set()).add(header)
            for name in set(_NAME.findall(_STRING.sub('""', text))):
                if home.get(name, room) != room:
                    arrows[room].setdefault(home[name], set()).add(name)
    return arrows


def upward(
    arrows: dict[str, dict[str, set[str]]], floors: tuple[set[str], ...]
) -> dict[str, set[str]]:
    """Maps ``"from -> to"`` of every dependency that violates the layers to the names used."""
    layer = {room: level for level, rooms in enumerate(floors) for room in rooms}
    return {
        f"{room} -> {other}": names
        for room, others in arrows.items()
        for other, names in others.items()
        if layer[other] >= layer[room]
    }


def circles(arrows: dict[str, dict[str, set[str]]]) -> list[set[str]]:
    """Returns the sets of modules that depend on one another."""
    reach = {room: set(others) for room, others in arrows.items()}
    for middle in reach:
        for room in reach:
            if middle in reach[room]:
                reach[room] |= reach[middle]
    found: list[set[str]] = []
    for room in reach:
        circle = {other for other in reach[room] if room in reach.get(other, ())}
        if circle and circle not in found:
            found.append(circle)
    return found


def functions_taking(struct: str, folder: str = "core") -> dict[str, int]:
    """Maps each module to the number of functions in its header that take ``struct *``."""
    taking = re.compile(rf"\b\w+\([^;{{}}]*\b{struct} \*[^;{{}}]*\);")
    counts = {path.stem: len(taking.findall(code_of(path))) for path in (CSRC / folder).glob("*.h")}
    return {room: count for room, count in sorted(counts.items()) if count}


def fields_of(struct: str, header: Path) -> list[str]:
    """Returns the field declarations of ``struct``."""
    text = code_of(header)
    body = re.search(rf"typedef struct {struct} {{(.*?)}} {struct};", text, re.S)
    if body is None:
        raise ValueError(f"no struct {struct} in {header.name}")
    return [" ".join(line.split()) for line in body.group(1).split(";") if line.strip()]


def main() -> None:
    for folder in ("core", "python"):
        rooms = rooms_of(folder)
        arrows = arrows_of(rooms)
        count = sum(map(len, arrows.values()))
        print(f"csrc/{folder}: {len(rooms)} modules, {count} uses, cycles: {circles(arrows)}")
        if folder in FLOORS:
            print(f"  layer violations: {upward(arrows, FLOORS[folder]) or 'none'}")
    fields = fields_of("fc_group", CSRC / "core/group.h")
    booleans = [field for field in fields if field.startswith("bool ")]
    print(f"fc_group: {len(fields)} fields, {len(booleans)} booleans of its own")
    print(f"functions that take fc_group *: {functions_taking('fc_group')}")


if __name__ == "__main__":
    sys.exit(main())
