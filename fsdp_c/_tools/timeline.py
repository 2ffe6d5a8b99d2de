"""``StepTrace``, the result of ``trace``: the spans of all ranks, as text, plot and file."""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist

from . import timeline_plot, trace_spans
from .plotting import require_matplotlib
from .trace_spans import GATHER, REDUCE, WAITS, Span

_NANOSECONDS_PER_MS = 1e6


class StepTrace:
    """The spans of all ranks inside a :func:`trace` block.

    Attributes:
        ranks: The spans of each rank: track, kind, unit, begin and end in nanoseconds since the
            earliest start of any rank. Equal on every rank. Empty inside the ``with`` block.
    """

    def __init__(self) -> None:
        self.ranks: list[list[Span]] = []

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws a row per rank and track. The extension of ``path`` selects the format.

        Rank 0 writes the file. All ranks raise the exceptions below.

        Raises:
            RuntimeError: The ``with`` block is still open, or nothing was traced in it.
            ImportError: matplotlib is not installed. Raised on every rank.
        """
        self._require_spans()
        require_matplotlib()
        if _is_writer():
            timeline_plot.plot_timeline(self.summary(), self._number_ranks(), path)

    def draw(self, axes: Any, legend: bool = True) -> None:
        """Draws the timeline into axes of matplotlib, on the calling rank.

        Raises:
            RuntimeError: The ``with`` block is still open, or nothing was traced in it.
        """
        self._require_spans()
        timeline_plot.draw_timeline(axes, self.summary(), self._number_ranks(), legend)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes Chrome's trace format (chrome://tracing, Perfetto), with ranks as processes.

        Rank 0 writes the file. All ranks raise the exceptions below.

        Raises:
            RuntimeError: The ``with`` block is still open, or nothing was traced in it.
        """
        self._require_spans()
        if _is_writer():
            with open(path, "w") as file:
                json.dump(make_chrome_trace(self._number_ranks(), self.summary()), file)

    def summary(self) -> str:
        """Returns two sentences: the shares of the time, and how much communication is hidden.

        Raises:
            RuntimeError: The ``with`` block is still open, or nothing was traced in it.
        """
        self._require_spans()
        return f"{_format_shares(self.ranks)}. {_format_communication(self.ranks)}."

    def seconds(self) -> dict[str, dict[str, float]]:
        """Returns seconds by kind, and by unit within each kind, averaged over the ranks."""
        total: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for spans in self.ranks:
            for span in spans:
                if span.track != trace_spans.HOST:
                    total[span.kind][span.unit] += span.length / 1e9 / len(self.ranks)
        return {kind: dict(units) for kind, units in total.items()}

    def __str__(self) -> str:
        """Returns the summary, and a table of milliseconds by unit, averaged over the ranks."""
        if not self._closed:
            return f"a trace that {'an exception has ended' if self._raised else 'is still open'}"
        if not self._has_units():
            return "a trace without steps"
        return f"{self.summary()}\n{_format_table(self.seconds())}"

    _closed = False
    _raised = False  # whether an exception left the block

    def _number_ranks(self) -> dict[int, list[Span]]:
        return dict(enumerate(self.ranks))

    def _has_units(self) -> bool:
        return any(span.unit for spans in self.ranks for span in spans)

    def _require_spans(self) -> None:
        if not self._closed:
            raise RuntimeError(
                "nothing was traced: an exception ended the with-block"
                if self._raised
                else "the trace is still open: read it after the with-block"
            )
        if not self._has_units():
            raise RuntimeError(
                "nothing was traced: no forward or backward of a sharded model ran inside of "
                "the with-block"
            )


def _is_writer() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


# ---- text output ---------------------------------------------------------------------------------

_ORDER = (
    trace_spans.FORWARD,
    trace_spans.BACKWARD,
    trace_spans.OPTIMIZER,
    trace_spans.GATHER_WAIT,
    trace_spans.REDUCE_WAIT,
    trace_spans.SHARDING,
    trace_spans.OUTSIDE,
)


def _format_shares(ranks: list[list[Span]]) -> str:
    """Formats the shares of the mean time: "265 ms on 2 ranks: 40 % forward, ..."."""
    total: dict[str, int] = defaultdict(int)
    for spans in ranks:
        for span in spans:
            if span.track == trace_spans.COMPUTE:
                total[span.kind] += span.length
    duration = max(span.end for spans in ranks for span in spans)
    parts = [(total[kind] / len(ranks) / duration, kind) for kind in _ORDER]
    text = ", ".join(
        f"{share:.0%} {kind}".replace("%", " %") for share, kind in parts if share >= 0.005
    )
    count = "1 rank" if len(ranks) == 1 else f"{len(ranks)} ranks"
    return f"{_format_ms(duration)} on {count}: {text}"


