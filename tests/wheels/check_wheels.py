"""Installs wheels beside several torch releases, tests them, and tests the other ways to install.

``python check_wheels.py [--write] WHEEL... --pythons PYTHON...`` makes an environment for each
PYTHON that has torch. The environment has that torch, but neither fsdp_c nor a compiler, and pip
has no network. Each environment installs the wheel for its Python version, and runs
``python -m fsdp_c --check`` and ``short_parity.py``. The first environment of each Python version
then installs in the other ways of ``WAYS``. They must install the same files. For ``-e``, Python
must find the files.

``--no-ways`` omits these. ``--write`` stores the results of each environment in docs/wheels.json,
and updates their table in docs/compatibility.md. They replace earlier results with the same
versions of Python and torch. The exit code is 1 if anything fails.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import wheel_table

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "build" / "wheels-check"
PARITY_SETTINGS = 40
PARITY_PATH = ("harness", "parity/workers")
NOT_LINKED = ("fsdp_c", "__editable__")

WAYS = ("uv pip install WHEEL", "pip install .", "pip install SDIST", "pip install -e .")
"""Ways to install, besides ``pip install WHEEL``. Those with a dot run in an unpacked SDIST."""

SITE = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
FACTS = """
import json, platform, torch
from fsdp_c._compat.build_info import read_build
print(json.dumps({"python": platform.python_version(), "torch": torch.__version__,
                  "built_for": read_build().torch}))
"""
IMPORT_TIME = """
import time, torch, torch.distributed.fsdp
begin = time.process_time()
import fsdp_c
print(time.process_time() - begin)
"""
LIST_FILES = """
import importlib.metadata, json
files = importlib.metadata.distribution("fsdp_c").files
print(json.dumps([str(f) for f in files if f.suffix != ".pyc"]))
"""
FIND_FILES = """
import importlib.util, json, pathlib, sys
from fsdp_c._runtime import nvrtc
def exists(file):
    *parents, name = file.split("/")
    if parents[-1] == "kernel_sources":
        return (nvrtc.SOURCE_FOLDER / name).is_file()
    folders = importlib.util.find_spec(".".join(parents)).submodule_search_locations
    return any((pathlib.Path(folder) / name).is_file() for folder in folders)
print(json.dumps([file for file in json.loads(sys.argv[1]) if not exists(file)]))
"""


class Failed(RuntimeError):
    """A command failed. The message is the end of its output."""


def run(command: list[str], **options: Any) -> str:
    """Runs a command. Returns its output; raises Failed with the output's end."""
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )
    if done.returncode:
        raise Failed(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-3000:]}")
    return done.stdout


