"""Forecast of the memory of a sharded model's step.

A :class:`Sharding` lists the units, and a trace has the model's own events. The replay allocates
and frees sizes in the order of ``csrc/core`` (gather.c, group.c, reduce.c), and sums them by kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

from .fake_step import Event, Trace

KINDS = ("shards", "states", "gathered", "gradients", "activations")
"""The kinds of memory, in this order:

Sharded parameters and buffers; optimizer states; unsharded parameters and all-gather buffers;
unsharded and sharded gradients and reduction buffers; tensors that forward saves for backward.
"""


@dataclass(frozen=True)
class UnitSizes:
    """One unit, in bytes on this rank.

    Attributes:
        name: The unit's name from the root; ``(root)`` for the root's unit.
        pieces: The pieces of the trace that form the unit.
        world: The number of ranks that the unit is sharded over.
        replicas: The number of ranks that its shards are replicated over.
        shard: Sharded parameters, with padding.
        gathered: Unsharded parameters in the compute dtype, with padding. 0 if one rank uses its
            shards without a cast.
        rows: Unsharded gradients in the reduce dtype, with padding.
        gradient: Sharded gradients in the dtype of the parameters.
        whole_gradients: Unsharded gradients as backward makes them, without padding.
        casts: Whether the reduce dtype differs from the parameters' dtype.
        reshard: Whether parameters are freed after forward, or the number of ranks to reshard to.
        offloads: Whether shards, gradients and states are in CPU memory.
        regathers: Whether backward gathers parameters that were freed after forward.
        buckets: The bytes of each reduction, in order. They only serve as proportions for
            ``rows`` and ``whole_gradients``.
    """

    name: str
    pieces: tuple[int, ...]
    world: int
    replicas: int
    shard: int
    gathered: int
    rows: int
    gradient: int
    whole_gradients: int
    casts: bool
    reshard: bool | int
    offloads: bool = False
    regathers: bool = True
    buckets: tuple[int, ...] = (1,)

    def dealt(self, size: int) -> list[int]:
        """Splits ``size`` bytes in the proportions of the buckets."""
        whole, ends = sum(self.buckets), [0]
        for bucket in self.buckets:
            ends.append(ends[-1] + bucket)
        return [size * b // whole - size * a // whole for a, b in pairwise(ends)]

    @property
    def gathers(self) -> int:
        """The number of all-gathers of a forward and a backward."""
        if self.world == 1:
            return 0
        return 2 if self.reshard is not False and self.regathers else 1

    @property
    def row(self) -> int:
        """The bytes of the unit's reduce-scatter outputs on this rank."""
        return self.rows // self.world

    @property
    def peak(self) -> int:
        """The most bytes that the unit uses beyond its shards, while gathering or reducing."""
        buffer = self.gathered if self.world > 1 else 0
        return max(self.gathered + buffer, self._reducing)

    @property
    def _reducing(self) -> int:
        """The most bytes during the reductions.

        They are the gradients that are not packed yet, the inputs of two buckets, and all outputs.
        """
        most, left, before, reduced = 0, self.whole_gradients, 0, 0
        for rows, whole in zip(self.dealt(self.rows), self.dealt(self.whole_gradients)):
            reduced += rows // self.world if self.world > 1 else 0
            most = max(most, left + before + rows + reduced)
            left, before = left - whole, rows
        return most


@dataclass(frozen=True)
class Sharding:
    """The units of a model, and its memory outside of units.

    Attributes:
        units: The units in module order, including the root's.
        buffers: Bytes of buffers and ignored parameters.
        states: Bytes of optimizer states on this rank.
        step: Bytes that the optimizer's step allocates temporarily.
        overlap: Whether reductions overlap with backward (devices with streams).
        streams: Whether the device has streams. An all-gather buffer is then kept until the next.
    """

    units: tuple[UnitSizes, ...]
    buffers: int = 0
    states: int = 0
    step: int = 0
    overlap: bool = False
    streams: bool = False

    @property
    def offloads(self) -> bool:
        return any(unit.offloads for unit in self.units)


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
        """The most bytes of one kind at any time."""
        place = KINDS.index(kind)
        return max(sample.bytes[place] for sample in self.samples)


BEFORE = "before the step"  # the phase of samples that add up the initial memory


