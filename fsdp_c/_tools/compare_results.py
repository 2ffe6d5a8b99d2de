"""Compares the records of the runs of ``compare``: differences, times, memory, verdict.

Each supervisor compares the runs of its own ranks, and sends a summary per rank. The first
supervisor joins the summaries to a :class:`Comparison`.
"""

from __future__ import annotations

import enum
import statistics
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import zip_longest
from typing import Any

from .compare_runs import Run

Record = dict[str, Any]
"""A line of JSON that ``compare_observer.py`` has written. Its lists:

- ``losses``: [value, digest]
- ``gradients``: [name, digest, squared norm, number of ranks with the same gradient]
- ``parameters``: [name, digest]
"""

EXAMPLES = 3
"""Maximum number of differences of one kind in one step that a summary describes."""

LOSS, GRADIENT, PARAMETER, SEQUENCE = "loss", "gradient", "parameter", "sequence of steps"


class Verdict(enum.Enum):
    """The results of a comparison; the values are the exit codes."""

    EQUAL = 0
    DIFFERENT = 1
    TORCH_FAILED = 2
    FSDP_C_FAILED = 3
    INCONCLUSIVE = 4


@dataclass
class Difference:
    """One value that differs between the first run under torch and another run.

    ``name`` is the name of the parameter, or the index of the loss among the recorded losses of the
    step. It is empty for a different sequence of steps. ``expected`` and ``found`` describe torch
    and ``run``: losses, norms and digests of this rank's gradients, digests of parameters, or the
    next step.
    """

    step: int
    kind: str
    name: str
    rank: int
    run: str
    expected: str
    found: str

    def __str__(self) -> str:
        subject = (
            f"{self.kind} of '{self.name}'" if self.kind in (GRADIENT, PARAMETER) else self.kind
        )
        if self.kind == PARAMETER:
            subject += " after the step"
        values = f"torch {self.expected}, {self.run} {self.found}"
        return f"step {self.step}, rank {self.rank}: {subject}: {values}"


# ---- two runs of one rank ------------------------------------------------------------------------


def find_differences(
    expected: list[Record], found: list[Record], rank: int, run: str
) -> Iterator[Difference]:
    """Yields the differences of two runs in the order in which the script made the values."""
    for left, right in zip_longest(expected, found):
        if left is None or right is None or _get_position(left) != _get_position(right):
            step = min(record["step"] for record in (left, right) if record is not None)
            ends = (_describe_position(record) for record in (left, right))
            yield Difference(step, SEQUENCE, "", rank, run, *ends)
            return
        for kind, name, a, b in _find_different_values(left, right):
            yield Difference(left["step"], kind, name, rank, run, a, b)


def _get_position(record: Record) -> tuple[int, int]:
    return record["step"], record["optimizer"]


def _describe_position(record: Record | None) -> str:
    if record is None:
        return "makes no further step"
    return f"makes step {record['step']} of optimizer {record['optimizer']}"


def _find_different_values(left: Record, right: Record) -> Iterator[tuple[str, ...]]:
    """Yields (kind, name, expected, found) of the values that differ in one step."""
    for i, (a, b) in enumerate(zip_longest(left["losses"], right["losses"])):
        if a is None or b is None or a[1] != b[1]:
            yield LOSS, str(i), *(repr(loss[0]) if loss else "no loss" for loss in (a, b))
    for a, b in zip_longest(left["gradients"], right["gradients"]):
        if a is None or b is None or a[1:] != b[1:]:
            yield GRADIENT, (a or b)[0], _describe_gradient(a), _describe_gradient(b)
    for a, b in zip_longest(left["parameters"], right["parameters"]):
        if a is None or b is None or a[1] != b[1]:
            yield PARAMETER, (a or b)[0], *(e[1] if e else "no parameter" for e in (a, b))


def _describe_gradient(entry: list[Any] | None) -> str:
    if entry is None:
        return "no parameter"
    if entry[1] == "None":
        return "no gradient"
    return f"norm {entry[2] ** 0.5!r}, digest {entry[1][:8]}"


# ---- all runs of one rank ------------------------------------------------------------------------


