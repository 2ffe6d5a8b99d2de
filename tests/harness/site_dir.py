"""Creates a PYTHONPATH folder with the metadata of an installed fsdp_c, including entry points."""

from __future__ import annotations

import os
import re
from pathlib import Path

import fsdp_c_autoload

ROOT = Path(__file__).resolve().parents[2]


def entry_points() -> str:
    """Returns the section ``torch.backends`` of pyproject.toml in the format of pip's metadata."""
    text = (ROOT / "pyproject.toml").read_text()
    section = re.search(r'^\[project\.entry-points\."torch\.backends"\]\n((?:.+\n)+)', text, re.M)
    assert section is not None
    return "[torch.backends]\n" + section[1].replace('"', "")


def installed_environment(folder: Path, **extra: str) -> dict[str, str]:
    """Returns the environment of a child process that imports fsdp_c from this checkout and finds
    its entry points in ``folder``."""
    info = folder / "fsdp_c-0.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fsdp_c\nVersion: 0\n")
    (info / "entry_points.txt").write_text(entry_points())
    code = Path(fsdp_c_autoload.__file__).parents[1]
    environment = {name: value for name, value in os.environ.items() if name != "FSDP_C"}
    environment["PYTHONPATH"] = os.pathsep.join([str(folder), str(code)])
    environment.pop("PYTHONSAFEPATH", None)
    return {**environment, **extra}
