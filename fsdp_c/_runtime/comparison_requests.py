"""Requests of a rank that other ranks compare collectives or checksums with theirs, or stop.

Ranks exchange requests through the job's default store (``departures.py``).
"""

from __future__ import annotations

import base64
import contextlib
from dataclasses import dataclass

import torch.distributed as dist

from .. import _C

Entries = tuple[int, bytes]
"""The latest collectives: the number of the oldest one, and all as ``op_entry`` structs."""


@dataclass
class ComparisonRequest:
    """A collective that this rank is about to issue, a part of what it has issued, or a stop.

    - By default: the collective with ``number`` and ``signature``.
    - With ``label_count``: that many issued collectives from ``number`` on. ``signature`` is the
      hash of their labels (``label_comparison.py``).
    - With ``has_checksums``: the interval of checksums with this ``number``. ``signature`` is the
      hash of the checksums.
    - With ``difference``: a difference that was found in another process group. The ranks raise it
      (``other_groups.py``).
    """

    group: str
    ranks: list[int]
    """Global ranks of the process group."""
    rank: int
    """Rank in the process group."""
    number: int
    signature: int
    first: int
    """Number of the oldest entry."""
    entries: str
    """The latest collectives, or the checksums, as ``op_entry`` structs in base64."""
    label_count: int = 0
    has_checksums: bool = False
    difference: str = ""

    @property
    def was_issued(self) -> bool:
        return self.label_count > 0 or self.has_checksums

    @property
    def latest(self) -> Entries:
        return self.first, base64.b64decode(self.entries)


def make_request(
    process_group: dist.ProcessGroup,
    number: int,
    signature: int,
    entry: bytes = b"",
    label_count: int = 0,
) -> ComparisonRequest:
    """Describes collectives of this rank.

    ``entry`` is the ``op_entry`` of a collective that this rank is about to issue. It is appended
    to the entries of the issued collectives. ``entry`` is empty if the collectives were issued.
    """
    first, entries = _C.collective_entries(process_group.group_name)
    request = _make_request(process_group, number, signature, (first, entries + entry))
    request.label_count = label_count
    return request


def make_checksum_request(
    process_group: dist.ProcessGroup, number: int, signature: int
) -> ComparisonRequest:
    """Describes an interval of checksums (``csrc/transport/checksums.h``)."""
    entries = _C.checksum_entries(process_group.group_name, number)
    request = _make_request(process_group, number, signature, entries)
    request.has_checksums = True
    return request


def make_stop_request(process_group: dist.ProcessGroup, difference: str) -> ComparisonRequest:
    """Requests that the ranks of the process group raise ``difference``."""
    request = _make_request(process_group, 0, 0, (0, b""))
    request.difference = difference
    return request


def _make_request(
    process_group: dist.ProcessGroup, number: int, signature: int, entries: Entries
) -> ComparisonRequest:
    return ComparisonRequest(
        process_group.group_name,
        dist.get_process_group_ranks(process_group),
        process_group.rank(),
        number,
        signature,
        entries[0],
        base64.b64encode(entries[1]).decode(),
    )


def find_issued_entries(request: ComparisonRequest) -> Entries | None:
    """Returns what this rank has issued if its signature is known and differs from the request."""
    with contextlib.suppress(RuntimeError, ValueError):  # the process group has ended
        if _get_signature(request) not in (0, request.signature):
            if request.has_checksums:
                return _C.checksum_entries(request.group, request.number)
            return _C.collective_entries(request.group)
    return None


def _get_signature(request: ComparisonRequest) -> int:
    """Returns this rank's value of ``request.signature``; 0: unknown."""
    if request.has_checksums:
        return dict(_C.checksum_intervals(request.group)).get(request.number, 0)
    if not request.label_count:
        return _C.collective_signature(request.group, request.number)
    hashes = {(first, count): value for first, count, value in _C.label_blocks(request.group)}
    return hashes.get((request.number, request.label_count), 0)
