"""Records the machine: device, driver, versions and tools."""

from __future__ import annotations

import datetime
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
TOOLS = ("nvcc", "compute-sanitizer", "cuobjdump", "gcc", "g++", "cmake", "ninja")
PACKAGES = ("ninja", "numpy", "pytest", "pytest_timeout", "setuptools", "triton", "xdist")


def output(*command: str) -> str:
    try:
        completed = subprocess.run(command, capture_output=True, text=True, timeout=20, cwd=ROOT)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"({error})"
    return completed.stdout.strip()


def gpu() -> dict[str, object]:
    if not ON_CUDA:
        return {}
    values = output("nvidia-smi", f"--query-gpu={QUERY}", "--format=csv,noheader").split(", ")
    facts: dict[str, object] = dict(zip(QUERY.split(","), values))
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts["sms"] = properties.multi_processor_count
        facts["capability"] = f"{properties.major}.{properties.minor}"
        facts["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return facts


def main() -> None:
    facts = {
        "gpu": gpu(),
        "date": datetime.date.today().isoformat(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "nvcc": (output("nvcc", "--version").splitlines() or ["?"])[-1],
        "commit": os.environ.get("GPU_CHECK_COMMIT")
        or output("git", "rev-parse", "--short", "HEAD"),
        "python_h": Path(sysconfig.get_paths()["include"], "Python.h").exists(),
        "tools": {name: shutil.which(name) for name in TOOLS},
        "packages": {name: importlib.util.find_spec(name) is not None for name in PACKAGES},
    }
    has_device = torch.cuda.is_available() or not ON_CUDA
    device_name = facts["gpu"].get("name", "no GPU") if ON_CUDA else "no GPU requested"  # type: ignore
    line = f"{device_name}, torch {facts['torch']}, Python {facts['python']}, {facts['cpus']} cores"
    conclude(has_device, line if has_device else f"no usable CUDA device: {line}", **facts)


if __name__ == "__main__":
    main()
