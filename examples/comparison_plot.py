"""The plot of a comparison: steps of torch's FSDP2 and of fsdp_c, with their timelines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

IMPL_COLORS = {"torch": "#E69F00", "fsdp_c": "#0072B2"}


def draw_comparison(
    path: Path, *, seconds: Mapping[str, Sequence[float]], traces: Mapping[str, Any]
) -> None:
    """Writes a PNG with step times by implementation and the timeline of one step of each.

    ``seconds[impl]`` has the seconds of each step, and ``traces[impl]`` is a ``fsdp_c.StepTrace``.
    """
    figure, (upper, *timelines) = plt.subplots(
        1 + len(traces),
        1,
        figsize=(14, 3 + 3.4 * len(traces)),
        height_ratios=(1, *(2.4 for _ in traces)),
        layout="constrained",
    )
    _draw_times(upper, seconds)
    for axes, (impl, trace) in zip(timelines, traces.items(), strict=True):
        trace.draw(axes, legend=axes is timelines[-1])
        axes.set_title(f"{impl}: {axes.get_title(loc='left')}", loc="left", fontsize=10)
    end = max(axes.get_xlim()[1] for axes in timelines)
    for axes in timelines:
        axes.set_xlim(0, end)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw_times(axes: Axes, seconds: Mapping[str, Sequence[float]]) -> None:
    medians = {impl: float(np.median(times)) * 1e3 for impl, times in seconds.items()}
    for row, (impl, times) in enumerate(seconds.items()):
        color = IMPL_COLORS[impl]
        axes.barh(row, medians[impl], color=color, alpha=0.35, height=0.6)
        axes.plot(np.array(times) * 1e3, [row] * len(times), "o", color=color, markersize=4)
        axes.text(
            medians[impl] * 0.01, row, f"{medians[impl]:.0f} ms", va="center", fontweight="bold"
        )
    axes.set_yticks(range(len(seconds)), list(seconds))
    axes.set_ylim(len(seconds) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set_xlabel("ms of a step, in turns (bar: median)")
    axes.spines[["top", "right"]].set_visible(False)
    ratio = medians["torch"] / medians["fsdp_c"]
    axes.set_title(
        f"torch's FSDP2 takes {ratio:.2f} times as long as fsdp_c", loc="left", fontsize=12
    )
