"""What is known to differ between torch and fsdp_c, each with its reason.

A program in which a rule holds is compared up to there and no further.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from program_ranks import Step


def paired(stock: list[str], ours: list[str]) -> list[tuple[str, str]]:
    """The lines that differ, those about the same thing beside each other; one that only one has
    is beside an empty one."""
    left, right = labelled(stock), labelled(ours)
    labels = dict.fromkeys([*left, *right])
    pairs = [(left.get(label, ""), right.get(label, "")) for label in labels]
    return [(a, b) for a, b in pairs if a != b]


def labelled(lines: list[str]) -> dict[str, str]:
    found: dict[str, str] = {"": lines[0]}
    for line in lines[1:]:
        label = line.split(": ")[0]
        while label in found:
            label += "'"
        found[label] = line
    return found


@dataclass
class Found:
    """A difference that is to be judged: the program up to it, what stock gave in the operations
    before, and what was seen last."""

    world: int
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
        return paired(self.stock, self.ours)

    def told(self, name: str, /, **arguments: object) -> bool:
        """Whether the program has this operation with these arguments."""
        return any(
            name == done and all(given.get(key) == value for key, value in arguments.items())
            for done, given in self.program
        )

    def both_raised(self, *beginnings: str) -> bool:
        """Whether both have raised one of these: type and message."""
        ways = tuple(f"raised {beginning}" for beginning in beginnings)
        return self.stock[0].startswith(ways) and self.ours[0].startswith(ways)

    def hooks_differ(self) -> bool:
        """Whether other numbers of FSDP2's hooks were found: no rule explains that."""
        return any(a.startswith("hooks: ") and b.startswith("hooks: ") for a, b in self.pairs())

    def gradients_missing(self) -> bool:
        """Whether only one of both has some gradient."""
        return any(".grad: " in a + b and not (a and b) for a, b in self.pairs())

    def only_whole_weights(self) -> bool:
        """Whether no more differs than the bits of parameters that are whole."""
        return all(
            a.split()[:3] == b.split()[:3] and a.split()[2:3] == ["Parameter"]
            for a, b in self.pairs()
        )


WRITING = ("optimize", "step", "load", "load_for", "optimizer_state", "write")
"""Operations that may change the shards."""
HALVES = ("fp16, given in fp32", "fp64")
"""Policies under which torch divides gradients before and after their reduction."""
REFUSALS = ("requires a single root module", "is shared with a parameter already managed")
"""What the first forward of a model may raise."""
RULES: dict[str, Callable[[Found], bool]] = {}


def rule(reason: str) -> Callable[[Callable[[Found], bool]], Callable[[Found], bool]]:
    def register(function: Callable[[Found], bool]) -> Callable[[Found], bool]:
        RULES[reason] = function
        return function

    return register


def known(
    world: int,
    program: list[Step],
    before: list[list[str]],
    stock: list[str],
    ours: list[str],
) -> str | None:
    """The rule that a difference comes under."""
    found = Found(world, program, before, stock, ours)
    if found.hooks_differ():
        return None
    return next((reason for reason, holds in RULES.items() if holds(found)), None)


def goes_on(name: str, stock: list[str], ours: list[str]) -> bool:
    """Whether a program can be compared further: what both have is the same, all the same."""
    labels = {a.split(": ")[0] for a, _ in paired(stock, ours)}
    both = all(lines[0].startswith("raised") for lines in (stock, ours))
    if both and all(label.endswith(".grad") for label in labels):
        return True  # reductions that come later
    return labels == {stock[0].split(": ")[0]} and (both or name == "reset_iter_state")


SHARDING = ("shard", "shard_one", "shard_both", "replicate")


@rule("a refused fully_shard leaves the module as it was; in torch it counts as sharded")
def refused(found: Found) -> bool:
    return found.raised(*SHARDING)


AS_TORCH = (
    "post_backward",
    "finalize_backward",
    "pre_backward",
    "pre_backward and prefetch",
    "_root_post_backward_final_callback",
)
"""Private methods that raise torch's AttributeError before the first forward."""


