"""The roots of this process, and the pass (forward or backward) that an exception interrupted.

The stall monitor reads them in its thread.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState

from .stall_report import is_model_running

_lock = threading.Lock()  # held while `_roots` is read or extended
_roots: weakref.WeakSet[Any] = weakref.WeakSet()
_pass_of_freed_root: list[str] = []


def add(root: Any) -> None:
    """Adds the state of a root at its lazy init."""
    with _lock:
        _roots.add(root)
    _pass_of_freed_root.clear()


def note_freed(root: Any) -> None:
    """Keeps the interrupted pass of ``root``, which is being freed.

    :func:`add` of a later root drops it.
    """
    if root._training_state != TrainingState.IDLE:
        _pass_of_freed_root[:] = [_name_pass(root._training_state)]


def find_interrupted_pass() -> str:
    """Returns the interrupted pass of a root: "forward" or "backward", "" if there is none."""
    with _lock:
        roots = list(_roots)
    for root in roots:
        state = root._training_state
        if state != TrainingState.IDLE and not is_model_running():
            return _name_pass(state)
    return _pass_of_freed_root[0] if _pass_of_freed_root else ""


def _name_pass(state: TrainingState) -> str:
    return "forward" if state == TrainingState.FORWARD else "backward"
