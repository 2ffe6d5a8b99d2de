"""Builds and loads one_rank_group.cpp, a c10d backend of several ranks of which one is real.

``python one_rank_group.py`` builds the module for the installed torch, with g++ only.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import subprocess
import sys
import sysconfig
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from outcome import BUILT
from torch.utils import cpp_extension

SOURCE = Path(__file__).with_suffix(".cpp")
FLAGS = ("-std=c++20", "-O1", "-DNDEBUG", "-fPIC", "-fvisibility=hidden", "-shared")


def build_library() -> Path:
    """Returns the path of the module. Compiles the module for new source, Python or torch."""
    text = torch.__version__ + sys.version + SOURCE.read_text()
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    library = BUILT / f"one_rank_group-{digest}.so"
    if not library.exists():
        BUILT.mkdir(parents=True, exist_ok=True)
        paths = [*cpp_extension.include_paths(), sysconfig.get_paths()["include"]]
        includes = [word for path in paths for word in ("-isystem", path)]
        links = [f"-L{path}" for path in cpp_extension.library_paths()]
        links += ["-lc10", "-ltorch_cpu", "-ltorch", "-ltorch_python", "-ldl"]
        partial = library.with_suffix(f".{os.getpid()}.partial")
        command = ["g++", *FLAGS, *includes, str(SOURCE), *links, "-o", str(partial)]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode:
            raise RuntimeError(f"{' '.join(command)}\n{result.stderr}")
        partial.rename(library)
    return library


@functools.cache
def load() -> Any:
    """Returns the module."""
    spec = importlib.util.spec_from_file_location("one_rank_group", build_library())
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_backend(store: dist.Store, rank: int, size: int, timeout: timedelta) -> Any:
    """Returns a backend. On CUDA an NCCL communicator of one rank moves the data."""
    inner = None
    if torch.cuda.is_available():
        options: Any = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        inner = dist.ProcessGroupNCCL(dist.HashStore(), 0, 1, options)
    return load().OneRankGroup(rank, size, inner)


if __name__ == "__main__":
    print(build_library())