def _format_communication(ranks: list[list[Span]]) -> str:
    """Formats the share of communication that overlaps with computation, and the longest wait."""
    communication = sum(_measure_covered([s for s in spans if s.track in WAITS]) for spans in ranks)
    waits = [(s, i) for i, spans in enumerate(ranks) for s in spans if s.kind in WAITS.values()]
    if not communication:
        return "Nothing was communicated"
    hidden_share = 1 - sum(span.length for span, _ in waits) / communication
    text = f"{max(hidden_share, 0):.0%} of communication is hidden".replace("%", " %")
    if not waits:
        return f"{text}; no waits"
    longest, rank = max(waits, key=lambda wait: wait[0].length)
    kind = "gather" if longest.kind == trace_spans.GATHER_WAIT else "reduction"
    unit = "the root" if longest.unit == trace_spans.ROOT else f"'{longest.unit}'"
    suffix = f" on rank {rank}" if len(ranks) > 1 else ""
    return f"{text}; {unit} waits {_format_ms(longest.length)} for its {kind}{suffix}"


def _measure_covered(collectives: list[Span]) -> int:
    """Returns the nanoseconds in which at least one of the collectives is running."""
    total, covered_end = 0, 0
    for span in sorted(collectives, key=lambda span: span.begin):
        total += max(0, span.end - max(covered_end, span.begin))
        covered_end = max(covered_end, span.end)
    return total


def _format_ms(nanoseconds: float) -> str:
    value = nanoseconds / _NANOSECONDS_PER_MS
    return f"{value:.0f} ms" if value >= 10 else f"{value:.2g} ms"


def _format_table(seconds: dict[str, dict[str, float]]) -> str:
    """Formats milliseconds by unit, with one column for each kind that occurs."""
    kinds = [kind for kind in (*_ORDER, GATHER, REDUCE) if kind in seconds]
    units = {unit: None for kind in kinds for unit in sorted(seconds[kind])}
    rows = [["ms", *kinds]]
    for unit in sorted(units, key=_make_sort_key):
        cells = [seconds[kind].get(unit) for kind in kinds]
        rows.append([unit or "-", *("" if c is None else f"{c * 1e3:.2f}" for c in cells)])
    rows.append(["all", *(f"{sum(seconds[kind].values()) * 1e3:.2f}" for kind in kinds)])
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = []
    for label, *values in rows:
        padded = [label.ljust(widths[0]), *(v.rjust(w) for v, w in zip(values, widths[1:]))]
        lines.append("  ".join(padded))
    return "\n".join(lines)


def _make_sort_key(unit: str) -> list[tuple[bool, int, str]]:
    """Returns a sort key that orders blocks.2 before blocks.10, and time outside of units last."""
    if not unit:
        return [(True, 1, "")]
    return [
        (part.isdecimal(), int(part) if part.isdecimal() else 0, part) for part in unit.split(".")
    ]


# ---- Chrome's format -----------------------------------------------------------------------------


def make_chrome_trace(ranks: Mapping[int, list[Span]], summary: str) -> dict[str, Any]:
    """Returns complete events in microseconds, with a process per rank and a thread per track."""
    events: list[dict[str, Any]] = []
    for rank, rank_spans in ranks.items():
        process_name = {
            "name": "process_name",
            "ph": "M",
            "pid": rank,
            "args": {"name": f"rank {rank}"},
        }
        events.append(process_name)
        for tid, track in enumerate(trace_spans.TRACKS):
            if any(span.track == track for span in rank_spans):
                thread_name = {"name": "thread_name", "ph": "M", "pid": rank, "tid": tid}
                events.append({**thread_name, "args": {"name": track}})
        for span in rank_spans:
            events.append(
                {
                    "name": f"{span.kind} {span.unit}".strip(),
                    "cat": span.kind,
                    "ph": "X",
                    "pid": rank,
                    "tid": trace_spans.TRACKS.index(span.track),
                    "ts": span.begin / 1e3,
                    "dur": span.length / 1e3,
                    "args": {"unit": span.unit},
                }
            )
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"summary": summary}}
