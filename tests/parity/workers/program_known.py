"""Rules for known differences between torch and fsdp_c, each with its reason.

A program is compared up to the operation at which a rule holds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from program_ranks import Step


def pair_lines(by_torch: list[str], by_fsdp_c: list[str]) -> list[tuple[str, str]]:
    """Returns the pairs of lines with equal labels that differ; a missing line is empty."""
    left, right = label_lines(by_torch), label_lines(by_fsdp_c)
    labels = dict.fromkeys([*left, *right])
    pairs = [(left.get(label, ""), right.get(label, "")) for label in labels]
    return [(a, b) for a, b in pairs if a != b]


def label_lines(lines: list[str]) -> dict[str, str]:
    """Maps a unique label of each line to the line. The label of the first line is empty."""
    by_label: dict[str, str] = {"": lines[0]}
    for line in lines[1:]:
        label = line.split(": ")[0]
        while label in by_label:
            label += "'"
        by_label[label] = line
    return by_label


@dataclass
class Mismatch:
    """A difference: the program up to the operation with the difference, torch's earlier lines, and
    the lines of torch and fsdp_c for the operation."""

    world: int
    program: list[Step]
    before: list[list[str]]
    by_torch: list[str]
    by_fsdp_c: list[str]

    def raised(self, *names: str) -> bool:
        """Returns whether one of these earlier operations has raised under torch."""
        return any(
            name in names and lines[0].startswith("raised")
            for (name, _), lines in zip(self.program, self.before)
        )

    def returned(self, name: str, what: str) -> bool:
        """Returns whether an earlier operation ``name`` has returned ``what`` under torch."""
        return any(
            name == done and lines[0] == f"gave {what!r}"
            for (done, _), lines in zip(self.program, self.before)
        )

    def pairs(self) -> list[tuple[str, str]]:
        return pair_lines(self.by_torch, self.by_fsdp_c)

    def has_operation(self, name: str, /, **arguments: object) -> bool:
        """Returns whether the program has this operation with these arguments."""
        return any(
            name == done and all(given.get(key) == value for key, value in arguments.items())
            for done, given in self.program
        )

    def both_raised(self, *beginnings: str) -> bool:
        """Returns whether both raised an error whose text has one of these beginnings."""
        ways = tuple(f"raised {beginning}" for beginning in beginnings)
        return self.by_torch[0].startswith(ways) and self.by_fsdp_c[0].startswith(ways)

    def hooks_differ(self) -> bool:
        """Returns whether the numbers of FSDP2's hooks differ, which no rule allows.

        The exception: a ``fully_shard`` that raised leaves its hooks installed in torch only.
        """
        counts = [
            (int(a.removeprefix("hooks: ")), int(b.removeprefix("hooks: ")))
            for a, b in self.pairs()
            if a.startswith("hooks: ") and b.startswith("hooks: ")
        ]
        left_by_torch = self.raised(*SHARDING) and all(a > b for a, b in counts)
        return bool(counts) and not left_by_torch

    def gradients_missing(self) -> bool:
        """Returns whether a gradient exists under only one implementation."""
        return any(".grad: " in a + b and not (a and b) for a, b in self.pairs())

    def only_whole_weights(self) -> bool:
        """Returns whether only the bits of unsharded parameters differ."""
        return all(
            a.split()[:3] == b.split()[:3] and a.split()[2:3] == ["Parameter"]
            for a, b in self.pairs()
        )


SHARDING = ("shard", "shard_one", "shard_both", "replicate")
"""Operations that convert modules."""
WRITING = ("optimize", "step", "load", "load_for", "optimizer_state", "write")
"""Operations that may change the shards."""
DIVIDED_TWICE_POLICIES = ("fp16, given in fp32", "fp64")
"""Policies under which torch divides gradients before and after their reduction."""
FIRST_FORWARD_ERRORS = (
    "requires a single root module",
    "is shared with a parameter already managed",
)
"""Parts of errors that the first forward of a model may raise."""
RULES: dict[str, Callable[[Mismatch], bool]] = {}


def rule(reason: str) -> Callable[[Callable[[Mismatch], bool]], Callable[[Mismatch], bool]]:
    def register(function: Callable[[Mismatch], bool]) -> Callable[[Mismatch], bool]:
        RULES[reason] = function
        return function

    return register


def find_rule(
    world: int,
    program: list[Step],
    before: list[list[str]],
    by_torch: list[str],
    by_fsdp_c: list[str],
) -> str | None:
    """Returns the reason of the rule that allows the difference, or None."""
    mismatch = Mismatch(world, program, before, by_torch, by_fsdp_c)
    if mismatch.hooks_differ():
        return None
    return next((reason for reason, holds in RULES.items() if holds(mismatch)), None)


def can_continue(name: str, by_torch: list[str], by_fsdp_c: list[str]) -> bool:
    """Returns whether the comparison can continue, because the state is still the same."""
    labels = {a.split(": ")[0] for a, _ in pair_lines(by_torch, by_fsdp_c)}
    both = all(lines[0].startswith("raised") for lines in (by_torch, by_fsdp_c))
    if both and all(label.endswith(".grad") for label in labels):
        return True  # only reductions differ in time
    return labels == {by_torch[0].split(": ")[0]} and (both or name == "reset_iter_state")


@rule("fully_shard that raises leaves the module unchanged; torch marks it as sharded")
def failed_sharding(mismatch: Mismatch) -> bool:
    return mismatch.raised(*SHARDING)


RAISES_AS_TORCH = (
    "post_backward",
    "finalize_backward",
    "pre_backward",
    "pre_backward and prefetch",
    "_root_post_backward_final_callback",
)
"""Private methods that raise torch's AttributeError before the first forward."""


