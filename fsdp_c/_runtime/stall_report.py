"""Positions of ranks, and the report about ranks that wait. Needs no process group."""

from __future__ import annotations

import functools
import json
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from .records import COMPLETE, FAILED, WAITING, Record

RECENT = 16
"""Number of completed collectives in a position. The report compares them between ranks."""

_ENDED, _STOPPED = ("", "Z", "X"), ("T", "t")
"""States of ``read_process_state``."""

_GROUP_SEPARATOR = " of process group '"
"""Text between a collective and the name of its process group."""

_PLURAL_VERBS = {"waits": "wait", "has": "have"}
"""First word of a place, as written for one rank -> for several ranks."""

_LIBRARIES = (Path(torch.__file__).parent, Path(__file__).resolve().parents[1])


@functools.cache  # a report compares it with the system of each rank
def read_system() -> str:
    """Returns the boot and the PID namespace in which process numbers are valid."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/pid').st_ino}"
    except OSError:
        return ""


@dataclass
class Position:
    """The place of a rank in its program.

    Times are seconds since the epoch; None: unknown or not reached.
    """

    rank: int
    host: str = field(default_factory=socket.gethostname)
    system: str = field(default_factory=read_system)
    """Boot and PID namespace. Hosts and containers may have equal names."""
    pid: int = field(default_factory=os.getpid)
    request: int = 0
    """Number of the latest request that the rank has answered."""
    waits_for: str | None = None
    waits_since: float | None = None
    completed: list[str] = field(default_factory=list)
    """The last collectives that the rank completed, newest first."""
    completed_at: float | None = None
    line: str = ""
    """Line and function of the main thread."""
    failed: str = ""
    """The newest collective, if an exception has ended the wait for it."""
    interrupted_pass: str = ""
    """Pass that an exception interrupted: a state is in this pass, and no thread runs a module."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str | bytes) -> Position:
        return Position(**json.loads(text))


def measure_wait(now: int, records: Iterable[Record]) -> tuple[Record | None, float]:
    """Returns the record that a thread of this process has waited for longest, and the seconds.

    ``now``: time of the records' clock, in nanoseconds. Without a wait: None and 0.
    """
    waits = [record for record in records if record.state == WAITING]
    wait = min(waits, key=lambda record: record.waiting, default=None)
    return wait, (now - wait.waiting) / 1e9 if wait is not None else 0.0


def find_failure(records: Iterable[Record]) -> Record | None:
    """Returns the record of the latest wait, if an exception ended it.

    Waits may end in another order than that of their collectives.
    """
    states = (WAITING, COMPLETE, FAILED)
    waits = (record for record in records if record.state in states)
    latest = max(waits, key=lambda record: record.end or record.waiting, default=None)
    return latest if latest is not None and latest.state == FAILED else None


def describe_wait(record: Record) -> str:
    return f"{record.describe()}{_GROUP_SEPARATOR}{record.group}'"


def make_position(rank: int, request: int, now: int, records: list[Record]) -> Position:
    """Describes this process. ``now``: time of the records' clock, in nanoseconds."""
    position = Position(rank, request=request, line=_find_line_of_main_thread())
    wait, seconds = measure_wait(now, records)
    if wait is not None:
        position.waits_for = describe_wait(wait)
        position.waits_since = time.time() - seconds
    failure = find_failure(records)
    if failure is not None:
        position.failed = describe_wait(failure)
    complete = [record for record in records if record.state == COMPLETE]
    position.completed = [describe_wait(record) for record in complete[:RECENT]]
    if complete:
        position.completed_at = time.time() - (now - complete[0].end) / 1e9
    return position