@rule("torch ends in an AttributeError about attributes of its own")
def own_attributes(found: Found) -> bool:
    name, given = found.program[-1]
    if name in ("call_group", "call_state") and given["name"] in AS_TORCH:
        return False
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
    return "inference tensor" in found.stock[0].lower() or any(
        "is_inference" in line for line in lines
    )


@rule("parameters of several dtypes in one group; torch refuses them")
def several_dtypes(found: Found) -> bool:
    return " expects uniform " in found.stock[0]


@rule("any divide factor works on gloo; torch has no PREMUL_SUM there")
def premultiplied(found: Found) -> bool:
    return "PREMUL_SUM" in found.stock[0]


@rule("whole weights follow a step of the optimizer, or what is loaded; torch's are old")
def old_weights(found: Found) -> bool:
    if found.gradients_missing():
        return False
    return found.only_whole_weights() or any(
        name in WRITING and any(" Parameter " in line for line in lines)
        for (name, _), lines in zip(found.program, found.before)
    )


@rule("zero_grad() and a reset drop gradients that wait for a reduction; torch's come back")
def dropped(found: Found) -> bool:
    waiting = any(
        found.told("flag", name=name)
        for name in ("set_requires_gradient_sync", "set_requires_all_reduce")
    )
    return waiting and any(found.told(name) for name in ("zero_grad", "step", "reset_iter_state"))


@rule("a refused first forward leaves nothing behind; in torch some units are no roots, or are")
def refused_root(found: Found) -> bool:
    return any(words in lines[0] for words in REFUSALS for lines in found.before)


@rule("a step that failed leaves torch's units as they were in the middle: another error")
def not_recovered(found: Found) -> bool:
    return found.stock[0].startswith("raised RuntimeError: setStorage") and found.raised(
        "backward", "step", "gradient", "backward_into", "forward", "forward_of_part"
    )


@rule("what cannot be pickled is called otherwise")
def pickled(found: Found) -> bool:
    return found.both_raised("AttributeError: Can't pickle", "_pickle", "TypeError: cannot pickle")


@rule("a backward of several ranks failed: without a reset, reductions come with the next one")
def overlapped(found: Found) -> bool:
    gradients = all(".grad: " in (a or b) or a.startswith("gradients: ") for a, b in found.pairs())
    failed = found.raised("backward", "backward_into", "gradient", "step")
    return found.world > 1 and gradients and (failed or found.stock[0].startswith("raised"))


@rule("torch divides by a factor twice: one rank, in fp16, fp64 or after a forced sum")
def divided_twice(found: Found) -> bool:
    gradients = [a for a, _ in found.pairs() if ".grad: " in a or a.startswith("gradients: ")]
    types = any(f" {name} " in a for a in gradients for name in ("float16", "float64"))
    forced = found.told("flag", name="set_force_sum_reduction_for_comms", value=True)
    policies = any(given.get("policy") in HALVES for _, given in found.program)
    return found.told("factor") and bool(gradients) and (types or forced or policies)


@rule("one rank's weights are there where torch's have been freed")
def freed(found: Found) -> bool:
    alone = found.world == 1 or any(given.get("mesh") == "replicas" for _, given in found.program)
    return alone and found.stock[0].startswith("raised RuntimeError: setStorage")


BACKWARDS = ("backward", "backward_into", "gradient", "step")
FORWARDS = ("forward", "forward_of_part", "other_forward", "calls_within", "gradient", "step")


@rule("a backward that raised: the next forward resets what it left; torch's units stay within it")
def reset_by_forward(found: Found) -> bool:
    raised = [
        at
        for at, ((name, _), lines) in enumerate(zip(found.program, found.before))
        if name in BACKWARDS and lines[0].startswith("raised")
    ]
    return any(name in FORWARDS for name, _ in found.program[min(raised, default=10**6) + 1 :])


@rule("a conversion that fails leaves shards as they were; torch has taken the wrong parameter")
def failed_conversion(found: Found) -> bool:
    return found.raised("convert")


@rule("weights left whole by hand are gathered anew after an optimizer step; torch's are old")
def gathered_anew(found: Found) -> bool:
    name = found.program[-1][0]
    return name == "unshard" and (found.told("optimize") or found.told("step"))
