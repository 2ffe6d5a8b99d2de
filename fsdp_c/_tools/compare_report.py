"""The table, the JSON file and the picture of ``compare``."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from ..version import __version__
from .compare_results import GRADIENT, LOSS, PARAMETER, Comparison, Verdict
from .plotting import require_matplotlib

IMPLEMENTATIONS = ("torch", "fsdp_c")
COLORS = {"torch": "#8c8c8c", "fsdp_c": "#1f77b4"}
MAX_ROWS = 20
"""The largest number of steps that the table lists. Steps with differences have priority."""


def describe_job(arguments: tuple[str, ...], result: Comparison) -> str:
    """Returns one line with the script, the ranks, steps, rounds and releases."""
    ranks, rounds = len(result.summaries), len(result.list_run_names("torch"))
    steps = result.count_steps()
    parts = (
        _format_count(ranks, "rank"),
        _format_count(steps, "step"),
        _format_count(rounds, "round"),
    )
    releases = f"torch {torch.__version__}, fsdp_c {__version__}"
    return f"{' '.join(arguments)}: {', '.join(parts)} ({releases})"


def _format_count(number: int, noun: str) -> str:
    return f"{number} {noun}" + ("" if number == 1 else "s")


# ---- text ----------------------------------------------------------------------------------------


def format_report(arguments: tuple[str, ...], result: Comparison) -> str:
    """Returns the tables of steps and of measurements, the notes and the verdict."""
    lines = [describe_job(arguments, result)]
    if result.count_steps():
        lines += ["", *_format_steps(result), "", *_format_measurements(result), ""]
    lines += [f"note: {note}" for note in result.notes]
    return "\n".join([*lines, *_format_verdict(result)])


def _format_steps(result: Comparison) -> list[str]:
    rows: list[tuple[str, ...]] = [
        ("step", "loss", "", "gradient norm", "", "gradients", "parameters")
    ]
    rows.append(("", "torch", "fsdp_c", "torch", "fsdp_c", "that differ", "that differ"))
    names = [result.list_run_names(implementation)[0] for implementation in IMPLEMENTATIONS]
    shown = _choose_steps(result)
    for step in shown:
        values = [result.compute_mean_loss(name, step) for name in names]
        values += [result.compute_gradient_norm(name, step) for name in names]
        counts = (
            f"{result.count_differences(step, kind)} of {result.count_values(step, kind)}"
            for kind in (GRADIENT, PARAMETER)
        )
        rows.append((str(step), *map(_format_value, values), *counts))
    left_out = result.count_steps() - len(shown)
    return [*_align(rows), *([f"({left_out} more steps are not shown)"] if left_out else [])]


def _choose_steps(result: Comparison) -> list[int]:
    steps = range(1, result.count_steps() + 1)
    kinds = (LOSS, GRADIENT, PARAMETER)
    differ = [s for s in steps if any(result.count_differences(s, kind) for kind in kinds)]
    return sorted([*differ, *(s for s in steps if s not in differ)][:MAX_ROWS])


def _format_value(value: float | None) -> str:
    return "-" if value is None else f"{value:.7g}"


def _format_measurements(result: Comparison) -> list[str]:
    rows: list[tuple[str, ...]] = [("", *IMPLEMENTATIONS, "torch : fsdp_c")]
    seconds = [result.compute_median_seconds(name) for name in IMPLEMENTATIONS]
    step_count = sum(map(len, result.list_step_seconds("torch")))
    rows.append(
        _make_row(
            f"ms per step (median of {step_count})", [s and 1000 * s for s in seconds], "{:.4g}"
        )
    )
    for label, key in (("memory", "peak_memory"), ("device memory", "peak_device_memory")):
        peaks = [result.find_peak_memory(name, key) / 2**20 or None for name in IMPLEMENTATIONS]
        if any(peaks):
            rows.append(_make_row(f"peak {label}, MiB", peaks, "{:.1f}"))
    collectives = [result.average_collectives(name) for name in IMPLEMENTATIONS]
    if any(collectives):
        counts = [entry and entry["count"] for entry in collectives]
        rows.append(_make_row("collectives per step", counts, "{:.0f}"))
        sizes = [entry and entry["bytes"] / 2**20 for entry in collectives]
        rows.append(_make_row("MiB per step in them", sizes, "{:.4g}"))
    return _align(rows)


def _make_row(label: str, values: list[Any], form: str) -> tuple[str, str, str, str]:
    left, right = (("-" if value is None else form.format(value)) for value in values)
    ratio = f"{values[0] / values[1]:.2f}" if values[0] and values[1] else "-"
    return label, left, right, ratio


def _align(rows: list[tuple[str, ...]]) -> list[str]:
    """Aligns the first column to the left and all others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]


def _format_verdict(result: Comparison) -> list[str]:
    if result.verdict is Verdict.DIFFERENT:
        return [f"different: the first difference is in {result.differences[0]}"]
    if result.verdict is Verdict.INCONCLUSIVE:
        return ["inconclusive"]
    steps = _format_count(result.count_steps(), "step")
    ranks = _format_count(len(result.summaries), "rank")
    return [f"equal: losses, gradients and parameters of {steps} have the same bits on {ranks}"]


# ---- files ---------------------------------------------------------------------------------------


