"""Seeded mistakes that random programs must detect. Each is applied in the ranks of fsdp_c."""

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
    """A function that applies the mistake in a rank, and an operation that can detect it."""

    apply: Callable[[], None]
    operation: str
    arguments: dict[str, Any]

    def is_detectable(self, program: list[Step]) -> bool:
        return any(
            name == self.operation and all(given[key] == v for key, v in self.arguments.items())
            for name, given in program
        )


def replace_method(name: str, wrong: Callable[..., Any]) -> Callable[[], None]:
    """Returns a function that replaces a method by ``wrong(method, *arguments)``."""

    def apply() -> None:
        right = getattr(FSDPModule, name)
        setattr(FSDPModule, name, lambda *args, **kwargs: wrong(right, *args, **kwargs))

    return apply


def lengthen_sgd_steps() -> None:
    """Increases the learning rate, which changes the last bits at first."""
    right = torch.optim.SGD.step

    def step(self: Any, *args: Any) -> Any:
        for group in self.param_groups:
            group["lr"] = group["lr"] * (1 + 1e-6)
        return right(self, *args)

    torch.optim.SGD.step = step  # type: ignore[method-assign, assignment]


def lose_call() -> None:
    """Makes a private method return without effect."""
    program_internals.GROUP_METHODS["unshard and wait"] = lambda group: None


def flag(name: str, wrong: Callable[..., Any], **arguments: Any) -> Mistake:
    return Mistake(replace_method(name, wrong), "set_flag", {"name": name, **arguments})


MISTAKES = {
    "reshard() does nothing": Mistake(
        replace_method("reshard", lambda right, unit: None), "reshard", {"all_units": True}
    ),
    "a factor is off": Mistake(
        replace_method(
            "set_gradient_divide_factor", lambda right, unit, factor: right(unit, factor * 1.5)
        ),
        "set_divide_factor",
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
        replace_method("set_modules_to_forward_prefetch", lambda right, unit, units: None),
        "prefetch",
        {"direction": "forward", "unsharded_last": True, "count": 2},
    ),
    "a private call has no effect": Mistake(lose_call, "call_group", {"name": "unshard and wait"}),
    "a step is too long": Mistake(lengthen_sgd_steps, "create_optimizer", {"kind": "sgd"}),
}
