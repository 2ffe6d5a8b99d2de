"""Mistakes that random programs have to find: they are believed because they bite.

Each is put into fsdp_c's process before it forks the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule


def in_place_of(name: str, wrong: Callable[..., Any]) -> Callable[[], None]:
    """``wrong`` is called with the right method, and with its arguments."""

    def make() -> None:
        right = getattr(FSDPModule, name)
        setattr(FSDPModule, name, lambda *args, **kwargs: wrong(right, *args, **kwargs))

    return make


def unbiased() -> None:
    """SGD of shards without momentum: a wrong number, in the last bits at first."""
    right = torch.optim.SGD.step

    def step(self: Any, *args: Any) -> Any:
        for group in self.param_groups:
            group["lr"] = group["lr"] * (1 + 1e-6)
        return right(self, *args)

    torch.optim.SGD.step = step  # type: ignore[method-assign, assignment]


MISTAKES: dict[str, Callable[[], None]] = {
    "reshard() does nothing": in_place_of("reshard", lambda right, unit: None),
    "a factor is off": in_place_of(
        "set_gradient_divide_factor", lambda right, unit, factor: right(unit, factor * 1.5)
    ),
    "a setting is lost": in_place_of(
        "set_reshard_after_backward", lambda right, unit, value, recurse=True: None
    ),
    "a setting reaches too far": in_place_of(
        "set_requires_gradient_sync", lambda right, unit, value, recurse=True: right(unit, value)
    ),
    "another error": in_place_of("set_modules_to_forward_prefetch", lambda right, unit, units: 0),
    "a step is too long": unbiased,
}
