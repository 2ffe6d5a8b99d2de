"""Finds the torch to build against, and records the build.

The extension is built against the torch of the environment that pip installs into. pip's isolated
build environment does not contain that torch.
"""

from __future__ import annotations

import importlib.util
import json
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

NO_TORCH = (
    "fsdp_c is built against an installed torch, and {python} has none: "
    "install torch first, then fsdp_c with  pip install --no-build-isolation ."
)

MINUTES_CPU = 1  # for all C and C++ files
MINUTES_CUDA = 3


def add_to_path() -> None:
    """Makes ``import torch`` work in an isolated build.

    If torch is not found, adds the site-packages of the running Python to ``sys.path``.

    Raises:
        SystemExit: torch is not found. The message names the remedy.
    """
    if importlib.util.find_spec("torch") is None:
        site = sysconfig.get_paths()
        for path in (site["purelib"], site["platlib"]):
            if path not in sys.path:
                sys.path.append(path)  # at the end, after the packages of the build environment
        importlib.invalidate_caches()
    if importlib.util.find_spec("torch") is None:
        raise SystemExit(NO_TORCH.format(python=sys.executable))


def find_library(name: str, folders: Sequence[Path]) -> str:
    """Returns the path of a shared library in the first folder that has it.

    Raises:
        SystemExit: No folder has the library.
    """
    for folder in folders:
        path = folder / f"lib{name}.so"
        if path.exists():
            return str(path)
    listed = ", ".join(map(str, folders))
    raise SystemExit(
        f"fsdp_c: lib{name}.so of torch is in none of the folders {listed}: install torch again"
    )


def definitions() -> dict[str, str]:
    """Returns CMake's definitions of the headers and libraries of torch and Python.

    The headers of torch 2.13 and later require C++20.

    Raises:
        SystemExit: A library of torch is not found.
    """
    import torch
    from torch.utils import cpp_extension

    extension = cpp_extension.CppExtension("", [])
    folders = [Path(folder) for folder in extension.library_dirs]
    libraries = [find_library(name, folders) for name in extension.libraries]
    release = tuple(map(int, torch.__version__.split(".")[:2]))
    return {
        "FSDP_C_PYTHON_INCLUDE": sysconfig.get_paths()["include"],
        "FSDP_C_MODULE_SUFFIX": sysconfig.get_config_var("EXT_SUFFIX"),
        "FSDP_C_TORCH_INCLUDES": ";".join(extension.include_dirs),
        "FSDP_C_TORCH_LIBRARIES": ";".join(libraries),
        "FSDP_C_TORCH_CXX_STANDARD": "20" if release >= (2, 13) else "17",
    }


def describe_build(files: int, kernels: str, jobs: int) -> str:
    """Returns a line that describes the build and estimates its duration."""
    import torch

    minutes = MINUTES_CPU + (MINUTES_CUDA if "CUDA" in kernels else 0)
    python = ".".join(map(str, sys.version_info[:2]))
    return (
        f"fsdp_c: building for Python {python} and torch {torch.__version__}, kernels for "
        f"{kernels}: {files} files with {jobs} compilers at a time. The first build takes about "
        f"{minutes} min; later builds compile only changed files"
    )


def read_sizes(package: Path) -> dict[str, int]:
    """Returns sizes of torch's classes, from ``_compat/abi.py`` of the folder ``package``.

    The file is loaded alone, because an import of the package would need the extension.
    """
    spec = importlib.util.spec_from_file_location("fsdp_c_abi", package / "_compat/abi.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sizes: dict[str, int] = module.read_sizes()
    return sizes


def write_record(folder: Path, kernels: str, source: Path) -> None:
    """Writes ``_C.json`` beside the extension. ``fsdp_c/_compat/build_info.py`` reads it."""
    import torch

    build = {
        "torch": torch.__version__,
        "kernels": kernels,
        "folder": "",
        "sizes": read_sizes(source / "fsdp_c"),
    }
    python = ".".join(map(str, sys.version_info[:2]))
    record = {"python": python, "source": str(source), "builds": [build]}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "_C.json").write_text(json.dumps(record, indent=2) + "\n")
