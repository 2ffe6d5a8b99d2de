"""Stops the other process groups of a model in which ranks differ.

With HSDP, each rank has several process groups. A difference is found in one of them, and its ranks
raise an exception. Ranks that have only other process groups in common with them would wait for
them. So each rank that raises publishes the difference for its other process groups
(``departures.py``), and their ranks raise it.

Corrupted data (``FSDP_C_GUARD=hash``) stops no other process group: the ranks can train on after a
reset.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable

import torch.distributed as dist
from torch.distributed.distributed_c10d import _resolve_process_group

from .comparison_requests import make_stop_request
from .departures import get_departures

_PREFIX = "ranks of another process group differ: "
_REMEDY = "Restart all ranks from a checkpoint"
_STOPPED = f"The other process groups of the model are stopped, too. {_REMEDY}"
_GROUP = re.compile(r"process group '([^']*)'")
_DIFFERENCE = re.compile(r"(collective mismatch|ranks \d+ and \d+ of process group)[^\n]*")
_MAX_LENGTH = 300
"""Characters of a difference. The core keeps about 400 (``FCT_DIFFERENCE_BYTES``)."""


def stop_other_groups(text: str, names: Iterable[str]) -> str:
    """Stops the process groups ``names`` if an exception with this text says that programs differ.

    Process groups without further ranks are not stopped. Returns a line to append to the text:
    empty if no process group was stopped, or if the text has the line.
    """
    group, difference = _GROUP.search(text), _DIFFERENCE.search(text)
    if group is None or difference is None or _PREFIX in text or _STOPPED in text:
        return ""
    found = difference[0].partition(". ")[0][:_MAX_LENGTH]
    if group[0] not in found:
        found += f" ({group[0]})"
    stopped = False
    with contextlib.suppress(RuntimeError, ValueError):  # a process group or the store has ended
        ranks = set(dist.get_process_group_ranks(_resolve_process_group(group[1])))  # type: ignore[arg-type]
        for name in sorted(names):
            process_group = _resolve_process_group(name)  # type: ignore[arg-type]
            if not ranks.issuperset(dist.get_process_group_ranks(process_group)):
                request = make_stop_request(process_group, f"{_PREFIX}{found}. {_REMEDY}")
                get_departures().stop(request)
                stopped = True
    return f"\n{_STOPPED}" if stopped else ""