@rule("torch raises an AttributeError about its own attributes")
def own_attributes(mismatch: Mismatch) -> bool:
    name, given = mismatch.program[-1]
    if name in ("call_group", "call_state") and given["name"] in RAISES_AS_TORCH:
        return False
    return mismatch.by_torch[0].startswith("raised AttributeError: 'FSDP")


@rule("fully_shard with two invalid arguments: torch reports the other one first")
def two_invalid_arguments(mismatch: Mismatch) -> bool:
    name, both = mismatch.program[-1][0], (mismatch.by_torch[0], mismatch.by_fsdp_c[0])
    return name in SHARDING and all(line.startswith("raised") for line in both)


@rule("requires_grad set while unsharded persists; in torch until the next gather")
def frozen_while_unsharded(mismatch: Mismatch) -> bool:
    return mismatch.returned("train_parameter", "unsharded")


@rule("writes to unsharded parameters on one rank persist; torch loses them")
def written_while_unsharded(mismatch: Mismatch) -> bool:
    return mismatch.returned("write", "unsharded")


@rule("first forward in inference mode: torch keeps inference tensors or fails on one rank (B3)")
def inference(mismatch: Mismatch) -> bool:
    lines = [line for pair in mismatch.pairs() for line in pair]
    return "inference tensor" in mismatch.by_torch[0].lower() or any(
        "is_inference" in line for line in lines
    )


@rule("parameters of several dtypes in one group; torch raises")
def several_dtypes(mismatch: Mismatch) -> bool:
    return " expects uniform " in mismatch.by_torch[0]


@rule("any divide factor works on gloo; torch has no PREMUL_SUM there")
def premultiplied(mismatch: Mismatch) -> bool:
    return "PREMUL_SUM" in mismatch.by_torch[0]


@rule("unsharded weights follow optimizer steps and loads; in torch they are stale")
def old_weights(mismatch: Mismatch) -> bool:
    if mismatch.gradients_missing():
        return False
    return mismatch.only_whole_weights() or any(
        name in WRITING and any(" Parameter " in line for line in lines)
        for (name, _), lines in zip(mismatch.program, mismatch.before)
    )


