"""Compares two torch releases in the definitions that fsdp_c uses, and records these definitions.

    python -m build_support.torch_diff OLD NEW         prints what changed
    python -m build_support.torch_diff --check TORCH   compares a release with the record
    python -m build_support.torch_diff --record TORCH...  writes the record

OLD, NEW and TORCH are environments, folders that contain ``torch``, or wheels. No release is
imported. ``torch_surface.txt`` is the record. Its columns are releases. A row has a digest of one
definition in each release: ``=`` if it equals the release before, ``-`` if the release has no such
definition, ``?`` if the definition was not recorded for that release.
"""

from __future__ import annotations

import argparse
import difflib
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from . import torch_uses
from .torch_source import Definition, TorchSource
from .torch_uses import PACKAGES

RECORD = Path(__file__).with_name("torch_surface.txt")

Surface = dict[tuple[str, str], Definition]
"""The definitions that fsdp_c uses, by module and qualified name."""


def read_surface(source: TorchSource, with_members: bool = True) -> Surface:
    """Returns the definitions of ``source`` that fsdp_c uses.

    These are all definitions of ``PACKAGES``, and the names that fsdp_c imports.

    Args:
        source: A release of torch.
        with_members: Whether to include members of imported classes: those whose names occur in
            fsdp_c, and the constructors.
    """
    modules = [module for package in PACKAGES for module in source.list_modules(package)]
    places = {(module, name) for module in modules for name in source.list_definitions(module)}
    members = {"__init__", "__new__", *torch_uses.list_words()} if with_members else set()
    for dotted in torch_uses.list_names():
        place = source.find(dotted)
        if place is not None:
            defined = source.list_definitions(place[0])
            names = (f"{place[1]}.{member}" for member in members)
            places |= {place, *((place[0], name) for name in names if name in defined)}
    return {place: source.list_definitions(place[0])[place[1]] for place in places}


# ---- differences ---------------------------------------------------------------------------------


def _format_uses(module: str, name: str) -> str:
    files = torch_uses.find_files(name)
    mark = "replaced; " if torch_uses.is_replaced(module, name) else ""
    return f"{mark}{', '.join(files)}" if files else "not used by name"


def _describe_change(old: Definition, new: Definition, full: bool) -> Iterator[str]:
    if old.kind != new.kind:
        yield f"kind       {old.kind} -> {new.kind}"
    if old.signature != new.signature:
        parts = (old.signature.split(", "), new.signature.split(", "))
        changes = [x for x in difflib.ndiff(*parts) if x[0] in "+-"]
        yield f"signature  {'   '.join(changes)}"
    yield from (f"message  - {text}" for text in old.messages if text not in new.messages)
    yield from (f"message  + {text}" for text in new.messages if text not in old.messages)
    changes = list(difflib.unified_diff(old.lines, new.lines, lineterm="", n=1))[2:]
    added = sum(line.startswith("+") for line in changes)
    yield f"source     {added} lines added, {sum(x.startswith('-') for x in changes)} removed"
    if full:
        yield from changes


def compare(old: Surface, new: Surface, full: bool = False) -> Iterator[str]:
    """Yields the lines of a report about the definitions that differ.

    Args:
        old: The surface of one release.
        new: The surface of another release.
        full: Whether to include the changed lines of each definition.
    """
    previous = ""
    for place in sorted(old.keys() | new.keys()):
        before, after = old.get(place), new.get(place)
        if before is not None and after is not None and before.digest == after.digest:
            continue
        module, name = place
        if module != previous:
            yield f"\n{module}"
            previous = module
        present = after or before
        assert present is not None
        mark = "~" if before and after else "-" if before else "+"
        yield f"  {mark} {name}  [{_format_uses(module, name)}]"
        if before is None or after is None:
            yield f"      {present.kind:<10} {present.signature}"
        else:
            yield from (f"      {line}" for line in _describe_change(before, after, full))


def _compare_headers(old: TorchSource, new: TorchSource) -> Iterator[str]:
    """Yields the headers that the bridge includes and that differ."""
    for header in torch_uses.list_headers():
        before, after = (source.read_header(header) for source in (old, new))
        if before != after and (before is None or after is None):
            yield f"  {'-' if after is None else '+'} {header}"
        elif before is not None and after is not None and before != after:
            changes = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0)
            yield f"  ~ {header}  {sum(line[0] in '+-' for line in changes) - 2} lines"


def print_difference(old: TorchSource, new: TorchSource, full: bool) -> None:
    """Prints the report about two releases."""
    before, after = read_surface(old), read_surface(new)
    common = before.keys() & after.keys()
    changed = sum(before[place].digest != after[place].digest for place in common)
    print(
        f"torch {old.version} -> {new.version}, names that fsdp_c uses or replaces: "
        f"{len(after) - len(common)} added, {len(before) - len(common)} removed, "
        f"{changed} changed, {len(common) - changed} unchanged"
    )
    for line in compare(before, after, full):
        print(line)
    headers = list(_compare_headers(old, new))
    print(
        f"\nheaders that csrc includes: {len(headers)} of {len(torch_uses.list_headers())} differ"
    )
    for line in headers:
        print(line)


