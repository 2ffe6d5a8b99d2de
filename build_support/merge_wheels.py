"""Merges wheels of fsdp_c for several torch releases into one wheel per Python version.

``python -m build_support.merge_wheels OUT WHEEL...`` writes the merged wheels to the folder OUT.
The wheels must be builds of one source. They differ in the extension ``_C`` and in its record
``_C.json``. The merged wheel has each extension in a folder of its own, and one record.
``fsdp_c/_compat/build_info.py`` selects the extension at import. The module ``_dry_run`` does not
depend on torch, so the merged wheel has that of the first wheel.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

RECORD = "fsdp_c/_C.json"
EXTENSIONS = "_extensions"
"""The folder of all extensions in the package. It has a folder for each torch release."""


def unpack(wheel: Path, folder: Path) -> Path:
    """Unpacks a wheel. Returns the folder with its files."""
    run_wheel("unpack", str(wheel), "--dest", str(folder))
    [tree] = folder.iterdir()
    return tree


def run_wheel(*arguments: str) -> None:
    """Runs a command of the package ``wheel``. Its output appears only if it fails."""
    command = [sys.executable, "-m", "wheel", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        raise SystemExit(f"fsdp_c: {' '.join(command)} failed: {done.stdout}")


def find_extension(tree: Path) -> Path:
    """Returns the extension ``_C`` of an unpacked wheel."""
    [extension] = (tree / "fsdp_c").glob("_C.*.so")
    return extension


def list_shared_files(tree: Path) -> dict[str, bytes]:
    """Returns the contents of the files that all wheels must have in common, by path.

    The metadata and the compiled ``_dry_run`` depend on the tools of the build, ``_C`` and its
    record on torch. The result does not contain them.
    """
    return {
        str(path.relative_to(tree)): path.read_bytes()
        for path in tree.rglob("*")
        if path.is_file()
        and not path.relative_to(tree).parts[0].endswith(".dist-info")
        and path.suffix != ".so"
        and str(path.relative_to(tree)) != RECORD
    }


def check_same_sources(trees: Sequence[Path]) -> None:
    """Raises SystemExit if the wheels were not built from the same files."""
    expected = list_shared_files(trees[0])
    for tree in trees[1:]:
        found = list_shared_files(tree)
        names = sorted(set(found) | set(expected))
        differing = [name for name in names if found.get(name) != expected.get(name)]
        if differing:
            raise SystemExit(
                f"fsdp_c: the wheels to merge differ in {', '.join(differing)}: build them from "
                "the same files"
            )


def read_record(tree: Path) -> dict[str, Any]:
    """Returns the record of an unpacked wheel, which has one build."""
    record: dict[str, Any] = json.loads((tree / RECORD).read_text())
    return record


def get_release(record: dict[str, Any]) -> tuple[int, ...]:
    """Returns the torch release that a record with one build is for: (2, 13)."""
    [build] = record["builds"]
    return tuple(map(int, build["torch"].split(".")[:2]))


def merge(wheels: Sequence[Path], out: Path) -> None:
    """Writes one wheel with the extensions of ``wheels``, which are for the same Python.

    Raises:
        SystemExit: Two wheels are for the same torch release, or their shared files differ.
    """
    with tempfile.TemporaryDirectory() as scratch:
        trees = [unpack(wheel, Path(scratch) / str(i)) for i, wheel in enumerate(wheels)]
        check_same_sources(trees)
        records = [read_record(tree) for tree in trees]
        releases = [get_release(record) for record in records]
        if len(set(releases)) < len(releases):
            names = ", ".join(str(record["builds"][0]["torch"]) for record in records)
            raise SystemExit(f"fsdp_c: two wheels for one torch release: {names}")
        builds = []
        for release, record, tree in sorted(zip(releases, records, trees)):
            folder = f"{EXTENSIONS}/torch{'.'.join(map(str, release))}"
            extension = find_extension(tree)
            target = trees[0] / "fsdp_c" / folder / extension.name
            target.parent.mkdir(parents=True)
            shutil.move(extension, target)
            builds.append(record["builds"][0] | {"folder": folder})
        merged = {"python": records[0]["python"], "source": "", "builds": builds}
        (trees[0] / RECORD).write_text(json.dumps(merged, indent=2) + "\n")
        out.mkdir(parents=True, exist_ok=True)
        run_wheel("pack", str(trees[0]), "--dest-dir", str(out))


def main(arguments: Sequence[str]) -> None:
    """Merges the wheels of each Python version."""
    if len(arguments) < 2:
        raise SystemExit("usage: python -m build_support.merge_wheels OUT WHEEL...")
    out, *names = map(Path, arguments)
    by_name: dict[str, list[Path]] = {}
    for path in names:
        by_name.setdefault(path.name, []).append(path)
    for wheels in by_name.values():
        merge(wheels, out)


if __name__ == "__main__":
    main(sys.argv[1:])
