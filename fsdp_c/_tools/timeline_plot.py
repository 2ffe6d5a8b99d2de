"""Draws the timeline of a step: the computation and the collectives of each rank."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from . import trace_spans
from .trace_spans import Span

_COLORS = {
    trace_spans.FORWARD: "#5b8cc0",
    trace_spans.BACKWARD: "#2f5f94",
    trace_spans.OPTIMIZER: "#8a6bb1",
    trace_spans.GATHER_WAIT: "#e0524d",
    trace_spans.REDUCE_WAIT: "#f0a39b",
    trace_spans.SHARDING: "#4d4d4d",
    trace_spans.OUTSIDE: "#d9d9d9",
    trace_spans.GATHER: "#3f9c8f",
    trace_spans.REDUCE: "#d98e32",
}
_TRACK_LABELS = {
    trace_spans.HOST: "host",
    trace_spans.COMPUTE: "compute",
    trace_spans.GATHER: "gathers",
    trace_spans.REDUCE: "reductions",
}
_MAX_RANKS = 8


def plot_timeline(
    title: str, ranks: Mapping[int, list[Span]], path: str | os.PathLike[str]
) -> None:
    """Draws the spans of the first ranks to ``path``, whose extension selects the format."""
    from matplotlib.figure import Figure

    rows = len(_list_tracks(ranks.values())) * min(len(ranks), _MAX_RANKS)
    figure = Figure(figsize=(15, 1.9 + 0.42 * rows), layout="constrained")
    draw_timeline(figure.add_subplot(), title, ranks)
    figure.savefig(path, dpi=120)


def draw_timeline(
    axes: Any, title: str, ranks: Mapping[int, list[Span]], legend: bool = True
) -> None:
    """Draws the spans of the first ranks into axes of matplotlib. ``ranks``: spans by rank."""
    drawn_ranks = dict(islice(ranks.items(), _MAX_RANKS))
    hidden_ranks = len(ranks) - len(drawn_ranks)
    suffix = f" ({hidden_ranks} more ranks are not shown)" if hidden_ranks else ""
    width = axes.figure.get_figwidth()
    full_title = (title + suffix).replace(" %", "\xa0%").replace(" ms", "\xa0ms")
    characters = int(9.3 * width)  # that fit at this font size
    axes.set_title("\n".join(textwrap.wrap(full_title, characters)), fontsize=10.5,
                   loc="left", parse_math=False)  # fmt: skip
    _draw_rows(axes, drawn_ranks, _list_tracks(drawn_ranks.values()), width)
    if legend:
        _draw_legend(axes, [span for spans in drawn_ranks.values() for span in spans])


def _list_tracks(ranks: Iterable[list[Span]]) -> list[str]:
    return [
        track
        for track in _TRACK_LABELS
        if any(span.track == track for spans in ranks for span in spans)
    ]


def _draw_rows(axes: Any, ranks: Mapping[int, list[Span]], tracks: list[str], width: float) -> None:
    """Draws one row per rank and track, the first rank at the top, over milliseconds."""
    end_ms = max(span.end for spans in ranks.values() for span in spans) / 1e6
    ticks, labels = [], []
    for i, (rank, spans) in enumerate(ranks.items()):
        for row, track in enumerate(tracks):
            y = i * (len(tracks) + 0.5) + row
            ticks.append(y)
            labels.append(
                f"rank {rank}  {_TRACK_LABELS[track]}" if row == 0 else _TRACK_LABELS[track]
            )
            _draw_spans(axes, y, [span for span in spans if span.track == track], end_ms, width)
    axes.set_yticks(ticks, labels, fontsize=9)
    axes.set_ylim(ticks[-1] + 0.6, -0.6)
    axes.set_xlim(0, end_ms)
    axes.set_xlabel("ms")
    axes.grid(axis="x", color="#e8e8e8", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _draw_spans(axes: Any, y: float, spans: list[Span], end_ms: float, width: float) -> None:
    for depth, span in _stack_spans(spans):
        begin, length = span.begin / 1e6, span.length / 1e6
        bottom, height = (y - 0.4, 0.8) if depth is None else (y - 0.4 + 0.4 * depth, 0.38)
        axes.broken_barh(
            [(begin, length)], (bottom, height), facecolor=_COLORS[span.kind], edgecolor="white",
            linewidth=0.4,
        )  # fmt: skip
        capacity = length / end_ms * width * 13  # approximate number of characters that fit
        label = _choose_label(span.unit, capacity)
        if label:
            axes.text(
                begin + length / 2, bottom + height / 2, label, ha="center", va="center",
                fontsize=7, color="black" if span.kind in _LIGHT_KINDS else "white",
                parse_math=False,
            )  # fmt: skip


_LIGHT_KINDS = (trace_spans.OUTSIDE, trace_spans.REDUCE_WAIT)


def _choose_label(unit: str, capacity: float) -> str:
    """Returns the longest label that fits: the unit's name, its last component, or empty."""
    last_component = unit.rpartition(".")[2].strip("()")
    return next((text for text in (unit, last_component) if text and len(text) + 1 <= capacity), "")


def _stack_spans(spans: list[Span]) -> list[tuple[int | None, Span]]:
    """Returns (half row, span) for each span. The half row is 0, 1, or None for a whole row.

    A span gets a half row if it overlaps one of the three spans before or after it.
    """
    placed_spans: list[tuple[int | None, Span]] = []
    for i, span in enumerate(spans):
        neighbors = spans[max(0, i - 3) : i] + spans[i + 1 : i + 4]
        overlaps_none = all(
            other.end <= span.begin or span.end <= other.begin for other in neighbors
        )
        placed_spans.append((None if overlaps_none else i % 2, span))
    return placed_spans


def _draw_legend(axes: Any, spans: list[Span]) -> None:
    """Draws the legend below the plot, with the kinds that occur."""
    from matplotlib.patches import Patch

    kinds = [kind for kind in _COLORS if any(span.kind == kind for span in spans)]
    patches = [Patch(color=_COLORS[kind], label=kind) for kind in kinds]
    axes.legend(
        handles=patches, loc="upper center", ncols=len(patches), frameon=False, fontsize=9,
        bbox_to_anchor=(0.5, 0), bbox_transform=_make_legend_transform(axes),
    )  # fmt: skip


def _make_legend_transform(axes: Any) -> Any:
    """Returns a transform that is 0.45 inches below the axis: the height of its ticks and label."""
    from matplotlib.transforms import ScaledTranslation

    return axes.transAxes + ScaledTranslation(0, -0.45, axes.figure.dpi_scale_trans)
