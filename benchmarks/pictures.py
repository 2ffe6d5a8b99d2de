"""The plots of the report, each drawn from the JSON data of one benchmark.

    python benchmarks/pictures.py steps.json steps.svg

draws an overview of the data of ``steps.py``. ``record_results.py`` calls the same function for
the picture of README.md.
"""

from __future__ import annotations

import argparse
import json
import textwrap
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure

matplotlib.rcParams["svg.hashsalt"] = "fsdp_c"  # equal data, equal files

COLORS = {
    "bare": "#b5b5b5", "ddp": "#8a6bb1", "torch": "#d98e32", "fsdp_c": "#2f5f94",
    "shared": "#7fa8d1", "torch.distributed": "#3f9c8f", "memcpy": "#b5b5b5",
    "pack": "#2f5f94", "unpack": "#3f9c8f", "pack gradients": "#d98e32",
}  # fmt: skip
METRICS = {
    "wall": "wall, ms", "cpu": "CPU, ms", "faults": "page faults", "peak": "peak above start, MiB",
}  # fmt: skip


def draw_steps(data: dict[str, Any], path: Path) -> None:
    """Draws a column per model and a row per metric. The lighter part of a bar is the optimizer."""
    models = data["models"]
    figure = Figure(figsize=(1.2 + 3.4 * len(models), 9.5), layout="constrained")
    grid = figure.subplots(len(METRICS), len(models), squeeze=False)
    for column, (title, model) in enumerate(models.items()):
        for row, (metric, label) in enumerate(METRICS.items()):
            axes = grid[row][column]
            _draw_bars(axes, model["costs"], metric)
            if row == 0:
                axes.set_title(f"{title} ({model['optimizer']})", fontsize=11)
            if column == 0:
                axes.set_ylabel(label)
    figure.suptitle(
        "One step on two gloo ranks: forward and backward; lighter: with the optimizer",
        fontsize=12,
    )
    figure.savefig(path, dpi=100)


def _draw_bars(axes: Any, costs: dict[str, Any], metric: str) -> None:
    names = list(costs)
    with_optimizer = [costs[name]["with"][metric] or 0 for name in names]
    without_optimizer = [costs[name]["without"][metric] or 0 for name in names]
    colors = [COLORS[name] for name in names]
    axes.bar(names, with_optimizer, color=colors, alpha=0.4)
    axes.bar(names, without_optimizer, color=colors)
    for index, value in enumerate(with_optimizer):
        axes.text(index, max(value, without_optimizer[index]), _format_short(value), ha="center",
                  va="bottom", fontsize=8)  # fmt: skip
    axes.margins(y=0.15)
    _style_axes(axes)


def _format_short(value: float) -> str:
    if value >= 100_000:
        return f"{value / 1000:,.0f}k"
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def _style_axes(axes: Any) -> None:
    axes.grid(axis="y", color="#e8e8e8", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def draw_memory(data: dict[str, Any], path: Path) -> None:
    """Draws resident memory over one step of torch and fsdp_c, a panel per model."""
    models = {title: m for title, m in data["models"].items() if any(m["memory"].values())}
    figure = Figure(figsize=(13, 3.4 * -(-len(models) // 2)), layout="constrained")
    grid = list(figure.subplots(-(-len(models) // 2), 2, squeeze=False).flat)
    for axes in grid[len(models) :]:
        axes.remove()
    for axes, (title, model) in zip(grid, models.items(), strict=False):
        for name, samples in model["memory"].items():
            x, y = [t for t, _ in samples], [mib for _, mib in samples]
            axes.plot(x, y, label=name, color=COLORS[name], linewidth=1.5)
        axes.set_title(f"{title}, forward to {model['optimizer']}'s step", fontsize=11)
        axes.set_xlabel("ms")
        axes.set_ylabel("MiB above the start")
        axes.legend(frameon=False)
        _style_axes(axes)
    figure.savefig(path, dpi=100)


def draw_host(data: dict[str, Any], path: Path) -> None:
    """Draws host time against parameters per group, a panel per job."""
    jobs = {name: job for name, job in data.items() if isinstance(job, dict) and name != "guard"}
    figure = Figure(figsize=(4.5 * len(jobs), 4), layout="constrained")
    for axes, (title, job) in zip(figure.subplots(1, len(jobs), squeeze=False)[0], jobs.items()):
        rows = {int(count): row for count, row in job["us_per_group_step"].items()}
        for name in ("torch", "fsdp_c"):
            axes.plot(list(rows), [row[name] for row in rows.values()], "o-", label=name,
                      color=COLORS[name])  # fmt: skip
        axes.set_title(title, fontsize=11)
        axes.set_xticks(list(rows))
        axes.set_xlabel("parameters per group")
        axes.set_ylabel("us of CPU per group and step")
        axes.set_yscale("log")
        axes.legend(frameon=False)
        _style_axes(axes)
    figure.savefig(path, dpi=100)


def draw_bandwidth(data: dict[str, Any], path: Path) -> None:
    """Draws GB/s against size: gathers, reductions, kernels."""
    titles = {"gather": "gather", "reduction": "reduction", "kernel": "CPU kernels"}
    figure = Figure(figsize=(14, 4), layout="constrained")
    for axes, (operation, title) in zip(figure.subplots(1, 3), titles.items()):
        sizes = {int(size) / 2**20: row for size, row in data[operation].items()}
        for name in next(iter(sizes.values())):
            axes.plot(list(sizes), [row[name] for row in sizes.values()], "o-", label=name,
                      color=COLORS[name])  # fmt: skip
        axes.set_title(title, fontsize=11)
        axes.set_xscale("log", base=4)
        axes.set_xticks(list(sizes), [f"{size:.2g}" for size in sizes])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
        axes.set_xlabel("MiB of unsharded data")
        axes.set_ylabel("GB/s")
        axes.legend(frameon=False)
        _style_axes(axes)
    figure.savefig(path, dpi=100)


def draw_overview(data: dict[str, Any], path: Path) -> None:
    """Draws the wall time of forward and backward of torch and fsdp_c, a pair of bars per model.

    The length of a bar is relative to torch's. Labels are milliseconds.
    """
    models = data["models"]
    figure = Figure(figsize=(8, 1 + 0.8 * len(models)), layout="constrained")
    axes = figure.subplots()
    labels = {"torch": "torch's FSDP2", "fsdp_c": "fsdp_c"}
    for row, model in enumerate(models.values()):
        times = {name: model["costs"][name]["without"]["wall"] for name in labels}
        for offset, (name, milliseconds) in zip((-0.2, 0.2), times.items()):
            share = milliseconds / times["torch"]
            label = None if row else labels[name]
            axes.barh(row + offset, share, 0.38, color=COLORS[name], label=label)
            text = f" {_format_short(milliseconds)} ms"
            axes.text(share, row + offset, text, va="center", fontsize=10)
    titles = [textwrap.fill(model["title"], 26) for model in models.values()]
    axes.set_yticks(range(len(models)), titles)
    axes.invert_yaxis()
    axes.set_xlim(0, 1.2)
    axes.set_xlabel("wall time relative to torch's FSDP2")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.suptitle("Forward and backward of one step on two ranks", fontsize=12)
    figure.legend(frameon=False, loc="outside lower right", ncols=2)
    figure.savefig(path, metadata={"Date": None})


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Draws an overview of the data of steps.py.")
    parser.add_argument("source", type=Path, help="JSON of steps.py")
    parser.add_argument("target", type=Path, help="picture")
    options = parser.parse_args()
    options.target.parent.mkdir(parents=True, exist_ok=True)
    draw_overview(json.loads(options.source.read_text()), options.target)