def synthetic(sharding: Sharding) -> Trace:
    """Returns a trace in which all units run in order in forward and in reverse in backward."""
    trace = Trace()
    inner = [number for unit in sharding.units[1:] for number in unit.pieces[:1]]
    root = sharding.units[0].pieces[0] if sharding.units else -1
    sizes = {unit.pieces[0]: unit.whole_gradients for unit in sharding.units}
    trace.note("pre_forward", root, False)
    for number in inner:
        trace.note("pre_forward", number, False)
        trace.note("post_forward", number, ())
    trace.note("post_forward", root, ())
    trace.note("backward")
    trace.note("pre_backward", root)
    for number in [*inner[::-1], root]:
        if number != root:
            trace.note("pre_backward", number)
        trace.note("alloc", number, sizes[number])
        trace.note("grad", number, number)
        trace.note("post_backward", number)
    trace.note("end")
    return trace


def forecast(sharding: Sharding, trace: Trace, activations: float = 1.0) -> Timeline:
    """Computes the memory of a step. ``activations`` scales the model's own allocations."""
    replay = _Replay(sharding, activations)
    for event in trace.events:
        replay.take(event)
    replay.finish()
    return replay.timeline


_TRANSITIONS = ("pre_forward", "post_forward", "pre_backward", "post_backward")


