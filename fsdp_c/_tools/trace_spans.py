"""Converts the ranges that a profiler records to spans of a step's time, by unit.

While a profiler is active, the core emits torch's ranges ("FSDP::all_gather (blocks.0)"). The
process group emits a range for each running collective. torch emits a range for each optimizer
step.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

FORWARD, BACKWARD, OPTIMIZER = "forward", "backward", "optimizer"
GATHER_WAIT, REDUCE_WAIT = "wait for a gather", "wait for a reduction"
SHARDING = "packing and unpacking"
OUTSIDE = "outside of units"
GATHER, REDUCE = "gather", "reduction"

COMPUTE, HOST = "compute", "host"
TRACKS = (HOST, COMPUTE, GATHER, REDUCE)
"""Rows of the plot. ``host`` and ``compute`` differ if a device computes."""

WAITS = {GATHER: GATHER_WAIT, REDUCE: REDUCE_WAIT}
ROOT = "(root)"
TRACE_RANGE = "fsdp_c.trace"
"""The name of the range enclosing the traced steps."""


class Event(NamedTuple):
    """A range of the profiler, in nanoseconds.

    Attributes:
        is_async: Whether the range is a running collective, which ends on another thread.
        on_device: Whether the range is a kernel.
        id: The number that an operator and the kernels launched by it share.
    """

    name: str
    begin: int
    end: int
    is_async: bool = False
    on_device: bool = False
    id: int = 0


class Span(NamedTuple):
    """An interval of one rank's time, in nanoseconds.

    Attributes:
        track: One of ``TRACKS``.
        kind: The activity. In the tracks of gathers and reductions, ``kind`` equals ``track``.
        unit: The name of a module, ``(root)``, or empty.
    """

    track: str
    kind: str
    unit: str
    begin: int
    end: int

    @property
    def length(self) -> int:
        return self.end - self.begin


def make_spans(events: Iterable[Event]) -> list[Span]:
    """Returns the spans of one rank inside the range ``TRACE_RANGE``; empty if there is none."""
    events = sorted(events, key=lambda event: (event.begin, -event.end))
    block = next((event for event in events if event.name == TRACE_RANGE), None)
    if block is None:
        return []
    ranges = [r for r in map(_parse_range, events) if r is not None]
    collectives = _find_collectives(events, ranges)
    host = _join_spans(_replace_waits(_find_segments(ranges, block), collectives))
    kernels = [event for event in events if event.on_device and not _HOST_RANGE.match(event.name)]
    computing = [kernel for kernel in kernels if _classify_collective(kernel) is None]
    if not computing:
        return [*host, *collectives]
    compute = _join_spans(_make_device_spans(computing, events, host), gap=10_000)
    waits = _find_device_waits(compute, collectives)
    device_spans = sorted([*compute, *waits], key=lambda span: span.begin)
    return [*(span._replace(track=HOST) for span in host), *device_spans, *collectives]


# ---- ranges --------------------------------------------------------------------------------------

_FSDP_RANGE = re.compile(r"FSDP::(\w+)(?: \((.*)\))?$")
_AWAITED_COLLECTIVES = {
    "all_gather": GATHER,
    "all_gather_copy_out": GATHER,
    "post_backward_rs_wait": REDUCE,
    "post_backward_reduce": REDUCE,
    "root_post_backward_callback": REDUCE,
}
"""Ranges in which the host waits for a collective -> the kind of that collective."""
_OWN_COLLECTIVE = ("all_gather", "all_gather_copy_out", "post_backward_reduce")
"""Ranges in which the host waits for the unit's own last collective."""
_ISSUES_COLLECTIVE = ("all_gather", "post_backward_reduce")
"""Ranges that issue the collective. The wait is inside only if the collective also ends inside."""


class _Range(NamedTuple):
    """A range of FSDP or of an optimizer step on the host."""

    label: str
    unit: str
    begin: int
    end: int


def _parse_range(event: Event) -> _Range | None:
    if event.is_async or event.on_device:
        return None
    if event.name.startswith("Optimizer.step"):
        return _Range(OPTIMIZER, "", event.begin, event.end)
    match = _FSDP_RANGE.match(event.name)
    if match is None:  # for example "FSDP::backward_prefetch for blocks.0", around an all_gather
        return None
    return _Range(match[1], match[2] or ROOT, event.begin, event.end)