class Environment:
    """A virtual environment with the packages of another Python environment, without fsdp_c."""

    def __init__(self, base: Path, folder: Path) -> None:
        self.base, self.folder = base, folder
        run([str(base), "-m", "venv", "--without-pip", str(folder)])
        self.python = folder / "bin/python"
        site = Path(run([str(self.python), "-c", SITE]).strip())
        for path in Path(run([str(base), "-c", SITE]).strip()).iterdir():
            if path.name.startswith(NOT_LINKED):
                continue
            if path.suffix == ".dist-info":  # uv ignores links
                shutil.copytree(path, site / path.name)
            else:
                (site / path.name).symlink_to(path)
        self.programs = folder / "programs"  # the whole PATH: pip and fsdp_c find no program
        self.programs.mkdir()

    def variables(self, **extra: str) -> dict[str, str]:
        """Returns environment variables: no checkout, no network for pip, no program on the PATH.

        ``extra`` may set another PATH. PYTHONDONTWRITEBYTECODE is dropped, because the first import
        after an install with uv or ``-e`` must write the bytecode.
        """
        dropped = ("PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "FSDP_C", "CC", "CXX")
        dropped += ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL")
        kept = {name: value for name, value in os.environ.items() if name not in dropped}
        pip = {"PIP_NO_INDEX": "1", "PIP_NO_CACHE_DIR": "1", "PIP_CONFIG_FILE": os.devnull}
        return kept | pip | {"PYTHONSAFEPATH": "1", "PATH": str(self.programs)} | extra

    def run(self, *arguments: str, **extra: str) -> str:
        """Runs Python without a compiler on the PATH. Returns the output."""
        command = [str(self.python), *arguments]
        return run(command, cwd=self.folder, env=self.variables(**extra))

    def install(self, *arguments: str, **extra: str) -> float:
        """Runs ``pip install`` with extra environment variables. Returns its seconds of CPU."""
        command = [str(self.base), "-m", "pip", "--python", str(self.python), "install"]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        run([*command, *arguments], cwd=self.folder, env=self.variables(**extra))
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    def remove(self) -> None:
        command = [str(self.base), "-m", "pip", "--python", str(self.python), "uninstall"]
        run([*command, "-y", "fsdp_c"], cwd=self.folder, env=self.variables())

    def list_files(self) -> set[str]:
        """Returns the installed files, without metadata.

        The extension has the name that a build from source gives it.
        """
        files = json.loads(self.run("-c", LIST_FILES))
        names = {re.sub(r"/_extensions/torch[0-9.]+/", "/", file) for file in files}
        return {name for name in names if not name.partition("/")[0].endswith(".dist-info")}

    def find_missing(self, files: set[str]) -> list[str]:
        """Returns the files that Python does not find in the folders of their packages."""
        missing: list[str] = json.loads(self.run("-c", FIND_FILES, json.dumps(sorted(files))))
        return missing

    def measure_import(self) -> float:
        """Returns the milliseconds of CPU time of ``import fsdp_c`` after torch: the least of 5."""
        return 1000 * min(float(self.run("-c", IMPORT_TIME)) for _ in range(5))

    def check(self) -> None:
        """Runs ``python -m fsdp_c --check``."""
        output = self.run("-m", "fsdp_c", "--check")
        if "not installed with pip" in output:
            raise Failed(f"the entry point is not installed:\n{output}")

    def compare(self) -> str:
        """Runs short_parity.py. Returns the last line of its output."""
        path = os.pathsep.join(str(ROOT / "tests" / name) for name in PARITY_PATH)
        script = str(ROOT / "tests/wheels/short_parity.py")
        output = self.run(script, str(PARITY_SETTINGS), PYTHONPATH=path)
        return output.strip().splitlines()[-1]


def check_environment(environment: Environment, wheel: Path) -> dict[str, Any]:
    """Installs the wheel and runs it. Returns the row of the results."""
    seconds = environment.install(str(wheel))
    facts: dict[str, Any] = json.loads(environment.run("-c", FACTS))
    environment.check()
    return facts | {
        "install_seconds": round(seconds, 1),
        "import_ms": round(environment.measure_import()),
        "check": "ok",
        "parity": environment.compare(),
    }


def install_way(environment: Environment, way: str, wheel: Path, source: Path) -> None:
    """Installs fsdp_c in one of WAYS. ``source`` is a folder with the SDIST and its contents."""
    tree = next(path for path in source.glob("fsdp_c-*") if path.is_dir())
    if way.startswith("uv"):
        uv = [str(Path(sys.executable).parent / "uv"), "pip", "install", "--no-index", "--quiet"]
        run([*uv, "--python", str(environment.python), str(wheel)], env=environment.variables())
        return
    target = str(next(source.glob("*.tar.gz"))) if "SDIST" in way else str(tree)
    editable = ["-e"] if way.endswith("-e .") else []
    # pip unpacks SDIST below `source`, so that ccache finds the objects of the unpacked tree.
    environment.install(
        "--no-build-isolation",
        *editable,
        target,
        PATH=f"{environment.base.parent}:{os.environ['PATH']}",
        TMPDIR=str(source),
        CCACHE_BASEDIR=str(source.parent),
    )


def check_ways(environment: Environment, wheel: Path, source: Path) -> list[dict[str, Any]]:
    """Installs in all WAYS. Compares the files with the installed wheel. Returns the rows.

    ``source`` is a new folder for the SDIST.
    """
    expected = environment.list_files()
    build = [str(environment.base), "setup.py", "-q", "sdist", "--dist-dir", str(source)]
    run(build, cwd=ROOT)
    sdist = next(source.glob("*.tar.gz"))
    run(["tar", "-xzf", str(sdist), "-C", str(source)])
    rows = []
    for way in ("pip install WHEEL", *WAYS):
        if way in WAYS:
            environment.remove()
            install_way(environment, way, wheel, source)
        missing = environment.find_missing(expected)
        found = expected if way.endswith("-e .") else environment.list_files()
        if missing or found != expected:
            raise Failed(f"{way}: other files: {sorted(found ^ expected)}, missing: {missing}")
        environment.check()
        milliseconds = round(environment.measure_import())
        rows.append({"way": way, "files": len(found), "import_ms": milliseconds, "check": "ok"})
        print(rows[-1], flush=True)
    return rows


def read_tag(base: Path) -> str:
    """Returns the Python tag of an environment: cp311."""
    code = "import sys; print(f'cp{sys.version_info.major}{sys.version_info.minor}')"
    return run([str(base), "-c", code]).strip()


def describe_wheel(wheel: Path) -> dict[str, Any]:
    """Returns the size of a wheel in bytes, and the torch releases of its extensions."""
    with zipfile.ZipFile(wheel) as archive:
        record = json.loads(archive.read("fsdp_c/_C.json"))
    return {"bytes": wheel.stat().st_size, "torch": [build["torch"] for build in record["builds"]]}


def check_all(
    wheels: list[Path], pythons: list[Path], folder: Path, with_ways: bool
) -> Iterator[dict[str, Any]]:
    """Yields the results of each environment that passes. Raises Failed after the last one.

    The results of the first environment of each Python contain those of WAYS.
    """
    failures: list[str] = []
    tags_with_ways: set[str] = set()
    for index, base in enumerate(pythons):
        try:
            tag = read_tag(base)
            wheel = next((wheel for wheel in wheels if f"-{tag}-" in wheel.name), None)
            if wheel is None:
                raise Failed(f"no wheel for {tag}")
            environment = Environment(base, folder / str(index))
            row = check_environment(environment, wheel)
            row["date"] = datetime.date.today().isoformat()
            print(row, flush=True)
            facts = {name: row[name] for name in ("python", "torch", "date")}
            ways: list[dict[str, Any]] = []
            if with_ways and tag not in tags_with_ways:
                ways = [facts | way for way in check_ways(environment, wheel, folder / tag)]
                tags_with_ways.add(tag)
            wheels_of_row = {wheel.name: describe_wheel(wheel)}
            yield {"wheels": wheels_of_row, "environments": [row], "ways": ways}
        except Failed as failure:
            failures.append(f"{base}: {failure}")
            print(failures[-1], flush=True)
    if failures:
        raise Failed(f"{len(failures)} of {len(pythons)} environments failed")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write docs/wheels.json and its table")
    parser.add_argument(
        "--no-ways", action="store_true", help="skip WAYS, which compile for minutes"
    )
    parser.add_argument("wheels", nargs="+", type=Path)
    parser.add_argument("--pythons", nargs="+", type=Path, required=True)
    options = parser.parse_args()
    wheels = [wheel.resolve() for wheel in options.wheels]
    # A virtual environment's interpreter is a link, which must not be resolved.
    pythons = [Path(os.path.abspath(python)) for python in options.pythons]
    shutil.rmtree(FOLDER, ignore_errors=True)
    try:
        for results in check_all(wheels, pythons, FOLDER, not options.no_ways):
            if options.write:
                wheel_table.record(results)
    except Failed as failure:
        print(failure)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
