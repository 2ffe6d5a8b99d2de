"""Helpers shared by the benchmarks: fake process group, implementations, tables and JSON."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

# Import fsdp_c from this checkout, even if another version is installed.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

FullyShard = Callable[..., Any]

POLICIES: dict[str, MixedPrecisionPolicy] = {
    "fp32": MixedPrecisionPolicy(),
    "mixed": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}
"""The measured precisions: all in fp32; bf16 parameters with fp32 reductions."""


def make_fake_mesh(world_size: int, device: str = "cpu") -> DeviceMesh:
    """Creates a 1-D mesh on a fake process group. This process is rank 0.

    Its collectives complete immediately and move no data.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    return init_device_mesh(device, (world_size,))


def get_implementations() -> dict[str, FullyShard]:
    """Returns ``fully_shard`` of torch and, if it can be imported, of fsdp_c."""
    functions: dict[str, FullyShard] = {"torch": torch_fully_shard}
    try:
        from fsdp_c import fully_shard
    except ImportError as error:
        print(f"note: fsdp_c cannot be imported ({error}); measuring only torch's FSDP2\n")
    else:
        functions["fsdp_c"] = fully_shard
    return functions


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


def write_json(path: str | None, benchmark: str, results: dict[str, Any]) -> None:
    """Writes results with a description of the machine. Does nothing if ``path`` is None."""
    if path is None:
        return
    environment = {
        "benchmark": benchmark,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
    }
    Path(path).write_text(json.dumps(environment | results, indent=2) + "\n")