def summarize_rank(rank: int, runs: list[tuple[Run, list[Record]]]) -> dict[str, Any]:
    """Returns the summary of one rank, which JSON can represent.

    Every run is compared with the first run under torch. For each kind and step, ``differences``
    has the first ``EXAMPLES`` differences, and ``counts`` has the number of all.
    """
    reference = runs[0][1]
    summary: dict[str, Any] = {"runs": {}, "differences": {}, "counts": {}}
    for run, records in runs:
        counts: Counter[str] = Counter()
        examples = []
        for difference in find_differences(reference, records, rank, run.name):
            key = f"{difference.step} {difference.kind}"
            counts[key] += 1
            if counts[key] <= EXAMPLES:
                examples.append(asdict(difference))
        summary["runs"][run.name] = _summarize_run(records)
        summary["differences"][run.name] = examples
        summary["counts"][run.name] = counts
    return summary


def _summarize_run(records: list[Record]) -> dict[str, Any]:
    """Returns seconds, bytes and counts of a run, by step. Joins the records of optimizers."""
    steps: dict[int, list[Record]] = {}
    for record in records:
        steps.setdefault(record["step"], []).append(record)
    gradients = {step: [g for r in found for g in r["gradients"]] for step, found in steps.items()}
    collectives = [r["collectives"] for r in records if r.get("collectives")]
    return {
        "seconds": [sum(r["seconds"] for r in found) for found in steps.values()],
        "losses": [[loss[0] for r in found for loss in r["losses"]] for found in steps.values()],
        "squares": [sum(g[2] / g[3] for g in found) for found in gradients.values()],
        "gradients": [len(found) for found in gradients.values()],
        "parameters": [sum(len(r["parameters"]) for r in found) for found in steps.values()],
        "peak_memory": max((r["peak_memory"] for r in records), default=0),
        "peak_device_memory": max((r["peak_device_memory"] for r in records), default=0),
        "collectives": collectives[0] if collectives else None,
        "uses_fsdp_c": any(r["uses_fsdp_c"] for r in records),
    }


# ---- all ranks -----------------------------------------------------------------------------------


