"""What is known to differ between torch and fsdp_c, each with its reason.

A program in which a rule holds is compared up to there and no further.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from program_ranks import Step


@dataclass
class Found:
    """A difference that is to be judged: the program up to it, what stock gave in the operations
    before, and what was seen last."""

    program: list[Step]
    before: list[list[str]]
    stock: list[str]
    ours: list[str]

    def raised(self, *names: str) -> bool:
        """Whether one of these operations has raised before, under stock."""
        return any(
            name in names and lines[0].startswith("raised")
            for (name, _), lines in zip(self.program, self.before)
        )


RULES: dict[str, Callable[[Found], bool]] = {}


def rule(reason: str) -> Callable[[Callable[[Found], bool]], Callable[[Found], bool]]:
    def register(function: Callable[[Found], bool]) -> Callable[[Found], bool]:
        RULES[reason] = function
        return function

    return register


def known(
    program: list[Step], before: list[list[str]], stock: list[str], ours: list[str]
) -> str | None:
    """The rule that a difference comes under."""
    found = Found(program, before, stock, ours)
    return next((reason for reason, holds in RULES.items() if holds(found)), None)


SHARDING = ("shard", "shard_one", "shard_both", "replicate")


@rule("a refused fully_shard leaves the module as it was; in torch it counts as sharded")
def refused(found: Found) -> bool:
    return found.raised(*SHARDING)


@rule("torch ends in an AttributeError about attributes of its own")
def own_attributes(found: Found) -> bool:
    return found.stock[0].startswith("raised AttributeError: 'FSDP")
