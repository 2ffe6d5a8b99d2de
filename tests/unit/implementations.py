"""Runs one scenario under torch's ``fully_shard`` and under fsdp_c, and records calls."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import releases
import torch
from garbage_collection import no_garbage_collection
from torch.distributed.fsdp import _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

import fsdp_c

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "torch": torch.distributed.fsdp.fully_shard,
    "fsdp_c": fsdp_c.fully_shard,
}

FOLDERS = [Path(fsdp_c.__file__).parent, *map(Path, _fully_shard.__path__)]
"""The folders of fsdp_c and of torch's FSDP2."""


def groups_of(model: Any) -> list[Any]:
    return [
        group
        for module in model.modules()
        if isinstance(module, torch.distributed.fsdp.FSDPModule)
        for group in releases.groups_of(module._get_fsdp_state())
    ]


def run_both(scenario: Callable[[Callable[..., Any]], Any]) -> tuple[Any, Any]:
    """Returns the results of a scenario under torch's ``fully_shard`` and under that of fsdp_c."""
    found = tuple(scenario(shard) for shard in IMPLEMENTATIONS.values())
    return found[0], found[1]


def record_calls(events: list[Any], name: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``original``. Each call appends its name, its group's name, and the training state of
    its group or FSDP state."""

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        owner = args[0] if args and isinstance(args[0], (FSDPParamGroup, FSDPState)) else None
        group_name = owner._module_fqn if isinstance(owner, FSDPParamGroup) else None
        events.append((name, group_name, owner and owner._training_state.name))
        return original(*args, **kwargs)

    return call


def list_python_calls(action: Callable[[], object]) -> list[str]:
    """Runs ``action``. Returns "file:function" for each Python function of FOLDERS that it calls.

    The garbage collector is off: it would run finalizers of the models of other tests.
    """
    called: list[str] = []

    def profile(frame: Any, event: str, argument: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and any(map(path.is_relative_to, FOLDERS)):
            called.append(f"{path.name}:{frame.f_code.co_name}")

    with no_garbage_collection():
        sys.setprofile(profile)
        try:
            action()
        finally:
            sys.setprofile(None)
    return called
