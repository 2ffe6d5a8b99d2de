"""Mistakes that random programs have to find: they are believed because they bite.

Each is put into fsdp_c's ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import program_internals
import torch
from program_ranks import Step
from torch.distributed.fsdp import FSDPModule


@dataclass
class Mistake:
    """What makes it, in a rank, and an operation without which it cannot be seen."""

    make: Callable[[], None]
    operation: str
    arguments: dict[str, Any]

    def can_be_seen(self, program: list[Step]) -> bool:
        return any(
            name == self.operation and all(given[key] == v for key, v in self.arguments.items())
            for name, given in program
        )


def in_place_of(name: str, wrong: Callable[..., Any]) -> Callable[[], None]:
    """``wrong`` is called with the right method, and with its arguments."""

    def make() -> None:
        right = getattr(FSDPModule, name)
        setattr(FSDPModule, name, lambda *args, **kwargs: wrong(right, *args, **kwargs))

    return make


def too_long() -> None:
    """A wrong number, in the last bits at first."""
    right = torch.optim.SGD.step

    def step(self: Any, *args: Any) -> Any:
        for group in self.param_groups:
            group["lr"] = group["lr"] * (1 + 1e-6)
        return right(self, *args)

    torch.optim.SGD.step = step  # type: ignore[method-assign, assignment]


def lose_call() -> None:
    """A private method that returns without effect."""
    program_internals.GROUP_METHODS["unshard and wait"] = lambda group: None


def flag(name: str, wrong: Callable[..., Any], **arguments: Any) -> Mistake:
    return Mistake(in_place_of(name, wrong), "flag", {"name": name, **arguments})


MISTAKES = {
    "reshard() does nothing": Mistake(
        in_place_of("reshard", lambda right, unit: None), "reshard", {"every": True}
    ),
    "a factor is off": Mistake(
        in_place_of(
            "set_gradient_divide_factor", lambda right, unit, factor: right(unit, factor * 1.5)
        ),
        "factor",
        {"name": "set_gradient_divide_factor", "unit": 0},
    ),
    "a setting is lost": flag(
        "set_reshard_after_backward", lambda right, unit, value, recurse=True: None, value=False
    ),
    "a setting reaches too far": flag(
        "set_requires_gradient_sync",
        lambda right, unit, value, recurse=True: right(unit, value),
        recurse=False,
        value=False,
    ),
    "an error is missing": Mistake(
        in_place_of("set_modules_to_forward_prefetch", lambda right, unit, units: None),
        "prefetch",
        {"way": "forward", "odd": True, "count": 2},
    ),
    "a private call has no effect": Mistake(lose_call, "call_group", {"name": "unshard and wait"}),
    "a step is too long": Mistake(too_long, "optimizer", {"kind": "sgd"}),
}
