"""``Explanation``, the result of ``explain`` and ``plan``: units, memory and suggested changes."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn as nn

from .._runtime.fsdp_units import get_original_class
from .advice import Change, find_changes
from .byte_format import format_bytes, parse_bytes
from .dry_run import Collectives, make_step_calls, simulate_collectives
from .fake_step import Trace
from .plotting import require_matplotlib
from .step_advice import Advice, Facts, find_step_advice
from .step_memory import KINDS, Sample, Timeline, estimate_memory
from .unit_bytes import Layout, ParamSize, Sharding

_DESCRIPTIONS = {
    "shards": "parameters on this rank, and buffers",
    "optimizer states": "and temporary memory of the optimizer's step",
    "gathered": "unsharded parameters and all-gather buffers",
    "gradients": "unsharded and sharded gradients, reduction buffers",
    "activations": "tensors that forward saves for backward",
}


@dataclass(frozen=True)
class UnitReport:
    """Sizes of one unit: the parameters that are gathered and reduced together.

    Sizes are bytes on this rank. ``gathers``, ``reduce_scatters`` and ``all_reduces`` count the
    collectives of one forward and one backward that reaches the unit. ``transient`` is the memory
    that the unit uses temporarily beyond its shards: the larger of unsharded parameters with gather
    buffer, and gradients with input and output of the reduction.
    """

    name: str
    modules: str
    parameters: int
    elements: int
    dtypes: str
    mesh: str
    shard_bytes: int
    gathers: int
    reduce_scatters: int
    all_reduces: int
    transient: int


@dataclass
class Explanation:
    """The result of :func:`fsdp_c.explain` and :func:`fsdp_c.plan`; ``str()`` formats it.

    Attributes:
        title: The title of the plot.
        units: One report for each unit.
        warnings: Likely configuration mistakes.
        timeline: Bytes by kind on this rank, over one step.
        received: Bytes that this rank receives in an optimizer step with all its microbatches, by
            process group: ``shard`` (all-gathers and reduce-scatters) and ``replicate``
            (all-reduces).
        changes: The configuration changes that lower the peak most, with the bytes that they save.
        advice: The configuration changes that avoid collectives or received bytes.
        optimizer: The optimizer's name, or empty.
        knows_optimizer: Whether ``timeline`` includes the optimizer's states.
        memory: The rank's memory in bytes; ``None`` if the caller did not pass it.
        knows_activations: Whether ``timeline`` includes activations: the caller passed a batch.
        kernels: The implementation that packs and unpacks, by device type; empty for a plan.
        buffers: Bytes of this process's CPU buffer cache: in use, and free for reuse
            (:func:`fsdp_c.release_memory`). ``None`` for a plan, and on other devices.
    """

    title: str = ""
    units: list[UnitReport] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    timeline: Timeline = field(default_factory=Timeline)
    received: dict[str, int] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    advice: list[Advice] = field(default_factory=list)
    optimizer: str = ""
    knows_optimizer: bool = False
    memory: int | None = None
    knows_activations: bool = False
    kernels: dict[str, str] = field(default_factory=dict)
    buffers: tuple[int, int] | None = None

    @property
    def peak(self) -> Sample:
        """The sample with the most memory: ``peak.total`` bytes, and the phase of the step."""
        return self.timeline.peak

    @property
    def fits(self) -> bool | None:
        """Whether the peak is at most ``memory``; ``None`` if that is unknown."""
        return None if self.memory is None else self.peak.total <= self.memory

    def plot(self, path: str | os.PathLike[str]) -> None:
        """Draws the memory of the step by kind, with the units as bands, to the file ``path``.

        Raises:
            ImportError: matplotlib is not installed.
        """
        from .memory_plot import plot_memory

        require_matplotlib()
        plot_memory(self.title, self.timeline, self.memory, path)

    def __str__(self) -> str:
        lines = [
            *_format_units(self.units),
            *_format_memory(self),
            *_format_network(self),
            *_format_fit_and_changes(self),
        ]
        lines += [f"packed on {device} by {kernels}" for device, kernels in self.kernels.items()]
        if self.buffers is not None:
            used, free = map(format_bytes, self.buffers)
            lines.append(f"buffers on the CPU: {used} in use, {free} kept for the next ones")
        lines += [f"advice: {advice}" for advice in self.advice]
        lines += [f"warning: {text}" for text in self.warnings]
        return "\n".join(lines)


def make_explanation(
    title: str,
    warnings: list[str],
    layout: Layout,
    sharding: Sharding,
    trace: Trace | None,
    optimizer: str,
    knows_optimizer: bool,
    memory: int | str | None,
    model: nn.Module,
    microbatches: int,
    ranks_per_node: int,
) -> Explanation:
    """Makes an ``Explanation`` from a layout and a trace.

    Without a trace, the step is synthetic and has no activations.
    """
    limit = None if memory is None else parse_bytes(memory)
    facts = Facts(model, layout, sharding, trace, microbatches, ranks_per_node, limit)
    cost = facts.measure()
    return Explanation(
        title=title,
        units=list(_make_unit_reports(layout, simulate_collectives(sharding))),
        warnings=warnings,
        timeline=estimate_memory(sharding, make_step_calls(sharding, trace)),
        received={"shard": cost.shard_traffic, "replicate": cost.replica_traffic},
        changes=find_changes(sharding, trace),
        advice=find_step_advice(facts),
        optimizer=optimizer,
        knows_optimizer=knows_optimizer,
        memory=limit,
        knows_activations=trace is not None,
    )


# ---- units ---------------------------------------------------------------------------------------


def _make_unit_reports(layout: Layout, collectives: list[Collectives]) -> Iterator[UnitReport]:
    for unit, modules, unit_collectives in zip(layout.units, layout.modules, collectives):
        params = unit.params
        all_gathers = unit_collectives.list_sizes("all_gather")
        reduce_scatters = unit_collectives.list_sizes("reduce_scatter")
        all_reduces = unit_collectives.list_sizes("all_reduce")
        yield UnitReport(
            name=_remove_wrapper_names(unit.name),
            modules=", ".join(_get_inner_class_name(module) for module in modules),
            parameters=len(params),
            elements=sum(param.numel for param in params),
            dtypes="; ".join(sorted({_format_dtypes(param) for param in params})),
            mesh=f"{unit.replicas}x{unit.world}" if unit.replicas > 1 else str(unit.world),
            shard_bytes=unit.shard_bytes,
            gathers=len(all_gathers),
            reduce_scatters=len(reduce_scatters),
            all_reduces=len(all_reduces),
            transient=unit.count_transient_bytes(reduce_scatters or all_reduces),
        )


def _remove_wrapper_names(name: str) -> str:
    parts = name.split(".")
    return ".".join(p for p in parts if p not in ("_checkpoint_wrapped_module", "_orig_mod"))


def _get_inner_class_name(module: Any) -> str:
    """Returns the class name of a module, or of the module inside a checkpoint wrapper."""
    inner = getattr(module, "_checkpoint_wrapped_module", None)
    return get_original_class(module if inner is None else inner).__name__


def _format_dtypes(param: ParamSize) -> str:
    kinds = (param.orig_dtype, param.compute_dtype, param.reduce_dtype)
    return "/".join(str(dtype).removeprefix("torch.") for dtype in kinds)


def combine_similar_units(units: list[UnitReport]) -> list[UnitReport]:
    """Combines neighboring units that differ only in one number of their names."""
    runs: list[list[UnitReport]] = []
    for unit in units:
        if runs and _can_extend_run(runs[-1], unit):
            runs[-1].append(unit)
        else:
            runs.append([unit])
    return [run[0] if len(run) == 1 else _merge_run(run) for run in runs]


def _split_numbers(name: str) -> tuple[str, list[int]]:
    """Returns ``name`` with ``#`` for each number, and the numbers."""
    return re.sub(r"\d+", "#", name), [int(number) for number in re.findall(r"\d+", name)]