def _find_segments(ranges: list[_Range], block: Event) -> Iterator[tuple[_Range | None, Span]]:
    """Splits the host's time by the innermost range.

    Yields (range, span). The range is None while the model computes.
    """
    open_ranges: list[_Range] = []
    units = _UnitStack()
    now = block.begin

    def emit_until(time: int) -> Iterator[tuple[_Range | None, Span]]:
        nonlocal now
        if time > now:
            innermost = open_ranges[-1] if open_ranges else None
            if innermost is None:
                kind, unit = units.computing
            else:
                kind, unit = (
                    (OPTIMIZER if innermost.label == OPTIMIZER else SHARDING),
                    innermost.unit,
                )
            yield innermost, Span(COMPUTE, kind, unit, now, time)
            now = time

    def close_ranges(time: int) -> Iterator[tuple[_Range | None, Span]]:
        while open_ranges and open_ranges[-1].end <= time:
            yield from emit_until(open_ranges[-1].end)
            units.end_range(open_ranges.pop())

    for fsdp_range in ranges:
        yield from close_ranges(fsdp_range.begin)
        yield from emit_until(fsdp_range.begin)
        units.begin_range(fsdp_range)
        open_ranges.append(fsdp_range)
    yield from close_ranges(block.end)
    yield from emit_until(block.end)


class _UnitStack:
    """Stack of the units that are computing, the innermost last."""

    def __init__(self) -> None:
        self._stack: list[tuple[str, str]] = []

    @property
    def computing(self) -> tuple[str, str]:
        return self._stack[-1] if self._stack else (OUTSIDE, "")

    def begin_range(self, fsdp_range: _Range) -> None:
        if fsdp_range.label == "post_forward":
            self._remove((FORWARD, fsdp_range.unit))
        elif fsdp_range.label in ("post_backward_accumulate", "post_backward_reshard"):
            self._remove((BACKWARD, fsdp_range.unit))
        elif fsdp_range.label == "root_post_backward_callback":
            self._stack = [entry for entry in self._stack if entry[0] != BACKWARD]

    def end_range(self, fsdp_range: _Range) -> None:
        if fsdp_range.label == "pre_forward":
            self._stack.append((FORWARD, fsdp_range.unit))
        elif fsdp_range.label == "pre_backward":
            self._stack.append((BACKWARD, fsdp_range.unit))

    def _remove(self, entry: tuple[str, str]) -> None:
        if entry in self._stack:
            del self._stack[len(self._stack) - 1 - self._stack[::-1].index(entry)]


# ---- collectives ---------------------------------------------------------------------------------


_HOST_RANGE = re.compile(
    r"FSDP::|Optimizer\.|ProfilerStep|##|c10d::|\w+:(?!:)|" + re.escape(TRACE_RANGE)
)
"""Matches the names of host ranges that the profiler repeats among a device's events."""


def _classify_collective(event: Event) -> str | None:
    """Returns ``GATHER`` or ``REDUCE`` for an operator, range or NCCL kernel of a collective.

    Returns None for other events.
    """
    is_running = event.name.startswith("nccl") if event.on_device else event.is_async
    if is_running or event.name.startswith("c10d::"):
        name = event.name.lower()
        return GATHER if "gather" in name else REDUCE if "reduce" in name else None
    return None


def _find_collectives(events: list[Event], ranges: list[_Range]) -> list[Span]:
    """Returns the spans of the units' collectives, from the end of the issue to completion.

    A backend runs the collectives of a kind in issue order. The n-th operator therefore belongs to
    the n-th range or kernel. A collective without either gets length 0.
    """
    completions = _find_completions(events)
    begins = [r.begin for r in ranges]
    collectives = []
    last_unit = ROOT
    for event in events:
        kind = _classify_collective(event) if event.name.startswith("c10d::") else None
        if kind is None or event.on_device:
            continue
        queue = completions[kind]
        while queue and queue[0].end < event.begin:
            queue.popleft()  # issued before the trace
        completion = queue.popleft() if queue else event
        enclosing = _find_enclosing_range(ranges, begins, event)
        if enclosing is None:
            continue  # not a collective of FSDP
        if kind == GATHER or enclosing.label == "post_backward_reduce":
            last_unit = enclosing.unit
        begin = completion.begin if completion.on_device else event.end
        collectives.append(Span(kind, kind, last_unit, begin, max(begin, completion.end)))
    return collectives


def _find_completions(events: list[Event]) -> dict[str, deque[Event]]:
    """Returns the events that end collectives, by ``GATHER`` and ``REDUCE``.

    The events are kernels if there are any, else ranges.
    """
    running = [e for e in events if not (e.on_device and _HOST_RANGE.match(e.name))]
    running = [e for e in running if (e.is_async or e.on_device) and _classify_collective(e)]
    if any(event.on_device for event in running):
        running = [event for event in running if event.on_device]
    kinds = (GATHER, REDUCE)
    return {kind: deque(e for e in running if _classify_collective(e) == kind) for kind in kinds}


def _find_enclosing_range(ranges: list[_Range], begins: list[int], event: Event) -> _Range | None:
    """Returns FSDP's innermost range enclosing an event, or None."""
    for i in range(bisect_right(begins, event.begin) - 1, -1, -1):
        if ranges[i].end >= event.end:
            return ranges[i] if ranges[i].label != OPTIMIZER else None
    return None


# ---- waits ---------------------------------------------------------------------------------------