@dataclass
class Comparison:
    """The results of all ranks. ``summaries`` has one entry of :func:`summarize_rank` per rank."""

    runs: list[Run]
    summaries: list[dict[str, Any]]
    requested_steps: int
    verdict: Verdict = Verdict.EQUAL
    differences: list[Difference] = field(default_factory=list)
    """Differences between fsdp_c and torch, before the first of ``torch_differences``."""
    torch_differences: list[Difference] = field(default_factory=list)
    """Differences between torch's runs, which fsdp_c did not cause."""
    notes: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.torch_differences = self._list_differences("torch")
        first = self.torch_differences[0].step if self.torch_differences else None
        found = self._list_differences("fsdp_c")
        self.differences = [d for d in found if first is None or d.step < first]
        self._set_verdict()

    def _list_differences(self, implementation: str) -> list[Difference]:
        differences = [
            Difference(**fields)
            for summary in self.summaries
            for name in self.list_run_names(implementation)
            for fields in summary["differences"][name]
        ]
        order = (LOSS, GRADIENT, PARAMETER, SEQUENCE)
        return sorted(differences, key=lambda d: (d.step, order.index(d.kind), d.rank, d.run))

    def _set_verdict(self) -> None:
        """Sets the verdict and the notes."""
        steps = self.count_steps()
        if steps == 0:
            self._set_inconclusive("the script made no optimizer step, so nothing was compared")
            return
        if steps < self.requested_steps:
            self.notes.append(f"the script ended after {steps} of {self.requested_steps} steps")
        if self._uses_fsdp_c("torch"):
            self._set_inconclusive(
                "the script shards with fsdp_c itself, so no run was under torch alone"
            )
            return
        has_steps = any(run["seconds"] for run in self._list_runs("fsdp_c"))
        if has_steps and not self._uses_fsdp_c("fsdp_c"):
            self._set_inconclusive(
                "fsdp_c ran no module: the script calls neither fully_shard nor replicate"
            )
            return
        if self.torch_differences:
            first = self.torch_differences[0]
            self._set_inconclusive(
                f"the script does not repeat its own numbers under torch: {first}; "
                f"only the steps before step {first.step} were compared"
            )
        if self.differences:
            self.verdict = Verdict.DIFFERENT
            if len(self.list_run_names("torch")) == 1:
                self.notes.append("--rounds 2 also compares torch with itself")
            elif {d.run for d in self.differences} != set(self.list_run_names("fsdp_c")):
                self.notes.append("fsdp_c did not differ in every round")

    def _set_inconclusive(self, note: str) -> None:
        self.verdict = Verdict.INCONCLUSIVE
        self.notes.append(note)

    def _uses_fsdp_c(self, implementation: str) -> bool:
        return any(run["uses_fsdp_c"] for run in self._list_runs(implementation))

    def _list_runs(self, implementation: str, skip_profiled: bool = False) -> list[dict[str, Any]]:
        """Returns summaries of runs on all ranks.

        ``skip_profiled``: without round 1, unless it is the only round.
        """
        names = self.list_run_names(implementation)
        if skip_profiled and len(names) > 1:
            names = names[1:]
        return [summary["runs"][name] for name in names for summary in self.summaries]

    def list_run_names(self, implementation: str) -> list[str]:
        """Returns the names of the runs under an implementation, by round."""
        return [run.name for run in self.runs if run.implementation == implementation]

    def count_steps(self) -> int:
        """Returns the number of steps of the first run under torch, on the rank with the most."""
        return max(len(s["runs"][self.runs[0].name]["seconds"]) for s in self.summaries)

    def count_differences(self, step: int, kind: str) -> int:
        """Returns the number of values, over all ranks, that differ from torch's.

        The number is that of the run under fsdp_c with the most.
        """
        return max(
            sum(summary["counts"][name].get(f"{step} {kind}", 0) for summary in self.summaries)
            for name in self.list_run_names("fsdp_c")
        )

    def count_values(self, step: int, kind: str) -> int:
        """Returns the number of gradients or parameters of a step, over all ranks."""
        key = "gradients" if kind == GRADIENT else "parameters"
        counts = [summary["runs"][self.runs[0].name][key] for summary in self.summaries]
        return sum(count[step - 1] for count in counts if step <= len(count))

    def compute_mean_loss(self, name: str, step: int) -> float | None:
        """Returns the mean loss of one step over the ranks and ``backward()`` calls.

        The mean of inf and -inf is nan. ``statistics.fmean`` would raise an exception.
        """
        losses = [s["runs"][name]["losses"] for s in self.summaries]
        losses_of_step = [loss for rank in losses if step <= len(rank) for loss in rank[step - 1]]
        return sum(losses_of_step) / len(losses_of_step) if losses_of_step else None

    def compute_gradient_norm(self, name: str, step: int) -> float | None:
        """Returns the norm of all gradients over all ranks. Replicated gradients count once."""
        squares = [s["runs"][name]["squares"] for s in self.summaries]
        squares_of_step = [rank[step - 1] for rank in squares if step <= len(rank)]
        return sum(squares_of_step) ** 0.5 if squares_of_step else None

    def list_step_seconds(self, implementation: str) -> list[list[float]]:
        """Returns the seconds of each timed step, by round, as means over the ranks.

        Step 1 is not timed, because it includes initialization. Step 2 of round 1 is not timed,
        because the profiler counts collectives in it.
        """
        rounds = []
        for i, name in enumerate(self.list_run_names(implementation)):
            by_rank = [s["runs"][name]["seconds"][2 if i == 0 else 1 :] for s in self.summaries]
            rounds.append([statistics.fmean(step) for step in zip(*by_rank)])
        return rounds

    def compute_median_seconds(self, implementation: str) -> float | None:
        """Returns the median of all timed steps in seconds, or None without timed steps."""
        seconds = [step for steps in self.list_step_seconds(implementation) for step in steps]
        return statistics.median(seconds) if seconds else None

    def find_peak_memory(self, implementation: str, key: str = "peak_memory") -> int:
        """Returns the largest peak of a rank in bytes.

        Runs of round 1, which use the profiler, count only if there is no other round.
        """
        return max(run[key] for run in self._list_runs(implementation, skip_profiled=True))

    def average_collectives(self, implementation: str) -> dict[str, float] | None:
        """Returns the number of collectives in step 2 and their bytes, as means over the ranks."""
        entries = [run["collectives"] for run in self._list_runs(implementation)]
        counted = [entry for entry in entries if entry is not None]
        if not counted:
            return None
        return {key: statistics.fmean(e[key] for e in counted) for key in ("count", "bytes")}