@rule("zero_grad() and a reset drop unreduced gradients; torch reduces them later")
def dropped(mismatch: Mismatch) -> bool:
    without_sync = any(
        mismatch.has_operation("flag", name=name)
        for name in ("set_requires_gradient_sync", "set_requires_all_reduce")
    )
    # A pipeline stage that raises leaves its flags off.
    without_sync = without_sync or mismatch.has_operation("pipeline_stage")
    return without_sync and any(
        mismatch.has_operation(name) for name in ("zero_grad", "step", "reset_iter_state")
    )


@rule("a first forward that raises leaves no state; torch has set some roots")
def refused_root(mismatch: Mismatch) -> bool:
    return any(words in lines[0] for words in FIRST_FORWARD_ERRORS for lines in mismatch.before)


@rule("after a failed step torch raises another error, because its units keep their state")
def not_recovered(mismatch: Mismatch) -> bool:
    return mismatch.by_torch[0].startswith("raised RuntimeError: setStorage") and mismatch.raised(
        "backward", "step", "gradient", "backward_into", "forward", "forward_of_part"
    )


@rule("errors about objects that cannot be pickled have other names")
def pickled(mismatch: Mismatch) -> bool:
    return mismatch.both_raised(
        "AttributeError: Can't pickle", "_pickle", "TypeError: cannot pickle"
    )


@rule("a failed backward on several ranks without reset: the next one issues its reductions")
def overlapped(mismatch: Mismatch) -> bool:
    gradients = all(
        ".grad: " in (a or b) or a.startswith("gradients: ") for a, b in mismatch.pairs()
    )
    failed = mismatch.raised("backward", "backward_into", "gradient", "step")
    return (
        mismatch.world > 1 and gradients and (failed or mismatch.by_torch[0].startswith("raised"))
    )


@rule("torch divides twice by a factor on one rank, in fp16, fp64 or with a forced sum")
def divided_twice(mismatch: Mismatch) -> bool:
    gradients = [a for a, _ in mismatch.pairs() if ".grad: " in a or a.startswith("gradients: ")]
    types = any(f" {name} " in a for a in gradients for name in ("float16", "float64"))
    forced = mismatch.has_operation("flag", name="set_force_sum_reduction_for_comms", value=True)
    policies = any(given.get("policy") in DIVIDED_TWICE_POLICIES for _, given in mismatch.program)
    return mismatch.has_operation("factor") and bool(gradients) and (types or forced or policies)


@rule("on one rank the weights exist when torch has freed them")
def freed(mismatch: Mismatch) -> bool:
    alone = mismatch.world == 1 or any(
        given.get("mesh") == "replicas" for _, given in mismatch.program
    )
    return alone and mismatch.by_torch[0].startswith("raised RuntimeError: setStorage")


BACKWARDS = ("backward", "backward_into", "gradient", "step")
FORWARDS = ("forward", "forward_of_part", "other_forward", "calls_within", "gradient", "step")


@rule("the forward after a backward that raised resets its state; torch's units keep it")
def reset_by_forward(mismatch: Mismatch) -> bool:
    raised = [
        at
        for at, ((name, _), lines) in enumerate(zip(mismatch.program, mismatch.before))
        if name in BACKWARDS and lines[0].startswith("raised")
    ]
    return any(name in FORWARDS for name, _ in mismatch.program[min(raised, default=10**6) + 1 :])


@rule("a failed conversion leaves the shards unchanged; torch has taken the wrong parameter")
def failed_conversion(mismatch: Mismatch) -> bool:
    return mismatch.raised("convert")


@rule("weights unsharded by the user are gathered again after a step; torch's are stale")
def gathered_anew(mismatch: Mismatch) -> bool:
    name = mismatch.program[-1][0]
    return name == "unshard" and (
        mismatch.has_operation("optimize") or mismatch.has_operation("step")
    )
