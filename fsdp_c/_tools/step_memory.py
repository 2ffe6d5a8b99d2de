"""Computes the memory of one step over time, from the events of a dry run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .._dry_run import Event
from . import dry_run
from .dry_run import Call
from .unit_bytes import Sharding

KINDS = ("shards", "optimizer states", "gathered", "gradients", "activations")
"""The kinds of memory, in this order:

Sharded parameters and buffers; optimizer states; unsharded parameters and all-gather buffers;
unsharded and sharded gradients and reduction buffers; tensors that forward saves for backward.
"""


class Sample(NamedTuple):
    """Bytes by kind (in the order of :data:`KINDS`) at one moment, and the phase of the step."""

    phase: str
    unit: str
    bytes: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.bytes)

    def __str__(self) -> str:
        return f"{self.phase} '{self.unit}'" if self.unit else self.phase


@dataclass
class Timeline:
    """The memory of one step."""

    samples: list[Sample] = field(default_factory=list)

    @property
    def peak(self) -> Sample:
        return max(self.samples, key=lambda sample: sample.total)

    def highest(self, kind: str) -> int:
        """Returns the largest number of bytes of one kind during the step."""
        index = KINDS.index(kind)
        return max(sample.bytes[index] for sample in self.samples)


BEFORE = "before the step"  # the phase of the samples of initial memory


def estimate_memory(sharding: Sharding, calls: Sequence[Call]) -> Timeline:
    """Computes the memory of the step that consists of ``calls``."""
    events = dry_run.run(sharding, calls)
    return Timeline([*_iterate_samples(sharding, calls, events)])


def _iterate_samples(
    sharding: Sharding, calls: Sequence[Call], events: list[Event]
) -> Iterator[Sample]:
    live = dict.fromkeys(KINDS, 0)
    phases = _find_phases(sharding, calls)

    def sample(phase: str, unit: str = "") -> Sample:
        return Sample(phase, unit, tuple(live.values()))

    changes = [e for e in events if e.kind in ("alloc", "free") and e.label in live]
    initial_changes = [event for event in changes if event.call < 0]
    for event in initial_changes:
        live["shards"] = event.live
        yield sample(BEFORE)
    live["shards"] += sharding.buffer_bytes
    yield sample(BEFORE)
    live["optimizer states"] = 0 if sharding.offloads else sharding.optimizer_bytes
    yield sample(BEFORE)
    for event in changes[len(initial_changes) :]:
        assert event.label is not None
        live[event.label] = event.live
        phase, unit = phases[event.call]
        if calls[event.call].name == "end" and event.unit >= 0:
            # The end of backward finishes reductions of several units: the event names the unit.
            phase, unit = "reduction of", sharding.units[event.unit].name
        yield sample(phase, unit)
    if not sharding.offloads and sharding.step_bytes:
        live["optimizer states"] += sharding.step_bytes
        yield sample(_STEP)
        live["optimizer states"] -= sharding.step_bytes
        yield sample(_STEP)


_STEP = "optimizer.step"
_PHASES = {
    "pre_forward": "forward of",
    "pre_backward": "backward of",
    "post_backward": "reduction of",
}


def _find_phases(sharding: Sharding, calls: Sequence[Call]) -> list[tuple[str, str]]:
    """Returns the phase of the step and the unit's name for each call."""
    unit_names: dict[int, str] = {}  # by state
    for unit in sharding.units:
        unit_names.setdefault(unit.state, unit.name)
    phases = []
    current = (BEFORE, "")
    for call in calls:
        if call.name == "backward":
            current = ("backward of the loss", "")
        elif call.name in _PHASES and not call.in_backward and call.arguments[0] in unit_names:
            current = (_PHASES[call.name], unit_names[call.arguments[0]])
        phases.append(current)
        if call.name == "end":
            current = (_STEP, "")
    return phases
