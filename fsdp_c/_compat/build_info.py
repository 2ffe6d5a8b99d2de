"""Checks that the extension was built for this torch and this Python, before it is loaded.

An extension built for another release fails with "undefined symbol", or loads and crashes later.
``setup.py`` writes the releases that it builds for to ``_C.json``, beside the extension.
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import torch

BUILD_RECORD = Path(__file__).parents[1] / "_C.json"


@dataclass(frozen=True)
class Build:
    """The contents of ``_C.json``.

    Attributes:
        torch: The release of torch, with its local part: ``2.13.0+cpu``.
        python: The release of Python: ``3.11``.
        kernels: The devices with kernels: ``CPU``, or ``CPU and CUDA 13.0``.
        source: The folder of the build, which may no longer exist.
    """

    torch: str
    python: str
    kernels: str
    source: str


def read_build() -> Build | None:
    """Returns the contents of ``_C.json``; ``None`` if the file is missing or invalid."""
    try:
        record = json.loads(BUILD_RECORD.read_text())
        return Build(**{field.name: str(record[field.name]) for field in fields(Build)})
    except (OSError, ValueError, KeyError):
        return None


def get_release(version: str) -> str:
    """Returns the part of a version that must match: ``2.13`` of ``2.13.0+cpu``."""
    return ".".join(version.partition("+")[0].split(".")[:2])


def format_build_command(build: Build | None) -> str:
    """Returns the command that rebuilds the extension."""
    source = build.source if build is not None else str(BUILD_RECORD.parents[1])
    if not (Path(source) / "setup.py").is_file():
        source = "PATH/TO/A/CLONE/OF/fsdp_c"
    options = "--no-build-isolation --no-deps --force-reinstall"
    return f"{sys.executable} -m pip install {options} {source}"


def find_mismatch(build: Build | None, has_extension: bool) -> str | None:
    """Returns one sentence with the mismatch and the command that fixes it, or ``None``."""
    clone = BUILD_RECORD.parents[1]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    if build is not None and get_release(build.torch) != get_release(torch.__version__):
        return (
            f"fsdp_c was built for torch {build.torch} and this is torch {torch.__version__}: "
            f"build it again with  {format_build_command(build)}"
        )
    if not has_extension:
        if build is None and (clone / "setup.py").is_file():
            return (
                f"this is the source of fsdp_c, in {clone}: to use what pip has installed, leave "
                f"that folder (cd ..); to build here, run  {sys.executable} -m pip install "
                f"--no-build-isolation --no-deps -e {clone}"
            )
        other_python = (
            f", but for Python {build.python}" if build and build.python != python else ""
        )
        command = format_build_command(build)
        return (
            f"fsdp_c has no extension for Python {python}{other_python}: build it with  {command}"
        )
    return None


def check_build() -> None:
    """Checks that the extension was built for this torch release.

    Raises:
        ImportError: The extension is missing or was built for another release. The message has
            both releases and the build command.
    """
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    extension_exists = any(BUILD_RECORD.with_name(f"_C{suffix}").exists() for suffix in suffixes)
    mismatch = find_mismatch(read_build(), extension_exists)
    if mismatch is not None:
        raise ImportError(mismatch)


check_build()
