"""What is known to differ between torch and fsdp_c, each with its reason.

A program in which a rule holds is compared up to there and no further.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import zip_longest

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


    def gave(self, name: str, what: str) -> bool:
        """Whether this operation has given that before, under stock."""
        return any(
            name == done and lines[0] == f"gave {what!r}"
            for (done, _), lines in zip(self.program, self.before)
        )

    def pairs(self) -> list[tuple[str, str]]:
        """The lines that differ; one that only one has is beside an empty one."""
        return [(a, b) for a, b in zip_longest(self.stock, self.ours, fillvalue="") if a != b]


    def told(self, name: str, **arguments: object) -> bool:
        """Whether the program has this operation with these arguments."""
        return any(
            name == done and all(given.get(key) == value for key, value in arguments.items())
            for done, given in self.program
        )

    def only_whole_weights(self) -> bool:
        """Whether no more differs than the bits of parameters that are whole."""
        return all(
            a.split()[:3] == b.split()[:3] and a.split()[2] == "Parameter" for a, b in self.pairs()
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


@rule("two mistakes in one call of fully_shard: another one is named first")
def two_mistakes(found: Found) -> bool:
    name, both = found.program[-1][0], (found.stock[0], found.ours[0])
    return name in SHARDING and all(line.startswith("raised") for line in both)


@rule("parameters frozen or unfrozen while unsharded: it lasts; in torch, until the next gather")
def frozen_while_whole(found: Found) -> bool:
    return found.gave("train_parameter", "whole")


@rule("writes into whole parameters last, where one rank holds all; in torch they are lost")
def written_while_whole(found: Found) -> bool:
    return found.gave("write", "whole")


@rule("a first forward in inference mode: torch keeps inference tensors, or fails on one rank (B3)")
def inference(found: Found) -> bool:
    lines = [line for pair in found.pairs() for line in pair]
    return found.stock[0].startswith("raised RuntimeError: Inference tensors") or any(
        "is_inference" in line for line in lines
    )


@rule("parameters of several dtypes in one group; torch refuses them")
def several_dtypes(found: Found) -> bool:
    return " expects uniform " in found.stock[0]


@rule("any divide factor works on gloo; torch has no PREMUL_SUM there")
def premultiplied(found: Found) -> bool:
    return "PREMUL_SUM" in found.stock[0]


@rule("whole weights of one rank are the shards, and those of a root follow them; torch's are old")
def old_weights(found: Found) -> bool:
    return found.only_whole_weights()


@rule("torch divides by a factor twice: one rank, in fp16, fp64 or after a forced sum")
def divided_twice(found: Found) -> bool:
    return found.told("factor") and all(
        ".grad" in a or a.startswith("gradients") for a, b in found.pairs()[:1]
    )


@rule("backward with set_unshard_in_backward(False): one rank's weights are there, torch's are not")
def not_unsharded(found: Found) -> bool:
    flag = found.told("flag", name="set_unshard_in_backward")
    return flag and found.stock[0].startswith("raised RuntimeError: setStorage")


@rule("a conversion that fails leaves shards as they were; torch has taken the wrong parameter")
def failed_conversion(found: Found) -> bool:
    return found.raised("convert")


@rule("weights left whole by hand are gathered anew after an optimizer step; torch's are old")
def gathered_anew(found: Found) -> bool:
    name = found.program[-1][0]
    return name == "unshard" and (found.told("optimize") or found.told("step"))
