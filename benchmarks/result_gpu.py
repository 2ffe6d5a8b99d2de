"""The tables of the GPU check (tests/gpu/gpu_check.sh) for docs/benchmarks.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

EXPLANATION = (
    "The GPU check of [the tests](../tests/README.md) on one device. In most steps a process is "
    "rank 0 of a group of eight, and copies on the device replace the data of the other ranks. "
    "The steps `compiled` and `scripts` run on one rank over NCCL. So no time contains a network, "
    "and the times compare the two implementations on this machine only."
)

BELOW = ("bandwidth", "host", "gpt")
"""Steps whose results have tables of their own."""

Table = tuple[str, tuple[str, ...], list[list[Any]]]
"""A sentence, titles and rows of a table. Without rows the sentence stands alone."""


def make_tables(data: dict[str, Any]) -> Iterator[Table]:
    rows: list[list[Any]] = [
        [f"`{name}`", step["verdict"], step["seconds"], "below" if name in BELOW else step["line"]]
        for name, step in data["steps"].items()
    ]
    yield "The steps, with their seconds:", ("step", "verdict", "s", "result"), rows
    for note in data["notes"]:
        yield note, (), []
    if "sizes" in data.get("gpt", {}):
        yield _make_training_table(data["gpt"]["sizes"])
    if "us_per_group_step" in data.get("host", {}):
        yield _make_host_table(data["host"]["us_per_group_step"])
    if "kernels" in data.get("bandwidth", {}):
        yield _make_kernel_table(data["bandwidth"])


def _make_training_table(sizes: dict[str, Any]) -> Table:
    rows = []
    for title, size in sizes.items():
        torch_ms, fsdp_c_ms = (size["ms"][name] for name in ("torch", "fsdp_c"))
        peaks = [size["peak_bytes"][name] / 2**30 for name in ("torch", "fsdp_c")]
        rows.append([title, torch_ms, fsdp_c_ms, torch_ms / fsdp_c_ms, *peaks])
    titles = ("GPT", "torch, ms", "fsdp_c, ms", "torch / fsdp_c", "peak: torch, GiB", "fsdp_c, GiB")
    return "A step of forward, backward and fused AdamW in bf16; medians:", titles, rows


def _make_host_table(times: dict[str, dict[str, float]]) -> Table:
    rows = [
        [job, row["torch"], row["fsdp_c"], row["torch"] / row["fsdp_c"]]
        for job, row in times.items()
    ]
    sentence = (
        "Microseconds per unit (9 parameters) and step on a fake group, above the unsharded model; "
        "minima. The clock `cpu` is the CPU time of the process. The clock `wall` is the time of a "
        "step that begins on an idle device. Both include the launches of the fake group's copies:"
    )
    return sentence, ("job", "torch", "fsdp_c", "torch / fsdp_c"), rows


def _make_kernel_table(bandwidth: dict[str, Any]) -> Table:
    rows = [
        [name, row["tb_per_s"], row["of_memcpy"], row["torch_of_memcpy"]]
        for name, row in bandwidth["kernels"].items()
    ]
    sentence = (
        "Bandwidth of the kernels on the parameters of a layer of an 8 B Llama; read and written "
        f"bytes count. A device copy has {bandwidth['memcpy_tb_per_s']:.2f} TB/s; the last two "
        "columns are fractions of it:"
    )
    return sentence, ("kernel", "TB/s", "fsdp_c", "torch's operation"), rows
