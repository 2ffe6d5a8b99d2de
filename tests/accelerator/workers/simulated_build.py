"""Builds the simulated device: tests/accelerator/device/*.cpp into build/accelerator."""

from __future__ import annotations

import fcntl
import hashlib
import os
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "tests/accelerator/device"
SHARED = (ROOT / "tests/harness/simulation", ROOT / "csrc/kernels")
NAME = "simulated_device"
FLAGS = ["-std=c++20", "-O1", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]


def build_library() -> Path:
    """Returns the path of the built extension module. Recompiles objects whose source, headers,
    flags, Python or torch have changed."""
    folder = ROOT / "build/accelerator"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        objects = _objects(folder)
        target = folder / f"{NAME}-{_digest(str(objects))}.so"
        if not target.exists():
            for old in folder.glob("*.so"):
                old.unlink()
            libraries = ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", "-ldl"]
            paths = [f"-L{path}" for path in cpp_extension.library_paths()]
            _run("-shared", *map(str, objects), *paths, *libraries, "-o", str(target))
    return target


def _objects(folder: Path) -> list[Path]:
    """Compiles one object per source.

    An object's name contains a hash of its source, all headers, the flags, Python and torch.
    """
    files = (path for folder in (SOURCES, *SHARED) for path in sorted(folder.glob("*.h")))
    headers = "".join(path.read_text() for path in files)
    common = _digest(torch.__version__ + sys.version + " ".join(_flags()) + headers)
    object_by_source = {
        path: folder / f"{path.stem}-{_digest(common + path.read_text())}.o"
        for path in sorted(SOURCES.glob("*.cpp"))
    }
    for old in set(folder.glob("*.o")) - set(object_by_source.values()):
        old.unlink()
    missing = [pair for pair in object_by_source.items() if not pair[1].exists()]
    with ThreadPoolExecutor(int(os.environ.get("MAX_JOBS") or 2)) as pool:
        list(pool.map(lambda pair: _compile(*pair), missing))
    return list(object_by_source.values())


def _flags() -> list[str]:
    paths = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    includes = [word for path in paths for word in ("-isystem", path)]
    return [*FLAGS, f"-DTORCH_EXTENSION_NAME={NAME}", *includes]


def _compile(source: Path, target: Path) -> None:
    partial = target.with_suffix(".partial")
    _run(*_flags(), "-c", str(source), "-o", str(partial))
    partial.rename(target)


def _run(*arguments: str) -> None:
    result = subprocess.run(["g++", *arguments], capture_output=True, text=True)
    if result.returncode:
        raise RuntimeError(f"{result.args}\n{result.stdout}{result.stderr}")


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


if __name__ == "__main__":
    print(build_library())
