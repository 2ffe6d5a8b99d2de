"""Helpers shared by the benchmarks: fake process group, implementations, tables and JSON."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

ROOT = Path(__file__).resolve().parents[1]
# Import fsdp_c from this checkout, even if another version is installed.
sys.path.insert(0, str(ROOT))

from fsdp_c_autoload import redirect  # noqa: E402

if redirect.is_redirected(torch_fully_shard):
    raise SystemExit(
        f"{Path(sys.argv[0]).name}: FSDP_C=1 replaces torch's fully_shard by fsdp_c, "
        "so torch cannot be measured: unset FSDP_C"
    )

VARIABLES = " ".join(
    f"{name}={value}"
    for name, value in sorted(os.environ.items())
    if name.startswith("FSDP_C_") and not name.startswith(("FSDP_C_BENCH_", "FSDP_C_CUDA_"))
)
"""The settings of fsdp_c in the environment, before a benchmark changes them."""

FullyShard = Callable[..., Any]

POLICIES: dict[str, MixedPrecisionPolicy] = {
    "fp32": MixedPrecisionPolicy(),
    "mixed": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}
"""The measured precisions: all in fp32; bf16 parameters with fp32 reductions."""


def make_fake_mesh(world_size: int, device: str = "cpu") -> DeviceMesh:
    """Creates a 1-D mesh on a fake process group. This process is rank 0.

    Its collectives complete immediately, and copy this rank's data instead of that of peers.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    return init_device_mesh(device, (world_size,))


def get_implementations() -> dict[str, FullyShard]:
    """Returns ``fully_shard`` of torch and of fsdp_c."""
    # Not at the top: cuda_steps.py imports this file with a torch that fsdp_c may not be built for.
    from fsdp_c import fully_shard

    return {"torch": torch_fully_shard, "fsdp_c": fully_shard}


def format_table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Formats rows as text. The first column is left-aligned, other columns are right-aligned."""
    cells = [[format_cell(value) for value in row] for row in (titles, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(titles))]
    lines = []
    for row in cells:
        padded = [row[0].ljust(widths[0])]
        padded += [text.rjust(width) for text, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(padded))
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def format_cell(value: object) -> str:
    """Formats a float with two decimals, and None as "-"."""
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def describe_machine() -> str:
    """Describes processor, cores that this process may use, and memory."""
    cpuinfo, meminfo = (Path("/proc", name) for name in ("cpuinfo", "meminfo"))
    if not cpuinfo.exists():
        return f"{platform.machine()}, {os.cpu_count()} cores"
    cores = len(os.sched_getaffinity(0))
    model = re.search(r"model name\s*: (.*)", cpuinfo.read_text())
    memory = re.search(r"MemTotal:\s*(\d+)", meminfo.read_text())
    name = model[1] if model else platform.machine()
    return f"{name}, {cores} cores, {int(memory[1]) / 2**20 if memory else 0:.0f} GiB"


def parse_positive(text: str) -> int:
    """Parses an integer above zero for argparse."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text} is not a positive integer")
    return int(text)


def find_commit() -> str:
    """Returns the commit of the measured tree; empty if git is missing."""
    command = ["git", "describe", "--always", "--dirty"]
    try:
        process = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    except OSError:
        return ""
    return process.stdout.strip()


def format_command(script: str, options: Sequence[str]) -> str:
    """Returns the command that runs a script of this folder, without the option ``--json``."""
    options = [word for word in options if not word.startswith("--json=")]
    words = ["python", f"benchmarks/{Path(script).name}", *options]
    if "--json" in words:
        index = words.index("--json")
        del words[index : index + 2]
    return " ".join(f'"{word}"' if " " in word else word for word in words)


def write_json(path: str | None, benchmark: str, results: dict[str, Any]) -> None:
    """Writes results with command, machine and date. Does nothing if ``path`` is None.

    The command begins with ``VARIABLES``.
    """
    if path is None:
        return
    environment = {
        "benchmark": benchmark,
        "command": f"{VARIABLES} {format_command(sys.argv[0], sys.argv[1:])}".lstrip(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "commit": find_commit(),
        "machine": describe_machine(),
        "load": f"{os.getloadavg()[0]:.1f}",
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    Path(path).write_text(json.dumps(environment | results, indent=2) + "\n")
