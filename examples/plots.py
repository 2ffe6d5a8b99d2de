"""The plot of a run: loss and time of its steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

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


def apply_to_windows(
    function: Callable[..., float], values: Sequence[float], window: int
) -> np.ndarray:
    """Returns ``function`` of the last ``window`` values at each index."""
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
        steps, apply_to_windows(np.mean, train, window), color=TRAIN_COLOR, linewidth=2, label=label
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
        layers.append(apply_to_windows(np.median, seconds, window) * 1e3)
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