def write_json(path: Path, arguments: tuple[str, ...], result: Comparison) -> None:
    """Writes the results. Times are in seconds, sizes in bytes. Lists are by step, round or rank.

    Raises:
        OSError: The file cannot be written.
    """
    implementations = {
        name: {
            "seconds_per_step": result.compute_median_seconds(name),
            "seconds_by_round": result.list_step_seconds(name),
            "peak_memory": result.find_peak_memory(name),
            "peak_device_memory": result.find_peak_memory(name, "peak_device_memory"),
            "collectives_per_step": result.average_collectives(name),
            "losses": _list_values(result, result.compute_mean_loss, name),
            "gradient_norms": _list_values(result, result.compute_gradient_norm, name),
        }
        for name in IMPLEMENTATIONS
    }
    first_difference = result.differences[0] if result.differences else None
    content = {
        "verdict": result.verdict.name.lower(),
        "exit_code": result.verdict.value,
        "arguments": arguments,
        "torch": torch.__version__,
        "fsdp_c": __version__,
        "ranks": len(result.summaries),
        "steps": result.count_steps(),
        "rounds": len(result.list_run_names("torch")),
        "notes": result.notes,
        "first_difference": first_difference and vars(first_difference),
        "differences": [vars(difference) for difference in result.differences],
        "implementations": implementations,
        "by_rank": result.summaries,
    }
    path.write_text(json.dumps(_name_nonfinite(content), indent=1, allow_nan=False) + "\n")


def _name_nonfinite(value: Any) -> Any:
    """Replaces floats that JSON does not have by their names: "nan", "inf" and "-inf"."""
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, dict):
        return {key: _name_nonfinite(item) for key, item in value.items()}
    return [*map(_name_nonfinite, value)] if isinstance(value, (list, tuple)) else value


def _list_values(
    result: Comparison, compute: Callable[[str, int], float | None], implementation: str
) -> list[float | None]:
    name = result.list_run_names(implementation)[0]
    return [compute(name, step) for step in range(1, result.count_steps() + 1)]


def plot_comparison(path: Path, arguments: tuple[str, ...], result: Comparison) -> None:
    """Draws losses and differences by step, and times and peak memory.

    Raises:
        ImportError: matplotlib is not installed.
        OSError, ValueError: The file cannot be written, or its format is unknown.
    """
    require_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 7.5), layout="constrained")
    losses, times, differences, memory = figure.subplots(2, 2).flat
    title = describe_job(arguments, result)
    figure.suptitle(title if len(title) < 130 else f"{title[:60]} ... {title[-60:]}", fontsize=11)
    _draw_losses(losses, result)
    _draw_times(times, result)
    _draw_differences(differences, result)
    peaks = [result.find_peak_memory(name) / 2**20 for name in IMPLEMENTATIONS]
    device_peaks = [
        result.find_peak_memory(n, "peak_device_memory") / 2**20 for n in IMPLEMENTATIONS
    ]
    label = "peak device memory, MiB" if any(device_peaks) else "peak memory, MiB"
    _draw_bars(memory, device_peaks if any(device_peaks) else peaks, label)
    figure.savefig(path, dpi=120)


def _draw_losses(axes: Any, result: Comparison) -> None:
    steps = list(range(1, result.count_steps() + 1))
    for name, width in zip(IMPLEMENTATIONS, (5, 1.8)):
        values = _list_values(result, result.compute_mean_loss, name)
        points = [(s, v) for s, v in zip(steps, values) if v is not None]
        if points:
            axes.plot(*zip(*points), color=COLORS[name], linewidth=width, marker="o", label=name)
    if axes.lines:
        axes.legend(frameon=False)
    else:
        axes.text(0.5, 0.5, "no loss was observed", ha="center", transform=axes.transAxes)
    _style_axes(axes, "loss", result)


def _draw_times(axes: Any, result: Comparison) -> None:
    for i, name in enumerate(IMPLEMENTATIONS):
        times = [1000 * s for steps in result.list_step_seconds(name) for s in steps]
        if times:
            positions = [i + 0.3 * (k / len(times) - 0.5) for k in range(len(times))]
            axes.scatter(positions, times, s=16, color=COLORS[name], alpha=0.7)
            median = 1000 * (result.compute_median_seconds(name) or 0)
            axes.hlines(median, i - 0.3, i + 0.3, color=COLORS[name], linewidth=2)
            axes.annotate(f"{median:.4g}", (i + 0.32, median), va="center")
    axes.set_xticks(range(2), IMPLEMENTATIONS)
    axes.set_xlim(-0.6, 1.7)
    axes.set_ylim(bottom=0)
    _style_axes(axes, "ms per step (points: steps, lines: medians)")


def _draw_differences(axes: Any, result: Comparison) -> None:
    steps = range(1, result.count_steps() + 1)
    for kind, shift, color in ((GRADIENT, -0.2, "#d62728"), (PARAMETER, 0.2, "#ff9896")):
        counts = [result.count_differences(step, kind) for step in steps]
        axes.bar([s + shift for s in steps], counts, width=0.4, color=color, label=f"{kind}s")
        if kind == GRADIENT:
            most = max((result.count_values(step, kind) for step in steps), default=0)
            axes.set_ylim(0, max(1, most) * 1.2)
    if any(bar.get_height() for bar in axes.patches):
        axes.legend(frameon=False)
    else:
        axes.text(0.5, 0.5, "none", ha="center", transform=axes.transAxes)
    title = f"gradients and parameters that differ, of {result.count_values(1, GRADIENT)}"
    _style_axes(axes, f"{title}: {result.verdict.name.lower()}", result)


def _draw_bars(axes: Any, values: list[float], title: str) -> None:
    colors = [COLORS[name] for name in IMPLEMENTATIONS]
    bars = axes.bar(IMPLEMENTATIONS, values, color=colors, width=0.5)
    axes.bar_label(bars, fmt="%.0f")
    _style_axes(axes, title)


def _style_axes(axes: Any, title: str, by_step: Comparison | None = None) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.grid(axis="y", color="#e8e8e8")
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    if by_step is not None:
        axes.set_xlabel("step")
        steps = by_step.count_steps()
        axes.set_xticks(range(1, steps + 1, max(1, steps // 12)))