def _can_extend_run(run: list[UnitReport], unit: UnitReport) -> bool:
    if replace(unit, name="") != replace(run[-1], name=""):
        return False
    last_pattern, last_numbers = _split_numbers(run[-1].name)
    pattern, numbers = _split_numbers(unit.name)
    steps = [b - a for a, b in zip(last_numbers, numbers)]
    if pattern != last_pattern or sorted(steps) != [0] * (len(steps) - 1) + [1]:
        return False
    # The same number must differ in all names of the run.
    _, first_numbers = _split_numbers(run[0].name)
    changing = steps.index(1)
    return len(run) == 1 or first_numbers[changing] != last_numbers[changing]


def _merge_run(run: list[UnitReport]) -> UnitReport:
    first, last = (re.findall(r"\d+", unit.name) for unit in (run[0], run[-1]))
    numbers = iter(a if a == b else f"{a}-{b}" for a, b in zip(first, last))
    name = re.sub(r"\d+", lambda _: next(numbers), run[0].name)
    return replace(run[0], name=name, modules=f"{len(run)} x {run[0].modules}")


def _format_units(units: list[UnitReport]) -> list[str]:
    header = "unit modules params elements dtypes mesh shard AG RS AR transient"
    rows = [tuple(header.split())]
    for unit in combine_similar_units(units):
        counts = (unit.gathers, unit.reduce_scatters, unit.all_reduces)
        rows.append(
            (
                unit.name,
                unit.modules,
                str(unit.parameters),
                f"{unit.elements:,}",
                unit.dtypes,
                unit.mesh,
                format_bytes(unit.shard_bytes),
                *map(str, counts),
                format_bytes(unit.transient),
            )
        )
    widths = [max(map(len, column)) for column in zip(*rows)]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]
    prefix = "each " if any(" x " in unit.modules for unit in combine_similar_units(units)) else ""
    return [
        *lines,
        f"({prefix}dtypes: stored/computed/reduced in; mesh: ranks to shard over, or replicas x "
        "ranks; AG, RS, AR: all-gathers, reduce-scatters and all-reduces of a step; transient: "
        "memory that the unit uses temporarily beyond its shard)",
    ]


