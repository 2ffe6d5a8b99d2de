"""Runs one scenario under torch's ``fully_shard`` and under fsdp_c, and records calls."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import releases
import torch
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

import fsdp_c

IMPLEMENTATIONS: dict[str, Callable[..., Any]] = {
    "torch": torch.distributed.fsdp.fully_shard,
    "fsdp_c": fsdp_c.fully_shard,
}


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
