"""Builds the simulated device: tests/accelerator/device/*.cpp into build/accelerator."""

from __future__ import annotations

import fcntl
import hashlib
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch
from torch.utils import cpp_extension

ROOT = Path(__file__).resolve().parents[3]
SOURCES = ROOT / "tests/accelerator/device"
SHARED = (ROOT / "tests/harness/simulation", ROOT / "csrc/kernels")
NAME = "simulated_device"
FLAGS = ["-std=c++20", "-O1", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-Wall", "-Wextra"]


def build_library() -> Path:
    """Returns the path of the built extension module.

    The file's name contains a hash of the sources, all headers, the flags, Python and torch. One
    compiler reads all sources, because torch's headers take two thirds of the time of a source.
    """
    folder = ROOT / "build/accelerator"
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        sources = sorted(SOURCES.glob("*.cpp"))
        headers = [path for source in (SOURCES, *SHARED) for path in sorted(source.glob("*.h"))]
        texts = [path.read_text() for path in (*sources, *headers)]
        target = folder / f"{NAME}-{_digest(torch.__version__, sys.version, *_flags(), *texts)}.so"
        if not target.exists():
            for old in folder.glob("*.so"):
                old.unlink()
            _compile(sources, target)
    return target


def _flags() -> list[str]:
    paths = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
    includes = [word for path in paths for word in ("-isystem", path)]
    return [*FLAGS, f"-DTORCH_EXTENSION_NAME={NAME}", *includes]


def _compile(sources: list[Path], target: Path) -> None:
    includes = "".join(f'#include "{path}"\n' for path in sources)
    links = [f"-L{path}" for path in cpp_extension.library_paths()]
    links += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", "-ldl"]
    partial = target.with_suffix(".partial")
    command = ["g++", "-shared", *_flags(), "-x", "c++", "-", "-x", "none", *links]
    result = subprocess.run(
        [*command, "-o", str(partial)], input=includes, capture_output=True, text=True
    )
    if result.returncode:
        raise RuntimeError(f"{result.args}\n{result.stdout}{result.stderr}")
    partial.rename(target)


def _digest(*texts: str) -> str:
    return hashlib.sha256("\n".join(texts).encode()).hexdigest()[:16]


if __name__ == "__main__":
    print(build_library())
