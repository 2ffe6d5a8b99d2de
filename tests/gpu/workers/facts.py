"""The machine: what later figures were measured on."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sysconfig
from pathlib import Path

import torch
from outcome import ON_CUDA, ROOT, conclude

QUERY = "name,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,power.limit"
TOOLS = ("nvcc", "compute-sanitizer", "cuobjdump", "gcc", "g++", "ninja")
PACKAGES = ("ninja", "numpy", "pytest", "pytest_timeout", "setuptools", "triton", "xdist")


def output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"({error})"
    return done.stdout.strip()


def gpu() -> dict[str, object]:
    if not ON_CUDA:
        return {}
    values = output("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader").split(", ")
    found: dict[str, object] = dict(zip(QUERY.split(","), values))
    if torch.cuda.is_available():
        about = torch.cuda.get_device_properties(0)
        found["sms"] = about.multi_processor_count
        found["capability"] = f"{about.major}.{about.minor}"
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def main() -> None:
    found = {
        "gpu": gpu(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "nvcc": (output("nvcc", "--version").splitlines() or ["?"])[-1],
        "commit": os.environ.get("VISIT_COMMIT") or output("git", "rev-parse", "--short", "HEAD"),
        "python_h": Path(sysconfig.get_paths()["include"], "Python.h").exists(),
        "tools": {name: shutil.which(name) for name in TOOLS},
        "packages": {name: importlib.util.find_spec(name) is not None for name in PACKAGES},
    }
    usable = torch.cuda.is_available() or not ON_CUDA
    card = found["gpu"].get("name", "no GPU") if ON_CUDA else "no GPU asked for"  # type: ignore
    line = f"{card}, torch {found['torch']}, Python {found['python']}, {found['cpus']} cores"
    conclude(usable, line if usable else f"no usable CUDA device: {line}", **found)


if __name__ == "__main__":
    main()
