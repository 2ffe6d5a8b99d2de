"""Which torch the extension is built against: found, named in the version, noted beside it.

Part of ``setup.py``. pip builds in an environment of its own, which has no torch on purpose: the
one to build against is that of the environment that pip installs into.
"""

from __future__ import annotations

import importlib.util
import json
import re
import sys
import sysconfig
from pathlib import Path

NO_TORCH = (
    "fsdp_c is built against the torch that is there, and there is none for {python}: install "
    "torch first, then fsdp_c with  pip install --no-build-isolation ."
)

MINUTES_CXX = 0.6  # of one job: each of the C++ files, which include torch's headers
MINUTES_C = 0.01


def find(paths: list[str] | None = None) -> None:
    """Makes ``import torch`` work in an isolated build.

    Args:
        paths: Where to look besides; ``None``: the site-packages of the running Python.

    Raises:
        SystemExit: there is no torch; the message says what to do.
    """
    if importlib.util.find_spec("torch") is None:
        known = sysconfig.get_paths()
        for path in paths if paths is not None else [known["purelib"], known["platlib"]]:
            if path not in sys.path:
                sys.path.append(path)  # at the end: what the build brought comes first
        importlib.invalidate_caches()
    if importlib.util.find_spec("torch") is None:
        raise SystemExit(NO_TORCH.format(python=sys.executable))


def version(file: Path) -> str:
    """The version with the torch that it is built for: ``0.1.0+torch2.13.0.cpu``.

    A source distribution is for any torch.
    """
    [found] = re.findall(r'^__version__ = "(.*)"$', file.read_text(), re.M)
    if "sdist" in sys.argv:
        return str(found)
    import torch

    return f"{found}+torch{re.sub(r'[^a-z0-9]+', '.', torch.__version__.lower())}"


def plan(sources: list[str], kernels: str, jobs: int) -> str:
    """What is about to be built, and how long the first time takes."""
    import torch

    cxx = [source for source in sources if source.endswith(".cpp")]
    minutes = (len(cxx) * MINUTES_CXX + (len(sources) - len(cxx)) * MINUTES_C) / jobs
    minutes += 3 * kernels.count("CUDA")
    python = ".".join(map(str, sys.version_info[:2]))
    return (
        f"fsdp_c: building for Python {python} and torch {torch.__version__}, kernels for "
        f"{kernels}: {len(sources)} files with {jobs} compilers at a time. The first time takes "
        f"about {max(1, round(minutes))} min, later ones what changed"
    )


def note(folder: Path, kernels: str, source: Path) -> None:
    """Writes what was built beside the extension, for ``fsdp_c/built_for.py``."""
    import torch

    python = ".".join(map(str, sys.version_info[:2]))
    noted = {"torch": torch.__version__, "python": python, "kernels": kernels}
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**noted, "source": str(source)}, indent=2)
    (folder / "_C.json").write_text(text + "\n")


find()
