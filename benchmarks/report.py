"""What the benchmarks share: the fake process group, the two implementations, tables and JSON."""

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
from torch.distributed.fsdp import fully_shard as stock_fully_shard

# The package of this checkout, installed or not.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

FullyShard = Callable[..., Any]

POLICIES: dict[str, MixedPrecisionPolicy] = {
    "fp32": MixedPrecisionPolicy(),
    "mixed": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}
"""The two precisions measured: everything fp32; bf16 parameters with fp32 reduction."""


def fake_mesh(world_size: int, device: str = "cpu") -> DeviceMesh:
    """A 1-D mesh whose collectives complete at once and move nothing (rank 0 of the world)."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    return init_device_mesh(device, (world_size,))


def implementations() -> dict[str, FullyShard]:
    """``fully_shard`` of torch ("stock") and of this project ("ours"), the latter if it imports."""
    found: dict[str, FullyShard] = {"stock": stock_fully_shard}
    try:
        from fsdp_c import fully_shard
    except ImportError as error:
        print(f"note: fsdp_c cannot be imported ({error}); showing torch's FSDP2 alone\n")
    else:
        found["ours"] = fully_shard
    return found


def table(titles: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Rows as text, columns aligned to the right but for the first; floats with two decimals."""
    cells = [[cell(value) for value in row] for row in (titles, *rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(titles))]
    lines = []
    for row in cells:
        padded = [row[0].ljust(widths[0])]
        padded += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        lines.append("  ".join(padded))
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def write_json(path: str | None, benchmark: str, results: dict[str, Any]) -> None:
    """Write results with the facts of the machine they were taken on; nothing if path is None."""
    if path is None:
        return
    facts = {
        "benchmark": benchmark,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
    }
    Path(path).write_text(json.dumps(facts | results, indent=2) + "\n")
