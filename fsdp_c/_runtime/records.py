"""Records of collectives (``csrc/core/recorder.h``): of this process, and in files."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import struct
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .. import _C

CAPACITY = 4096
"""The largest number of records of a process."""
FORMAT = 1
"""Number of the format of files. Files of another number are refused."""

_RECORD = struct.Struct("<QQQQQIHBBii24s48s")
_KINDS = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "comparison of models before the gather",
    "comparison of collectives at the end of the backward",
)
_PASSES = ("forward", "backward", "outside of a pass")
ISSUED, WAITING, COMPLETE, FAILED = "issued", "waiting", "complete", "failed"
ABANDONED = "abandoned"
_STATES = (ISSUED, WAITING, COMPLETE, FAILED, ABANDONED)


@dataclass(frozen=True)
class Record:
    """A collective of this rank. Times are nanoseconds of the monotonic clock, 0: not reached."""

    number: int
    begin: int
    waiting: int
    end: int
    step: int
    pass_name: str
    kind: str
    state: str
    rank: int
    world: int
    group: str
    modules: str

    def describe(self) -> str:
        """Names operation, modules, step and pass. Equal on all ranks for the same collective."""
        unit = f"'{self.modules}'" if self.modules else "the root's parameter group"
        return f"{self.kind} of {unit} (step {self.step}, {self.pass_name})"


def parse_records(data: bytes) -> list[Record]:
    """Parses records and returns them newest first. Raises ``ValueError`` for invalid bytes."""
    if len(data) % _RECORD.size != 0:
        raise ValueError(f"{len(data)} bytes are not a multiple of a record's {_RECORD.size} bytes")
    records = [record for fields in _RECORD.iter_unpack(data) for record in _parse_fields(*fields)]
    return sorted(records, key=lambda record: record.number, reverse=True)


def _parse_fields(
    number: int, begin: int, waiting: int, end: int, _work: int, step: int, pass_number: int,
    kind: int, state: int, rank: int, world: int, group: bytes, modules: bytes,
) -> Iterator[Record]:  # fmt: skip
    if number != 0:
        yield Record(
            number,
            begin,
            waiting,
            end,
            step,
            _PASSES[min(pass_number, len(_PASSES) - 1)],
            _get_name(_KINDS, kind, "kind"),
            _get_name(_STATES, state, "state"),
            rank,
            world,
            _decode(group),
            _decode(modules),
        )


def _get_name(names: tuple[str, ...], value: int, field: str) -> str:
    if value >= len(names):
        raise ValueError(f"a record has the unknown {field} {value}")
    return names[value]


def _decode(text: bytes) -> str:
    return text.split(b"\0", 1)[0].decode(errors="replace")


def read_own_records(count: int = CAPACITY) -> tuple[int, list[Record]]:
    """Returns the time of the records' clock, and records, newest first.

    The records are the ``count`` newest ones, and older ones that a thread waits for.
    """
    now, data = _C.recorder_read(count)
    return now, parse_records(data)


# ---- files ---------------------------------------------------------------------------------------

_signal_files: set[tuple[int, int, str, int]] = set()
"""Process, signal, path and world size of the files to write. The extension never frees them, so
later monitors of this process use the same."""


def make_path(rank: int) -> str:
    """Returns the absolute path of the file of a rank."""
    folder = os.environ.get("FSDP_C_STALL_DIR") or os.path.join(
        tempfile.gettempdir(), f"fsdp_c-{os.getuid()}"
    )
    name = f"{os.environ.get('MASTER_PORT', 'job')}-rank{rank}.records"
    return os.path.join(os.path.abspath(folder), name)


def write_own_records(path: str, rank: int, world: int) -> None:
    """Writes the file, and creates its folder. Raises ``OSError``."""
    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    _C.recorder_write(path, make_header(rank, world))


def write_on_signals(path: str, rank: int, world: int) -> None:
    """Writes the file on SIGABRT, and on the signal that FSDP_C_STALL_SIGNAL names.

    Raises:
        ValueError: FSDP_C_STALL_SIGNAL is not the name of a signal that can have a handler.
    """
    names = ["SIGABRT", *filter(None, [os.environ.get("FSDP_C_STALL_SIGNAL")])]
    for name in names:
        number = signal.Signals.__members__.get(name)
        if number is None or number in (signal.SIGKILL, signal.SIGSTOP):
            raise ValueError(
                f"FSDP_C_STALL_SIGNAL must name a signal that can have a handler, got {name}"
            )
        file = (os.getpid(), number, path, world)
        if file not in _signal_files:
            with contextlib.suppress(OSError):  # the folder cannot be created
                os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
                _C.recorder_write_on_signal(number, path, make_header(rank, world))
                _signal_files.add(file)


def make_header(rank: int, world: int) -> bytes:
    """Returns the first line of a file: facts about this process, as JSON.

    Times are in nanoseconds. ``clock_offset`` is the wall time minus the monotonic time.
    ``written`` is the wall time of the call. A signal handler writes a header that was made before.
    """
    written = time.time_ns()
    facts = {
        "fsdp_c": "records",
        "format": FORMAT,
        "rank": rank,
        "world": world,
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "clock_offset": written - time.monotonic_ns(),
        "written": written,
    }
    return json.dumps(facts).encode() + b"\n"


def read_file(path: str) -> tuple[dict[str, Any], list[Record]]:
    """Returns the facts and the records of a file. Raises ``ValueError`` for other files."""
    with open(path, "rb") as file:
        data = file.read()
    line, _, rest = data.partition(b"\n")
    try:
        facts = json.loads(line)
        if facts.get("fsdp_c") != "records":
            raise ValueError("the first line is not the header of such a file")
        if facts.get("format") != FORMAT:
            raise ValueError(
                f"its format is {facts.get('format')}, expected {FORMAT}; use the fsdp_c that "
                "wrote the file"
            )
        for name in ("rank", "world", "pid", "clock_offset", "written", "host"):
            if not isinstance(facts.get(name), str if name == "host" else int):
                raise ValueError(f"its header has no '{name}'; use the fsdp_c that wrote the file")
        size = CAPACITY * _RECORD.size
        if len(rest) != size:
            raise ValueError(f"it has {len(rest)} bytes of records, expected {size}")
        return facts, parse_records(rest)
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{path} has no records of fsdp_c: {error}") from error
