"""Draws the memory of a step by kind over time, with the units as bands."""

from __future__ import annotations

import os
from itertools import groupby
from typing import Any

from .step_memory import BEFORE, KINDS, Sample, Timeline

_COLORS = ("#4c6a92", "#9aa8bd", "#3f9c8f", "#d98e32", "#b8c46a")
_BAND_COLORS = ("#ffffff", "#f0f0f0")
_MAX_SAMPLES = 4000  # samples in the plot


def plot_memory(
    title: str, timeline: Timeline, memory: int | None, path: str | os.PathLike[str]
) -> None:
    """Draws the timeline to a file. The extension of ``path`` selects the format.

    Args:
        memory: The rank's memory in bytes, drawn as a line if it is at most twice the peak.
    """
    from matplotlib.figure import Figure

    step = [sample for sample in timeline.samples if sample.phase != BEFORE]
    samples = _reduce_samples(step or timeline.samples)  # no unit: only the initial memory
    scale, byte_unit = (2**30, "GiB") if timeline.peak.total >= 2**30 else (2**20, "MiB")
    figure = Figure(figsize=(11, 5.5), layout="constrained")
    axes: Any = figure.add_subplot()
    rows = [[sample.bytes[i] / scale for sample in samples] for i in range(len(KINDS))]
    axes.stackplot(range(len(samples)), rows, labels=KINDS, colors=_COLORS, step="post", zorder=2)
    _draw_bands(axes, samples)
    _mark_peak(axes, samples, timeline, scale, byte_unit)
    if memory is not None and memory <= 2 * timeline.peak.total:
        axes.axhline(memory / scale, color="#b03030", linestyle="--", zorder=3)
        axes.text(0, memory / scale, " memory of the rank", color="#b03030", va="bottom")
    axes.set_xlim(0, max(len(samples) - 1, 1))
    axes.set_ylim(0, 1.15 * max(timeline.peak.total, 1) / scale)
    axes.set_ylabel(f"{byte_unit} on this rank")
    axes.set_title(f"{title}: memory of one step")
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper")
    figure.savefig(path, dpi=120)


def _reduce_samples(samples: list[Sample]) -> list[Sample]:
    """Returns at most ``_MAX_SAMPLES`` samples: the largest of each run of neighboring samples."""
    length = -(-len(samples) // _MAX_SAMPLES)
    runs = (samples[i : i + length] for i in range(0, len(samples), length))
    return [max(run, key=lambda sample: sample.total) for run in runs]


def _draw_bands(axes: Any, samples: list[Sample]) -> None:
    """Draws a band for each unit's forward and backward, and the names of the phases."""
    unit_labels: list[tuple[float, str]] = []
    start, is_odd_band = 0, False
    for unit, run in groupby(samples, key=lambda sample: sample.unit):
        end = start + len(list(run))
        axes.axvspan(start, end, color=_BAND_COLORS[is_odd_band], zorder=1)
        if unit and (not unit_labels or (start + end) / 2 - unit_labels[-1][0] > len(samples) / 24):
            unit_labels.append(((start + end) / 2, unit))
        start, is_odd_band = end, not is_odd_band
    axes.set_xticks([index for index, _ in unit_labels])
    axes.set_xticklabels([unit for _, unit in unit_labels], rotation=40, ha="right", fontsize=8)
    start = 0
    for phase, run in groupby(samples, key=_name_phase):
        end = start + len(list(run))
        if phase:
            axes.text(
                (start + end) / 2, 1.0, phase, ha="center", va="top", fontsize=9, color="#606060",
                transform=axes.get_xaxis_transform(), zorder=4,
            )  # fmt: skip
            axes.axvline(start, color="#a0a0a0", linewidth=0.8, zorder=3)
        start = end


def _name_phase(sample: Sample) -> str:
    first_word = sample.phase.partition(" ")[0]
    return {"forward": "forward", "backward": "backward", "reduction": "backward"}.get(
        first_word, ""
    )


def _mark_peak(
    axes: Any, samples: list[Sample], timeline: Timeline, scale: int, byte_unit: str
) -> None:
    index = max(range(len(samples)), key=lambda i: samples[i].total)
    peak = timeline.peak.total / scale
    is_right_half = index > len(samples) / 2
    axes.annotate(
        f"{peak:.1f} {byte_unit}, in {timeline.peak}",
        (index, peak),
        xytext=(-14 if is_right_half else 14, 16),
        textcoords="offset points",
        ha="right" if is_right_half else "left",
        arrowprops={"arrowstyle": "->"},
        zorder=5,
    )
