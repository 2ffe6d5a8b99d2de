"""Traces of one training step: of the core under torch's profiler, and of the dry run.

Both are lists of items in order: ``enter`` and ``leave`` (label and unit of a profiler range of the
core), collectives (bytes), ``alloc`` and ``free`` (bytes) inside of such a range. The profiler
records the memory of the whole process, so only events inside of the core's ranges are compared.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from garbage_collection import no_garbage_collection
from torch._C._profiler import _EventType, _ExperimentalConfig
from torch.profiler import ProfilerActivity, profile

from fsdp_c import _dry_run
from fsdp_c._dry_run import Event
from fsdp_c._runtime import fsdp_units
from fsdp_c._tools import dry_run, unit_bytes
from fsdp_c.explain import record_step

Item = tuple[Any, ...]
_COLLECTIVES = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
}
_RANGE = re.compile(r"FSDP::(\w+)(?: \((.*)\)| for (.*))?$")
_HOOK_RANGES = {"cast_forward_inputs", "cast_forward_outputs"}
"""Ranges of the hooks around the core. The dry run has no casts of inputs and outputs."""


# ---- the core ------------------------------------------------------------------------------------


def trace_core(step: Callable[[], object]) -> list[Item]:
    """Runs ``step`` under torch's profiler and returns the items of the core.

    The garbage collector is off: it would free memory of other tests inside of the core's ranges.
    """
    config = _ExperimentalConfig(verbose=True)
    activities = [ProfilerActivity.CPU]
    with (
        no_garbage_collection(),
        profile(
            activities=activities,
            profile_memory=True,
            record_shapes=True,
            experimental_config=config,
        ) as profiler,
    ):
        step()
    roots = profiler.profiler.kineto_results.experimental_event_tree()
    return [item for root in _in_order(roots) for item in _items(root, None)]


def _in_order(events: list[Any]) -> list[Any]:
    return sorted(events, key=lambda event: event.start_time_ns)


def _items(event: Any, inside: str | None) -> Iterator[Item]:
    """Yields the items of an event. ``inside``: label of the core's innermost range, or None."""
    match = _RANGE.match(event.name)
    label = match[1] if match else inside
    compared = label is not None and label not in _HOOK_RANGES
    unit = (match[2] or match[3] or "") if match else ""
    if match and compared:
        yield "enter", label, "" if unit == "None" else unit
    elif event.tag == _EventType.Allocation and compared:
        size = event.extra_fields.alloc_size
        yield ("alloc", size) if size > 0 else ("free", -size)
    elif event.name in _COLLECTIVES and compared:
        yield _COLLECTIVES[event.name], _largest_input(event)
    for child in _in_order(event.children):
        yield from _items(child, label)
    if match and compared:
        yield "leave", label, "" if unit == "None" else unit


def _largest_input(event: Any) -> int:
    """Returns the bytes of the largest tensor argument of an operator."""
    found = [0]

    def visit(value: Any) -> None:
        if isinstance(value, (list, tuple)):
            for item in value:
                visit(item)
        elif hasattr(value, "sizes") and hasattr(value, "dtype"):
            size = value.dtype.itemsize
            for length in value.sizes:
                size *= length
            found.append(size)

    visit(event.extra_fields.inputs)
    return max(found)


# ---- the dry run ---------------------------------------------------------------------------------


def run_dry(model: Any, batch: Any, run: Callable[..., Any] = _dry_run.run) -> list[Event]:
    """Returns the events of the second of two dry steps of a sharded model.

    ``run`` replaces ``fsdp_c._dry_run.run``.
    """
    layout = unit_bytes.make_sharded_layout(model)
    sharding = unit_bytes.Sharding(units=tuple(layout.units), states=tuple(layout.states))
    step = dry_run.make_step_calls(
        sharding, record_step(model, layout, batch, lambda output: output.sum())
    )
    calls = [*step, dry_run.Call("zero_grad"), *step]
    events = dry_run.run(sharding, calls, core=run)
    return [event for event in events if event.call > len(step)]


def trace_events(events: list[Event], model: Any) -> list[Item]:
    """Returns the items of a dry run of ``model``, which is initialized."""
    names = [group._module_fqn or "" for _, _, group in fsdp_units.iterate_groups(model)]
    return [*_dry_items(events, names)]


def _dry_items(events: list[Event], names: list[str]) -> Iterator[Item]:
    depth = 0
    for event in events:
        if event.kind in ("enter", "leave"):
            depth += 1 if event.kind == "enter" else -1
            yield event.kind, event.label, names[event.unit] if event.unit >= 0 else ""
        elif event.kind in ("alloc", "free"):
            if depth > 0 and event.label != "host":
                yield event.kind, event.bytes
        elif event.kind in _COLLECTIVES.values():
            yield event.kind, event.bytes


def first_difference(core: list[Item], dry: list[Item]) -> str:
    """Describes the first item that differs; empty if the traces are equal."""
    for index in range(max(len(core), len(dry))):
        if core[index : index + 1] != dry[index : index + 1]:
            before = core[max(0, index - 4) : index]
            return (
                f"item {index} differs after {before}: the core has {core[index : index + 3]}, "
                f"the dry run {dry[index : index + 3]}"
            )
    return ""


def make_step(model: Any, batch: torch.Tensor) -> Callable[[], None]:
    """Returns a function that runs one forward and backward of the model."""

    def step() -> None:
        model(batch).sum().backward()

    return step
