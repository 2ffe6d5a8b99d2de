"""Selects the extension for the installed torch and Python, checks that it fits, and loads it.

A build from source has one extension, in the folder of the package. A wheel has one extension per
torch release, each in a folder of its own (``build_support/merge_wheels.py``). An extension for
another release fails with "undefined symbol", or loads and crashes later. The file ``_C.json``
records what each extension was built against.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from . import abi

BUILD_RECORD = Path(__file__).parents[1] / "_C.json"


@dataclass(frozen=True)
class Build:
    """The torch release and the kernels of one extension.

    Attributes:
        torch: The release of torch, with its local part: ``2.13.0+cpu``.
        python: The release of Python: ``3.11``.
        kernels: The devices with kernels: ``CPU``, or ``CPU and CUDA 13.0``.
        source: The folder of the build, which may no longer exist. Empty in a wheel.
        folder: The folder of the extension, relative to the package.
        sizes: Sizes of torch's classes (``abi.read_sizes``).
    """

    torch: str
    python: str
    kernels: str
    source: str
    folder: str
    sizes: dict[str, int]


def read_builds() -> list[Build]:
    """Returns the extensions that the record lists; an empty list if it is missing or invalid."""
    try:
        record = json.loads(BUILD_RECORD.read_text())
        common: dict[str, Any] = {name: str(record[name]) for name in ("python", "source")}
        return [Build(**common, **build) for build in record["builds"]]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def get_release(version: str) -> str:
    """Returns the part of a version that must match: ``2.13`` of ``2.13.0+cpu``."""
    return ".".join(version.partition("+")[0].split(".")[:2])


def select_build(builds: list[Build]) -> Build | None:
    """Returns the build for the release of the installed torch."""
    release = get_release(torch.__version__)
    return next((build for build in builds if get_release(build.torch) == release), None)


def read_build() -> Build | None:
    """Returns what the loaded extension was built against; ``None`` if it has no record."""
    return select_build(read_builds())


def format_build_command(builds: list[Build]) -> str:
    """Returns the command that builds the extension for the installed torch."""
    source = builds[0].source if builds else str(BUILD_RECORD.parents[1])
    if not source or not (Path(source) / "setup.py").is_file():
        source = "PATH/TO/A/CLONE/OF/fsdp_c"
    options = "--no-build-isolation --no-deps --force-reinstall"
    return f"{sys.executable} -m pip install {options} {source}"


def has_extension(folder: str) -> bool:
    """Whether ``folder`` of the package contains an extension for this Python."""
    names = (f"_C{suffix}" for suffix in importlib.machinery.EXTENSION_SUFFIXES)
    return any((BUILD_RECORD.parent / folder / name).exists() for name in names)


def find_mismatch(builds: list[Build]) -> str | None:
    """Returns one sentence with the mismatch and the command that fixes it, or ``None``."""
    clone = BUILD_RECORD.parents[1]
    command = format_build_command(builds)
    build = select_build(builds)
    if builds and build is None:
        releases = ", ".join(get_release(build.torch) for build in builds)
        return (
            f"fsdp_c was built for torch {releases} and this is torch {torch.__version__}: "
            f"build it again with  {command}"
        )
    if not has_extension(build.folder if build is not None else ""):
        if build is None and (clone / "setup.py").is_file():
            return (
                f"this is the source of fsdp_c, in {clone}: to use what pip has installed, leave "
                f"that folder (cd ..); to build here, run  {sys.executable} -m pip install "
                f"--no-build-isolation --no-deps -e {clone}"
            )
        python = f"{sys.version_info.major}.{sys.version_info.minor}"
        other_python = (
            f", but for Python {build.python}" if build and build.python != python else ""
        )
        return (
            f"fsdp_c has no extension for Python {python}{other_python}: build it with  {command}"
        )
    return find_size_mismatch(build, command) if build is not None else None


def find_size_mismatch(build: Build, command: str) -> str | None:
    """Returns one sentence if classes of torch have other sizes than in the build, or ``None``."""
    found = abi.read_sizes()
    differing = [
        f"{name} ({found[name]} bytes instead of {size})"
        for name, size in build.sizes.items()
        if found.get(name, size) != size
    ]
    if not differing:
        return None
    return (
        f"fsdp_c was built for torch {build.torch}, and torch {torch.__version__} has other sizes "
        f"of {', '.join(differing)}: build it again with  {command}"
    )


def load_extension() -> None:
    """Loads the extension for this torch release as ``fsdp_c._C``.

    Raises:
        ImportError: No extension fits, or it does not load. The message has the reason and the
            command that builds a fitting extension.
    """
    builds = read_builds()
    mismatch = find_mismatch(builds)
    if mismatch is not None:
        raise ImportError(mismatch)
    package = __name__.partition(".")[0]
    build = select_build(builds)
    if build is not None and build.folder:
        sys.modules[package].__path__.append(str(BUILD_RECORD.parent / build.folder))
    try:
        importlib.import_module(f"{package}._C")
    except ImportError as error:
        raise ImportError(
            f"the extension of fsdp_c does not load with torch {torch.__version__} ({error}): "
            f"build it again with  {format_build_command(builds)}"
        ) from error


load_extension()
