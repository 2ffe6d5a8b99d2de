"""Rules for known differences between torch and fsdp_c, each with its reason.

A program is compared up to the first operation at which a rule holds. If the state is still the
same (``can_continue``), the comparison continues.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from program_ranks import Step
from releases import has


def pair_lines(by_torch: list[str], by_fsdp_c: list[str]) -> list[tuple[str, str]]:
    """Returns the pairs of lines with equal labels that differ; a missing line is empty."""
    torch_lines, fsdp_c_lines = label_lines(by_torch), label_lines(by_fsdp_c)
    labels = dict.fromkeys([*torch_lines, *fsdp_c_lines])
    pairs = [(torch_lines.get(label, ""), fsdp_c_lines.get(label, "")) for label in labels]
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
    """The program up to the operation with a difference, and the lines of both implementations.

    ``before`` has torch's lines of the earlier operations.
    """

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

    def returned(self, name: str, text: str) -> bool:
        """Returns whether an earlier operation ``name`` has returned ``text`` under torch."""
        return any(
            name == earlier and lines[0] == f"gave {text!r}"
            for (earlier, _), lines in zip(self.program, self.before)
        )

    def pairs(self) -> list[tuple[str, str]]:
        return pair_lines(self.by_torch, self.by_fsdp_c)

    def has_operation(self, name: str, /, **arguments: object) -> bool:
        """Returns whether the program has this operation with these arguments."""
        return any(
            name == step_name and all(given.get(key) == value for key, value in arguments.items())
            for step_name, given in self.program
        )

    def both_raised(self, *beginnings: str) -> bool:
        """Returns whether both raised an error whose text begins with one of ``beginnings``."""
        prefixes = tuple(f"raised {beginning}" for beginning in beginnings)
        return self.by_torch[0].startswith(prefixes) and self.by_fsdp_c[0].startswith(prefixes)

    def hooks_differ(self) -> bool:
        """Returns whether the numbers of FSDP2's hooks differ, which no rule allows.

        The exception: a ``fully_shard`` that raised leaves its hooks installed in torch only.
        """
        counts = [
            (int(a.removeprefix("hooks: ")), int(b.removeprefix("hooks: ")))
            for a, b in self.pairs()
            if a.startswith("hooks: ") and b.startswith("hooks: ")
        ]
        only_torch_has_more = self.raised(*SHARDING) and all(a > b for a, b in counts)
        return bool(counts) and not only_torch_has_more

    def gradients_missing(self) -> bool:
        """Returns whether a gradient exists under only one implementation."""
        return any(".grad: " in a + b and not (a and b) for a, b in self.pairs())

    def only_gradients_differ(self) -> bool:
        return all(".grad: " in (a or b) or a.startswith("gradients: ") for a, b in self.pairs())

    def only_unsharded_weights_differ(self) -> bool:
        """Returns whether only the bits of unsharded parameters differ."""
        return all(
            a.split()[:3] == b.split()[:3] and a.split()[2:3] == ["Parameter"]
            for a, b in self.pairs()
        )


SHARDING = ("shard", "shard_one", "shard_both", "replicate")
"""Operations that convert modules."""
WRITING = (
    "step_optimizer",
    "step",
    "load_state",
    "set_model_state",
    "get_optimizer_state",
    "write_parameter",
)
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
    both_raised = all(lines[0].startswith("raised") for lines in (by_torch, by_fsdp_c))
    if both_raised and all(label.endswith(".grad") for label in labels):
        return True  # the reductions of the two implementations run at different times
    return labels == {by_torch[0].split(": ")[0]} and (both_raised or name == "reset_iter_state")


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


@rule("torch 2.15 refuses the end of a backward that has not begun; fsdp_c does as torch before")
def end_of_no_backward(mismatch: Mismatch) -> bool:
    """torch 2.15 raises in the callback at the end of backward, also after the first forward.

    A group's ``finalize_backward`` before the first forward returns in torch 2.15. It raises in
    earlier releases and in fsdp_c.
    """
    name, given = mismatch.program[-1]
    by_torch, by_fsdp_c = mismatch.by_torch[0], mismatch.by_fsdp_c[0]
    if name == "call_group" and given["name"] == "finalize_backward":
        missing = "'FSDPCommContext' object has no attribute '_last_post_reduce_events'"
        return (
            has("2.15")
            and not by_torch.startswith("raised")
            and by_fsdp_c.startswith(f"raised AttributeError: {missing}")
        )
    message = "raised AssertionError: Expected manual backward finalization mode to be set"
    return by_torch.startswith(message)


@rule("fully_shard with two invalid arguments: torch reports the other one first")
def two_invalid_arguments(mismatch: Mismatch) -> bool:
    name, results = mismatch.program[-1][0], (mismatch.by_torch[0], mismatch.by_fsdp_c[0])
    return name in SHARDING and all(result.startswith("raised") for result in results)


@rule("requires_grad set while unsharded persists; in torch until the next gather")
def frozen_while_unsharded(mismatch: Mismatch) -> bool:
    return mismatch.returned("train_parameter", "unsharded")


@rule("writes to unsharded parameters on one rank persist; torch loses them")
def written_while_unsharded(mismatch: Mismatch) -> bool:
    return mismatch.returned("write_parameter", "unsharded")


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
def premul_sum_unsupported(mismatch: Mismatch) -> bool:
    return "PREMUL_SUM" in mismatch.by_torch[0]


@rule("unsharded weights follow optimizer steps and loads; in torch they are stale")
def old_weights(mismatch: Mismatch) -> bool:
    if mismatch.gradients_missing():
        return False
    return mismatch.only_unsharded_weights_differ() or any(
        name in WRITING and any(" Parameter " in line for line in lines)
        for (name, _), lines in zip(mismatch.program, mismatch.before)
    )


@rule("backward raises if parameters on one rank changed since forward; torch has copies")
def changed_before_backward(mismatch: Mismatch) -> bool:
    *earlier, last = [name for name, _ in mismatch.program]
    if last != "backward" or "was changed in place between" not in mismatch.by_fsdp_c[0]:
        return False
    forwards = {"forward", "forward_of_module", "call_other_method", "evaluate_within_forward"}
    last_forward = max(index for index, name in enumerate(earlier) if name in forwards)
    return any(name in WRITING for name in earlier[last_forward:])


@rule("a call of a group that raises before lazy init leaves the training state; torch sets it")
def refused_call(mismatch: Mismatch) -> bool:
    by_torch = mismatch.by_torch[0].replace("PRE_BACKWARD", "IDLE").replace("POST_BACKWARD", "IDLE")
    return mismatch.raised("call_group") and by_torch == mismatch.by_fsdp_c[0]


@rule("zero_grad() and a reset drop unreduced gradients; torch reduces them later")
def dropped(mismatch: Mismatch) -> bool:
    without_sync = any(
        mismatch.has_operation("set_flag", name=name)
        for name in ("set_requires_gradient_sync", "set_requires_all_reduce")
    )
    # A pipeline stage that raises leaves its flags off.
    without_sync = without_sync or mismatch.has_operation("pipeline_stage")
    written = mismatch.has_operation("change_grad") and any(
        ".grad: Tensor " in line for lines in mismatch.before for line in lines
    )
    return (without_sync or written) and any(
        mismatch.has_operation(name) for name in ("zero_grad", "step", "reset_iter_state")
    )


@rule("a first forward that raises leaves no state; torch has set some roots")
def refused_root(mismatch: Mismatch) -> bool:
    return any(words in lines[0] for words in FIRST_FORWARD_ERRORS for lines in mismatch.before)


@rule("after a failed step torch raises another error, because its units keep their state")
def not_recovered(mismatch: Mismatch) -> bool:
    return mismatch.by_torch[0].startswith("raised RuntimeError: setStorage") and mismatch.raised(
        "backward", "step", "autograd_grad", "backward_into", "forward", "forward_of_module"
    )


@rule("errors about objects that cannot be pickled have other names")
def pickled(mismatch: Mismatch) -> bool:
    return mismatch.both_raised(
        "AttributeError: Can't pickle", "_pickle", "TypeError: cannot pickle"
    )


@rule("a failed backward on several ranks without reset: the next one issues its reductions")
def late_reductions_of_failed_backward(mismatch: Mismatch) -> bool:
    failed = mismatch.raised("backward", "backward_into", "autograd_grad", "step")
    failed = failed or mismatch.by_torch[0].startswith("raised")
    return mismatch.world > 1 and failed and mismatch.only_gradients_differ()


@rule("torch divides twice by a factor on one rank, in fp16, fp64 or with a forced sum")
def divided_twice(mismatch: Mismatch) -> bool:
    gradients = [a for a, _ in mismatch.pairs() if ".grad: " in a or a.startswith("gradients: ")]
    types = any(f" {name} " in a for a in gradients for name in ("float16", "float64"))
    forced = mismatch.has_operation(
        "set_flag", name="set_force_sum_reduction_for_comms", value=True
    )
    policies = any(given.get("policy") in DIVIDED_TWICE_POLICIES for _, given in mismatch.program)
    return (
        mismatch.has_operation("set_divide_factor")
        and bool(gradients)
        and (types or forced or policies)
    )


@rule("on one rank the weights exist when torch has freed them")
def freed(mismatch: Mismatch) -> bool:
    on_one_rank = mismatch.world == 1 or any(
        given.get("mesh") == "replicas" for _, given in mismatch.program
    )
    return on_one_rank and mismatch.by_torch[0].startswith(
        ("raised RuntimeError: setStorage", "raised RuntimeError: The tensor has a non-zero number")
    )


@rule("torch adds a partial gradient of replicas to that of another parameter (B1)")
def added_to_another_parameter(mismatch: Mismatch) -> bool:
    return mismatch.has_operation(
        "set_flag", name="set_requires_all_reduce", value=False
    ) and mismatch.by_torch[0].startswith("raised RuntimeError: The size of tensor a")


BACKWARDS = ("backward", "backward_into", "autograd_grad", "step")
FORWARDS = (
    "forward",
    "forward_of_module",
    "call_other_method",
    "evaluate_within_forward",
    "autograd_grad",
    "step",
)


@rule("the forward after a backward that raised resets its state; torch's units keep it")
def reset_by_forward(mismatch: Mismatch) -> bool:
    raised = [
        index
        for index, ((name, _), lines) in enumerate(zip(mismatch.program, mismatch.before))
        if name in BACKWARDS and lines[0].startswith("raised")
    ]
    return any(name in FORWARDS for name, _ in mismatch.program[min(raised, default=10**6) + 1 :])


@rule("a failed conversion or load leaves the shards unchanged; torch has taken the wrong tensor")
def failed_conversion(mismatch: Mismatch) -> bool:
    assigned = mismatch.has_operation("load_state", assign=True)
    return mismatch.raised("convert") or (assigned and mismatch.raised("load_state"))


@rule("units frozen in the first forward are trained later in mixed precision; fixed in torch 2.14")
def frozen_at_first(mismatch: Mismatch) -> bool:
    mixed = any(given.get("policy") for _, given in mismatch.program)
    unfrozen = mismatch.has_operation("train_parameter", value=True)
    return not has("2.14") and mixed and unfrozen and mismatch.only_gradients_differ()


@rule("weights unsharded by the user are gathered again after a step; torch's are stale")
def gathered_anew(mismatch: Mismatch) -> bool:
    name = mismatch.program[-1][0]
    return name == "unshard" and (
        mismatch.has_operation("step_optimizer") or mismatch.has_operation("step")
    )