class _Replay:
    """The state of the replay of one step."""

    def __init__(self, sharding: Sharding, activations: float) -> None:
        self.sharding = sharding
        self.factor = activations
        self.timeline = Timeline()
        self.bytes = dict.fromkeys(KINDS, 0)
        self.units_of: dict[int, list[UnitSizes]] = {}
        for unit in sharding.units:
            self.units_of.setdefault(unit.pieces[0], []).append(unit)
        # A piece without a unit of its own belongs to the unit that lists it.
        self.owner = {p: unit for unit in sharding.units[::-1] for p in unit.pieces}
        self.alive: dict[int, tuple[str, int]] = {}  # storage -> kind, bytes
        self.whole: dict[int, int] = {}  # storage -> bytes, without the factor
        self.grads: dict[str, dict[int, None]] = {unit.name: {} for unit in sharding.units}
        self.state = {unit.name: "sharded" for unit in sharding.units}
        self.order: list[UnitSizes] = []
        self.positions: dict[str, list[int]] = {unit.name: [] for unit in sharding.units}
        self.done: set[str] = set()
        self.entered: dict[str, UnitSizes] = {}
        self.kept_buffer = 0
        self.in_flight = 0
        self.phase, self.unit = BEFORE, ""
        for unit in sharding.units:
            self.add("shards", 0 if unit.offloads else unit.shard)
        self.add("shards", sharding.buffers)
        self.add("states", 0 if sharding.offloads else sharding.states)

    def add(self, kind: str, size: int) -> None:
        if size:
            self.bytes[kind] += size
            sample = Sample(self.phase, self.unit, tuple(self.bytes.values()))
            self.timeline.samples.append(sample)

    def at(self, phase: str, unit: UnitSizes) -> None:
        self.phase, self.unit = phase, unit.name

    # ---- the model's own memory ----

    def take(self, event: Event) -> None:
        what, which, value = event
        if what == "alloc":
            size = int(value * self.factor)
            self.alive[which] = ("activations", size)
            self.whole[which] = value
            self.add("activations", size)
        elif what == "free":
            kind, size = self.alive.pop(which, ("activations", 0))
            self.add(kind, -size)
        elif what == "grad":
            self.becomes_gradient(which, value)
        elif what == "backward":
            self.phase, self.unit = "backward of the loss", ""
        elif what == "end":
            self.end()
        for unit in self.units_of.get(which, ()) if what in _TRANSITIONS else ():
            getattr(self, what)(unit, value)

    def becomes_gradient(self, storage: int, piece: int) -> None:
        kind, size = self.alive.get(storage, ("", 0))
        owner = self.owner.get(piece)
        if kind != "activations" or owner is None:
            return
        self.bytes["activations"] -= size
        self.alive[storage] = ("gradients", self.whole[storage])
        self.add("gradients", self.whole[storage])
        self.grads[owner.name][storage] = None

    # ---- gathering ----

    def start(self, unit: UnitSizes) -> None:
        if self.state[unit.name] in ("sharded", "post_forward"):
            if unit.world > 1:
                self.add("gathered", unit.gathered)
            self.state[unit.name] += " gathering"

    def wait(self, unit: UnitSizes, forward: bool) -> None:
        if not self.state[unit.name].endswith("gathering"):
            return
        if forward:
            self.add("gathered", -self.kept_buffer)
            self.kept_buffer = 0
        self.add("gathered", unit.gathered)
        if self.state[unit.name].startswith("post_forward"):
            self.add("gathered", -(unit.gathered // int(unit.reshard)))
        buffer = unit.gathered if unit.world > 1 else 0
        if forward and self.sharding.streams:
            self.kept_buffer = buffer
        else:
            self.add("gathered", -buffer)
        self.state[unit.name] = "unsharded"

    def free(self, unit: UnitSizes) -> None:
        if self.state[unit.name] == "unsharded":
            self.add("gathered", -unit.gathered)
            self.state[unit.name] = "sharded"

    def pre_forward(self, unit: UnitSizes, in_backward: bool) -> None:
        if not in_backward:
            self.at("forward of", unit)
        self.entered.setdefault(unit.name, unit)
        self.start(unit)
        self.wait(unit, forward=True)

    def post_forward(self, unit: UnitSizes, outputs: tuple[int, ...]) -> None:
        if not self.phase.startswith("forward"):
            return  # a recomputation
        if unit.reshard is True:
            self.free(unit)
        elif unit.reshard:
            self.add("gathered", unit.gathered // unit.reshard)
            self.free(unit)
            self.state[unit.name] = "post_forward"
        self.positions[unit.name].append(len(self.order))
        self.order.append(unit)

    def pre_backward(self, unit: UnitSizes, _: object) -> None:
        self.at("backward of", unit)
        if unit.regathers:
            self.start(unit)
        self.wait(unit, forward=False)
        if self.positions[unit.name]:
            position = self.positions[unit.name].pop()
            if position > 0 and self.order[position - 1].regathers:
                self.start(self.order[position - 1])

    # ---- reducing ----

    def post_backward(self, unit: UnitSizes, _: object) -> None:
        if unit.name in self.done:
            return
        self.at("reduction of", unit)
        if self.state[unit.name] == "unsharded":
            self.free(unit)
        storages = self.grads[unit.name]
        if not storages and not unit.rows:
            return
        self.add("gradients", -self.in_flight)
        self.in_flight = 0
        if storages:
            self.done.add(unit.name)
            self.reduce(unit, storages)

    def reduce(self, unit: UnitSizes, storages: dict[int, None]) -> None:
        wholes, gradients = unit.dealt(unit.whole_gradients), unit.dealt(unit.gradient)
        packed = 0
        for index, rows in enumerate(unit.dealt(unit.rows)):
            last = index + 1 == len(unit.buckets)
            self.add("gradients", rows)
            packed += wholes[index]
            while storages and (last or packed > 0):  # in the order of their creation
                kind, size = self.alive.pop(storage := next(iter(storages)), ("gradients", 0))
                del storages[storage]
                self.add(kind, -size)
                packed -= size
            self.finish_reduction(unit, rows, gradients[index])

    def finish_reduction(self, unit: UnitSizes, rows: int, gradient: int) -> None:
        """Adds the sharded gradients of one reduction and frees its input.

        With overlap, the input is kept until the next reduction starts.
        """
        row = rows // unit.world
        if unit.world > 1:
            self.add("gradients", row)
        if unit.casts:
            self.add("gradients", gradient)
            self.add("gradients", -row if unit.world > 1 else 0)
        if unit.offloads:
            self.add("gradients", -gradient)
        kept = unit.world == 1 and not unit.casts
        if self.sharding.overlap and not kept:
            self.add("gradients", -self.in_flight)
            self.in_flight = rows
        else:
            self.add("gradients", 0 if kept else -rows)

    # ---- the end ----

    def end(self) -> None:
        for unit in [*self.entered.values()][::-1]:
            if unit.name not in self.done:
                self.post_backward(unit, None)
        self.add("gradients", -self.in_flight)
        self.add("gathered", -self.kept_buffer)
        self.in_flight = self.kept_buffer = 0

    def finish(self) -> None:
        self.phase, self.unit = "optimizer.step", ""
        for kind, size in self.alive.values():
            self.add(kind, -size)
        self.alive.clear()
        step = 0 if self.sharding.offloads else self.sharding.step
        self.add("states", step)
        self.add("states", -step)


def merged(units: Iterable[UnitSizes], **changes: object) -> tuple[UnitSizes, ...]:
    """Returns the units with the fields ``changes`` replaced in each."""
    return tuple(replace(unit, **changes) for unit in units)  # type: ignore[arg-type]