# ---- the record ----------------------------------------------------------------------------------


def get_column(version: str) -> str:
    """Returns the release without its local part: ``2.13.0`` of ``2.13.0+cpu``."""
    return version.partition("+")[0]


def read_record(file: Path = RECORD) -> dict[str, dict[tuple[str, str], str]]:
    """Returns the digests of each recorded release, oldest first, by module and name.

    ``-`` stands for an absent definition. Definitions that were not recorded are missing.
    """
    columns: list[str] = []
    record: dict[str, dict[tuple[str, str], str]] = {}
    module = ""
    for line in file.read_text().splitlines():
        if line.startswith("releases "):
            columns = line.split()[1:]
            record = {column: {} for column in columns}
        elif line.startswith("  "):
            name, *digests = line.split()
            current = "?"
            for column, digest in zip(columns, digests, strict=True):
                current = current if digest == "=" else digest
                if current != "?":
                    record[column][module, name] = current
        elif line and not line.startswith("#"):
            module = line
    return record


def _get_release_key(release: str) -> tuple[list[int], bool, str]:
    """Returns a key that sorts releases by number, and ``2.15.0a0`` before ``2.15.0``."""
    match = re.match(r"\d+(\.\d+)*", release)
    assert match is not None, release
    return [int(part) for part in match[0].split(".")], match[0] == release, release


def write_record(record: dict[str, dict[tuple[str, str], str]], file: Path = RECORD) -> None:
    """Writes the digests of :func:`read_record` without definitions that no release has."""
    columns = sorted(record, key=_get_release_key)
    lines = ["# Written by `make torch-record`. build_support/torch_diff.py describes the columns."]
    lines.append(f"releases {' '.join(columns)}")
    module = ""
    for place in sorted({place for column in record.values() for place in column}):
        digests = [record[column].get(place, "?") for column in columns]
        if not {"-", "?"}.issuperset(digests):
            if place[0] != module:
                lines.append(place[0])
                module = place[0]
            shown = ["=" if i and digests[i - 1] == d else d for i, d in enumerate(digests)]
            lines.append(f"  {place[1]} {' '.join(shown)}")
    file.write_text("\n".join(lines) + "\n")


def _read_digest(source: TorchSource, place: tuple[str, str]) -> str:
    definition = source.list_definitions(place[0]).get(place[1])
    return "-" if definition is None else definition.digest


def record_releases(sources: list[TorchSource], file: Path = RECORD) -> None:
    """Adds releases to the record, or replaces them.

    A name stays in the record if fsdp_c uses it with one of ``sources``, or if a column of another
    release has it. Each of ``sources`` gets a digest of each name, or ``-`` if the release has no
    such definition. A new name is ``?`` in the columns of other releases.
    """
    record = read_record(file) if file.exists() else {}
    surfaces = {get_column(source.version): read_surface(source) for source in sources}
    used = {place for surface in surfaces.values() for place in surface}
    used |= {
        place for column, places in record.items() if column not in surfaces for place in places
    }
    for source in sources:
        found = {place: _read_digest(source, place) for place in used}
        record[get_column(source.version)] = found
    write_record(record, file)


def check(source: TorchSource, file: Path = RECORD) -> Iterator[str]:
    """Yields a line for each difference between a release and the record; none if they agree.

    A patch release is compared with the recorded release of its minor version.
    """
    column = get_column(source.version)
    record = read_record(file)
    if column not in record:
        minor = column.rpartition(".")[0]
        column = next((release for release in record if release.rpartition(".")[0] == minor), "")
    if not column:
        yield (
            f"torch {source.version} is not in {file.name}: follow docs/torch-releases.md, whose "
            f"last step is `make torch-record`"
        )
        return
    surface = read_surface(source, with_members=False)
    for place in sorted(record[column].keys() | surface.keys()):
        found = _read_digest(source, place)
        recorded = record[column].get(place)
        if recorded is None:
            yield f"{'.'.join(place)} is used and not recorded: run `make torch-record`"
        elif found != recorded:
            change = f"changed since torch {column} was recorded, from {recorded} to {found}"
            yield f"{'.'.join(place)} {change} [{_format_uses(*place)}]"


# ---- the command ---------------------------------------------------------------------------------


def _run(arguments: argparse.Namespace) -> int:
    sources = [TorchSource(path) for path in arguments.torch]
    if arguments.record:
        record_releases(sources)
        print(f"recorded torch {', '.join(source.version for source in sources)} in {RECORD}")
        return 0
    if arguments.check:
        lines = [line for source in sources for line in check(source)]
        print("\n".join(lines) or "the record agrees")
        return 1 if lines else 0
    if len(sources) != 2:
        print("torch_diff: expected two releases, OLD and NEW", file=sys.stderr)
        return 2
    print_difference(sources[0], sources[1], arguments.full)
    return 0


def main() -> int:
    """Parses the arguments and runs the command; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("torch", nargs="+", type=Path, help="environment, folder or wheel")
    parser.add_argument("--full", action="store_true", help="print the changed lines, too")
    parser.add_argument("--check", action="store_true", help="compare with the record")
    parser.add_argument("--record", action="store_true", help="write the record")
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `... | head` ends the command silently
    return _run(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