def _list_frames(frame: FrameType | None) -> Iterable[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _find_line_of_main_thread() -> str:
    """Returns the innermost line outside of torch and fsdp_c, else the innermost line."""
    innermost = sys._current_frames().get(threading.main_thread().ident or 0)
    frames = list(_list_frames(innermost))
    user_frames = (f for f in frames if not _is_in_library(f.f_code.co_filename))
    frame = next(user_frames, frames[0] if frames else None)
    if frame is None:
        return ""
    code = frame.f_code
    return f"{os.path.basename(code.co_filename)}:{frame.f_lineno} in {code.co_name}"


def _is_in_library(filename: str) -> bool:
    path = Path(filename)
    return filename.startswith("<frozen") or any(lib in path.parents for lib in _LIBRARIES)


def is_model_running() -> bool:
    """Whether a thread runs a module's forward, or a backward."""
    names = {("module.py", "_call_impl"), ("graph.py", "_engine_run_backward")}
    return any(
        (os.path.basename(frame.f_code.co_filename), frame.f_code.co_name) in names
        for innermost in sys._current_frames().values()
        for frame in _list_frames(innermost)
    )


# ---- report --------------------------------------------------------------------------------------


def format_report(positions: Mapping[int, Position], world: int, request: int) -> str:
    """Formats one line for each place at which ranks are, and the last common collective.

    ``positions`` has the last known position of each rank. Positions with an older ``request`` are
    out of date. A rank that has never published has none.
    """
    places: dict[str, list[int]] = {}
    for rank in range(world):
        places.setdefault(_describe_place(positions.get(rank), request), []).append(rank)
    current = [p for p in positions.values() if p.request >= request]
    waits = {p.rank: time.time() - p.waits_since for p in current if p.waits_since is not None}
    lines = [
        _format_line(ranks, place) + _format_waits([waits[rank] for rank in ranks if rank in waits])
        for place, ranks in places.items()
    ]
    return "\n".join([*lines, f"  {_describe_common(current)}"])


def format_ranks(ranks: list[int]) -> str:
    """Formats sorted ranks, for example "ranks 0-3, 5"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    text = ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in spans)
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {text}"


def _format_line(ranks: list[int], place: str) -> str:
    """Formats the line of a place. ``place`` begins with the verb of one rank."""
    verb, _, rest = place.partition(" ")
    if len(ranks) > 1:
        verb = _PLURAL_VERBS.get(verb, verb)
    return f"  {format_ranks(ranks)}: {verb} {rest}"


def _format_waits(seconds: list[float]) -> str:
    """Formats how long the ranks of a line have waited. Clocks of hosts may differ."""
    if not seconds:
        return ""
    median, longest = (f"{max(0.0, f(seconds)):.1f} s" for f in (statistics.median, max))
    return (
        f", for {longest}" if median == longest else f", for {median} (median), {longest} (longest)"
    )


def _describe_place(position: Position | None, request: int) -> str:
    if position is None:
        return "has no model of fsdp_c that ran, or did not start"
    exit_ = _describe_exit(position)
    if position.request < request:
        return "; ".join(filter(None, [exit_, _describe_silence(position)]))
    if position.waits_for is not None:
        return f"waits for {position.waits_for}"
    if position.failed:
        return exit_
    place = exit_ or "waits for no collective of fsdp_c"
    if position.completed:
        place += f"; last completed: {position.completed[0]}{_format_age(position.completed_at)}"
    return f"{place}; main thread: {position.line}" if position.line else place


def _describe_exit(position: Position) -> str:
    """Names the wait or the pass that an exception interrupted."""
    if position.failed:
        return f"left the wait for {position.failed} by an exception"
    if position.interrupted_pass:
        return f"left the {position.interrupted_pass} by an exception"
    return ""


def _format_age(at: float | None) -> str:
    return f", {max(0.0, time.time() - at):.0f} s ago" if at is not None else ""


def _is_local(position: Position) -> bool:
    return (position.host, position.system) == (socket.gethostname(), read_system())


def _describe_silence(position: Position) -> str:
    """Describes a rank that has not answered, with the process state if it runs on this host."""
    process = f"process {position.pid} on {position.host}"
    if not _is_local(position):
        return (
            f"{process} does not answer: it has ended, is stopped, answers late, or cannot be "
            "reached"
        )
    state = read_process_state(position.pid)
    if state in _ENDED:
        return f"{process} has ended"
    if state in _STOPPED:
        return f"{process} is stopped by a signal or a debugger"
    return (
        f"{process} runs, but does not answer: it makes progress in other collectives, holds the "
        "GIL, or has left its process group"
    )


def can_answer(position: Position) -> bool:
    """Whether the process of the rank may run. Processes of other hosts count as running."""
    return not _is_local(position) or read_process_state(position.pid) not in _ENDED + _STOPPED


def read_process_state(pid: int) -> str:
    """Returns the state of proc(5), one character, or "" if the process has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")  # any bytes may be in the name
        return text.rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _describe_common(positions: list[Position]) -> str:
    """Names the newest collective that all these ranks completed.

    The name of the process group is left out: with HSDP, ranks use different process groups.
    """
    completed = [[text.rpartition(_GROUP_SEPARATOR)[0] for text in p.completed] for p in positions]
    if completed:
        common: Any = set(completed[0]).intersection(*completed)
        newest = next((text for text in completed[0] if text in common), None)
        if newest is not None:
            return f"last collective that all answering ranks completed: {newest}"
    return f"the answering ranks have no common collective among their last {RECENT}"
