"""Reads the records of collectives, from this process or from a file (``csrc/core/recorder.h``)."""

from __future__ import annotations

import json
import os
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from .. import _C

CAPACITY = 4096
"""Records of a process."""

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
            _KINDS[kind],
            _STATES[state],
            rank,
            world,
            _decode(group),
            _decode(modules),
        )


def _decode(text: bytes) -> str:
    return text.split(b"\0", 1)[0].decode(errors="replace")


def read_own_records(count: int = CAPACITY) -> tuple[int, list[Record]]:
    """Returns the time of the records' clock, and up to ``count`` records, newest first."""
    now, data = _C.recorder_read(count)
    return now, parse_records(data)


# ---- files ---------------------------------------------------------------------------------------


def make_header(rank: int, world: int) -> bytes:
    """Returns the first line of a file: facts about this process, as JSON.

    Times are in nanoseconds. ``clock_offset`` is the wall time minus the monotonic time.
    ``written`` is the wall time of the call. A signal handler writes a header that was made before.
    """
    written = time.time_ns()
    facts = {
        "fsdp_c": "records",
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
        for name in ("rank", "world", "pid", "clock_offset", "host"):
            if not isinstance(facts.get(name), str if name == "host" else int):
                raise ValueError(f"its header has no '{name}'; use the fsdp_c that wrote the file")
        return facts, parse_records(rest)
    except (ValueError, AttributeError, IndexError) as error:
        raise ValueError(f"{path} has no records of fsdp_c: {error}") from error
