"""Which torch and Python the extension was built for, looked at before it is loaded.

An extension of another release fails with "undefined symbol", or worse: it loads and crashes.
``setup.py`` notes what it builds for in a file beside the extension.
"""

from __future__ import annotations

import importlib.machinery
import json
import sys
from dataclasses import dataclass, fields
from pathlib import Path

import torch

NOTE = Path(__file__).with_name("_C.json")


@dataclass(frozen=True)
class Build:
    """What ``setup.py`` has noted.

    Attributes:
        torch: The release, with its local part: ``2.13.0+cpu``.
        python: ``3.11``.
        kernels: ``CPU``, or ``CPU and CUDA 13.0``.
        source: The folder that it was built in; it may be gone.
    """

    torch: str
    python: str
    kernels: str
    source: str


def build() -> Build | None:
    """What was noted; ``None``: nothing, by a build of before that."""
    try:
        noted = json.loads(NOTE.read_text())
        return Build(**{field.name: str(noted[field.name]) for field in fields(Build)})
    except (OSError, ValueError, KeyError):
        return None


def release(version: str) -> str:
    """What has to be the same: ``2.13`` of ``2.13.0+cpu``."""
    return ".".join(version.partition("+")[0].split(".")[:2])


def command(found: Build | None) -> str:
    """The command that builds it anew."""
    source = found.source if found is not None else str(NOTE.parents[1])
    if not (Path(source) / "setup.py").is_file():
        source = "PATH/TO/A/CLONE/OF/fsdp_c"
    options = "--no-build-isolation --no-deps --force-reinstall"
    return f"{sys.executable} -m pip install {options} {source}"


def what_is_wrong(found: Build | None, has_extension: bool) -> str | None:
    """One sentence with the command that mends it; ``None``: nothing is wrong."""
    clone = NOTE.parents[1]
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    if found is not None and release(found.torch) != release(torch.__version__):
        return (
            f"fsdp_c was built for torch {found.torch} and this is torch {torch.__version__}: "
            f"build it again with  {command(found)}"
        )
    if not has_extension:
        if found is None and (clone / "setup.py").is_file():
            return (
                f"this is the source of fsdp_c, in {clone}: to use what pip has installed, leave "
                f"that folder (cd ..); to build here, run  {sys.executable} -m pip install "
                f"--no-build-isolation --no-deps -e {clone}"
            )
        other = f", but for Python {found.python}" if found and found.python != python else ""
        return (
            f"fsdp_c has no extension for Python {python}{other}: build it with  {command(found)}"
        )
    return None


def check() -> None:
    """Refuses an extension that does not fit.

    Raises:
        ImportError: what it was built for, what this is, and the command that mends it.
    """
    suffixes = importlib.machinery.EXTENSION_SUFFIXES
    there = any(NOTE.with_name(f"_C{suffix}").exists() for suffix in suffixes)
    wrong = what_is_wrong(build(), there)
    if wrong is not None:
        raise ImportError(wrong)


check()