# ---- a step --------------------------------------------------------------------------------------


def _format_memory(explanation: Explanation) -> Iterator[str]:
    peak = explanation.peak
    yield ""
    yield "memory on this rank, in one step   at the peak     at most"
    for kind, size in zip(KINDS, peak.bytes):
        if kind == "activations" and not explanation.knows_activations:
            yield f"  {kind:<31}{'unknown':>13}   pass a batch"
        elif kind == "optimizer states" and not explanation.knows_optimizer:
            remedy = (
                "call this after its first step" if explanation.optimizer else "pass the optimizer"
            )
            yield f"  {kind:<31}{'unknown':>13}   {remedy}"
        else:
            maximum = format_bytes(explanation.timeline.highest(kind))
            yield f"  {kind:<31}{format_bytes(size):>13}{maximum:>12}   {_DESCRIPTIONS[kind]}"
    yield f"the peak: {format_bytes(peak.total)}, in {peak}"


def _format_network(explanation: Explanation) -> Iterator[str]:
    parts = [
        f"{format_bytes(size)} in its {group} group"
        for group, size in explanation.received.items()
        if size
    ]
    if parts:
        yield f"the network: this rank receives {' and '.join(parts)} in a step"


def _format_fit_and_changes(explanation: Explanation) -> Iterator[str]:
    if explanation.memory is not None:
        headroom = explanation.memory - explanation.peak.total
        suffix = "" if explanation.knows_activations else ", without activations"
        if headroom >= 0:
            yield (
                f"it fits into {format_bytes(explanation.memory)}: "
                f"{format_bytes(headroom)} are left{suffix}"
            )
        else:
            memory, excess = format_bytes(explanation.memory), format_bytes(-headroom)
            yield f"it does not fit into {memory}: {excess} too much{suffix}"
    if explanation.changes:
        yield "changes that lower the peak most:"
    for change in explanation.changes:
        yield f"  {format_bytes(change.saves):>10}  {change.text}"


def parse_dtype(name: str) -> torch.dtype:
    """Returns the dtype with a name such as ``bfloat16`` or ``torch.bfloat16``.

    Raises:
        ValueError: torch has no dtype with that name.
    """
    dtype = getattr(torch, name.removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"torch has no dtype '{name}'")
    return dtype
