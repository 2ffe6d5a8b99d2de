"""The plots of a run: loss and time of its steps, and a comparison of both implementations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

# Okabe and Ito's palette: distinct in print and for color-blind readers.
PHASE_COLORS = {
    "data": "#999999",
    "forward": "#56B4E9",
    "backward": "#0072B2",
    "optimizer": "#E69F00",
}
TRAIN_COLOR, VALIDATION_COLOR = "#0072B2", "#D55E00"


def compute_rolling_mean(values: Sequence[float], window: int, reduce: str = "mean") -> np.ndarray:
    """Returns the mean or median over the last ``window`` values at each index."""
    function = np.mean if reduce == "mean" else np.median
    return np.array([function(values[max(0, i - window + 1) : i + 1]) for i in range(len(values))])


def draw_run(
    path: Path,
    *,
    title: str,
    train: Sequence[float],
    validation: Mapping[int, float],
    phases: Mapping[str, Sequence[float]],
) -> None:
    """Writes a PNG with losses and step times to ``path``.

    ``train[i]`` is the loss of step i + 1 and ``validation[s]`` the loss after step s, in nats per
    byte. ``phases[name][i]`` is the time of step i + 1 in that phase, in seconds.
    """
    steps = np.arange(1, len(train) + 1)
    window = max(1, len(train) // 30)
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(9, 7.5), sharex=True, height_ratios=(3, 2), layout="constrained"
    )
    figure.suptitle(title, fontsize=13, fontweight="bold")
    _draw_loss(upper, steps, train, validation, window)
    _draw_phases(lower, steps, phases, window)
    lower.set_xlabel("Training step")
    lower.set_xlim(1, max(2, len(train)))
    for axes in (upper, lower):
        axes.grid(True, alpha=0.25, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=140)
    plt.close(figure)


def _draw_loss(
    axes: Axes,
    steps: np.ndarray,
    train: Sequence[float],
    validation: Mapping[int, float],
    window: int,
) -> None:
    if window > 1:
        axes.plot(
            steps, train, color=TRAIN_COLOR, alpha=0.3, linewidth=0.8, label="training, each step"
        )
    label = "training" if window == 1 else f"training, mean of the last {window} steps"
    axes.plot(
        steps, compute_rolling_mean(train, window), color=TRAIN_COLOR, linewidth=2, label=label
    )
    if validation:
        at, losses = zip(*sorted(validation.items()), strict=True)
        axes.plot(
            at, losses, "o-", color=VALIDATION_COLOR, markersize=5, linewidth=1, label="validation"
        )
        axes.annotate(
            f"{losses[-1]:.3f}",
            (at[-1], losses[-1]),
            xytext=(0, 12),
            textcoords="offset points",
            ha="right",
            color=VALIDATION_COLOR,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.8, "pad": 1.5},
        )
    axes.set_ylabel("Loss (nats per byte)")
    axes.set_title("Loss", loc="left", fontsize=11)
    axes.legend(frameon=False)


def _draw_phases(
    axes: Axes, steps: np.ndarray, phases: Mapping[str, Sequence[float]], window: int
) -> None:
    layers, labels = [], []
    total = sum(float(np.median(seconds)) for seconds in phases.values())
    for name, seconds in phases.items():
        median = float(np.median(seconds))
        layers.append(compute_rolling_mean(seconds, window, "median") * 1e3)
        labels.append(f"{name}: {median * 1e3:.1f} ms ({median / total:.0%})")
    colors = [PHASE_COLORS[name] for name in phases]
    axes.stackplot(steps, layers, labels=labels, colors=colors, linewidth=0)
    top = np.sum(layers, axis=0)
    # The limit ignores the slow first steps. The factor leaves space for the legend.
    axes.set_ylim(0, 1.4 * float(top[min(window, len(top) - 1) :].max()))
    axes.set_ylabel("Time per step (ms)")
    smoothing = "" if window == 1 else f", median of {window} steps"
    axes.set_title(f"Time of a step by phase (rank 0{smoothing})", loc="left", fontsize=11)
    handles, names = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], names[::-1], frameon=False, ncols=2, loc="upper right", fontsize=9)


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