def _replace_waits(
    segments: Iterable[tuple[_Range | None, Span]], collectives: list[Span]
) -> Iterator[Span]:
    """Yields the segments. Segments that wait are split at the completion of their collectives."""
    by_kind: dict[str, _SortedSpans] = {}
    by_kind_and_unit: dict[tuple[str, str], _SortedSpans] = {}
    for kind in WAITS:
        of_kind = [c for c in collectives if c.kind == kind]
        by_kind[kind] = _SortedSpans(of_kind)
        by_unit: dict[str, list[Span]] = {}
        for collective in of_kind:
            by_unit.setdefault(collective.unit, []).append(collective)
        for unit, of_unit in by_unit.items():
            by_kind_and_unit[kind, unit] = _SortedSpans(of_unit)
    for fsdp_range, span in segments:
        awaited = _AWAITED_COLLECTIVES.get(fsdp_range.label) if fsdp_range is not None else None
        if awaited is None:
            yield span
            continue
        if fsdp_range is not None and fsdp_range.label in _OWN_COLLECTIVE:
            own = by_kind_and_unit.get((awaited, fsdp_range.unit))
            candidates = own.find_last(span.end) if own is not None else []
        else:
            candidates = by_kind[awaited].find_overlaps(span.begin, span.end)
        if fsdp_range is not None and fsdp_range.label in _ISSUES_COLLECTIVE:
            candidates = [c for c in candidates if c.end <= fsdp_range.end]
        yield from _split_span(span, candidates, WAITS[awaited])


class _SortedSpans:
    """Spans in the order of their begins. A search does not read all spans."""

    def __init__(self, spans: Iterable[Span]) -> None:
        self._spans = sorted(spans, key=lambda span: span.begin)
        self._begins = [span.begin for span in self._spans]
        self._last_ends = list(accumulate((span.end for span in self._spans), max))

    def find_overlaps(self, begin: int, end: int) -> list[Span]:
        """Returns at least the spans that overlap with the interval."""
        first = bisect_right(self._last_ends, begin)
        return self._spans[first : bisect_left(self._begins, end)]

    def find_last(self, end: int) -> list[Span]:
        """Returns the last span that begins before ``end``, if there is one."""
        count = bisect_left(self._begins, end)
        return self._spans[max(0, count - 1) : count]


def _split_span(span: Span, collectives: list[Span], kind: str) -> Iterator[Span]:
    """Splits a span: the parts that the collectives cover become waits of ``kind``."""
    now = span.begin
    for collective in collectives:
        begin, end = max(now, collective.begin), min(span.end, collective.end)
        if begin < end:
            if now < begin:
                yield span._replace(begin=now, end=begin)
            yield span._replace(kind=kind, unit=collective.unit, begin=begin, end=end)
            now = end
    if now < span.end:
        yield span._replace(begin=now)


def _join_spans(spans: Iterable[Span], gap: int = 0) -> list[Span]:
    """Joins neighbors with equal track, kind and unit that are at most ``gap`` ns apart."""
    joined: list[Span] = []
    for span in spans:
        if joined and joined[-1][:3] == span[:3] and span.begin - joined[-1].end <= gap:
            joined[-1] = joined[-1]._replace(end=max(joined[-1].end, span.end))
        else:
            joined.append(span)
    return joined


# ---- devices -------------------------------------------------------------------------------------


def _make_device_spans(
    kernels: list[Event], events: list[Event], host: list[Span]
) -> Iterator[Span]:
    """Yields a span for each kernel, with the host's kind and unit at the launch.

    Kernels that overlap with an earlier kernel begin at its end.
    """
    launch_times = {event.id: event.begin for event in events if not event.on_device}
    begins = [span.begin for span in host]
    now = 0
    for kernel in kernels:
        kind, unit = OUTSIDE, ""
        index = bisect_right(begins, launch_times.get(kernel.id, -1)) - 1
        if index >= 0:
            kind, unit = host[index].kind, host[index].unit
        if kind in WAITS.values():
            kind = SHARDING
        begin = max(now, kernel.begin)
        if begin < kernel.end:
            now = kernel.end
            yield Span(COMPUTE, kind, unit, begin, kernel.end)


def _find_device_waits(compute: list[Span], collectives: list[Span]) -> Iterator[Span]:
    """Yields the parts of the pauses between kernels in which a collective runs."""
    sorted_collectives = _SortedSpans(collectives)
    for kernel, next_kernel in pairwise(compute):
        pause = kernel._replace(kind="", begin=kernel.end, end=next_kernel.begin)
        parts = (
            _split_span(pause, [collective], WAITS[collective.kind])
            for collective in sorted_collectives.find_overlaps(pause.begin, pause.end)
        )
        covered_end = pause.begin
        for part in chain.from_iterable(parts):
            if part.kind and part.end > covered_end:
                yield part._replace(begin=max(covered_end, part.begin))
                covered_end = part.end
