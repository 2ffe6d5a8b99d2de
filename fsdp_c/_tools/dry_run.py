"""Runs fsdp_c's C core on the sizes of a model: the events of one step, without memory and devices.

``fsdp_c._dry_run`` is the core of a training process, linked with functions that count bytes and
record events in place of torch's. The order of events is therefore that of a training step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from .. import _dry_run
from .._dry_run import Event
from .fake_step import Trace
from .unit_bytes import Sharding, UnitSizes

_HOOKS = ("pre_forward", "post_forward", "pre_backward", "post_backward")


class Call(NamedTuple):
    """A call of the dry run: a hook of a state, or an allocation of the model.

    Attributes:
        name: One of the names that ``_dry_run.run`` lists.
        arguments: Its arguments, which are integers.
        in_backward: For ``pre_forward``, whether it recomputes.
    """

    name: str
    arguments: tuple[int, ...] = ()
    in_backward: bool = False


def run(
    sharding: Sharding, calls: Iterable[Call], *, run: Callable[..., Any] = _dry_run.run
) -> list[Event]:
    """Runs the calls on the core and returns its events. ``run`` is for tests.

    Raises:
        ValueError: The sharding or a call is invalid. The message names the item.
    """
    units = [_describe_unit(unit) for unit in sharding.units]
    states = [
        {
            "root": state.root,
            "modules": state.modules,
            "forward_prefetch": state.forward_prefetch,
            "backward_prefetch": state.backward_prefetch,
        }
        for state in sharding.states
    ]
    arguments = [(call.name, *call.arguments) for call in calls]
    events, _ = run(units, states, arguments, streams=sharding.streams)
    found: list[Event] = events
    return found


def _describe_unit(unit: UnitSizes) -> dict[str, Any]:
    smaller = unit.reshard is not True and unit.reshard
    return {
        "state": unit.state,
        "world": unit.world,
        "replicas": unit.replicas,
        "post_forward_world": int(unit.reshard) if smaller else 0,
        "reduce": None if unit.reduce_dtype is None else str(unit.reduce_dtype),
        "bucket_bytes": unit.bucket_bytes,
        "reshard_after_forward": bool(unit.reshard),
        "unshard_in_backward": unit.regathers,
        "overlap": unit.overlaps,
        "offload": unit.offloads,
        "params": [
            {
                "name": param.name,
                "sizes": param.sizes,
                "dim": param.dim,
                "dtype": str(param.own),
                "compute": str(param.compute),
                "reduce": str(param.reduce),
                "trained": param.trained,
            }
            for param in unit.params
        ],
        **unit.settings,
    }


def step_calls(sharding: Sharding, trace: Trace | None, activations: float = 1.0) -> list[Call]:
    """Returns the calls of one step.

    Args:
        sharding: The units of the model.
        trace: The events of a step on fake tensors. Storages that are in use at its end are freed
            by the last calls. ``None``: all units run in order, and the model has no activations.
        activations: Scales the model's own allocations, but not its gradients.
    """
    return (
        synthetic_calls(sharding) if trace is None else _traced_calls(sharding, trace, activations)
    )


def _traced_calls(sharding: Sharding, trace: Trace, activations: float) -> list[Call]:
    calls: list[Call] = []
    alive: dict[int, int] = {}  # storage -> bytes
    left = _bytes_beside_gradients(trace)
    for what, which, value in trace.events:
        if what == "alloc":
            alive[which] = value
            calls.append(Call(what, (which, int(value * activations))))
        elif what == "free":
            alive.pop(which, None)
            calls.append(Call(what, (which,)))
        elif what == "grad":
            unit, index, _ = value
            param = sharding.units[unit].params[index]
            size = param.numel * param.compute.itemsize
            storage = which if alive.pop(which, None) is not None else -1
            if storage >= 0:
                size += left[storage]
            calls.append(Call("gradient", (unit, index, storage, size)))
        elif what in _HOOKS:
            calls.append(Call(what, (which,), value is True))
        else:
            calls.append(Call(what))
    return [*calls, *(Call("free", (storage,)) for storage in alive)]


def _bytes_beside_gradients(trace: Trace) -> Counter[int]:
    """Returns the bytes of each gradient's storage that belong to no gradient.

    A gradient may be a view, and gradients may share a storage.
    """
    sizes = {which: value for what, which, value in trace.events if what == "alloc"}
    gradients = {
        (which, *value[:2]): value[2] for what, which, value in trace.events if what == "grad"
    }
    left: Counter[int] = Counter()
    for (storage, *_), size in gradients.items():
        left[storage] -= size
    return Counter({s: max(0, sizes.get(s, 0) + left[s]) for s in left})


def synthetic_calls(sharding: Sharding) -> list[Call]:
    """Returns the calls of a step in which all units run in order, and in reverse in backward.

    The first root contains all other states. The model has no activations.
    """
    calls = [Call("pre_forward", (0,))]
    inner = range(1, len(sharding.states))
    for state in inner:
        calls += [Call("pre_forward", (state,)), Call("post_forward", (state,))]
    calls += [Call("post_forward", (0,)), Call("backward"), Call("pre_backward", (0,))]
    for state in [*reversed(inner), 0]:
        if state != 0:
            calls.append(Call("pre_backward", (state,)))
        for place, unit in reversed([*enumerate(sharding.units)]):
            if unit.state == state:
                calls += _gradients(place, unit)
        calls.append(Call("post_backward", (state,)))
    return [*calls, Call("end")]


def _gradients(place: int, unit: UnitSizes) -> Iterable[Call]:
    for index, param in reversed([*enumerate(unit.params)]):
        if param.trained:
            size = param.numel * param.compute.itemsize
            yield Call("gradient", (place, index, -1, size))


class Collectives:
    """The collectives that one unit issues in a step: ``all_gather`` and other kinds."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._events = list(events)

    def sizes(self, kind: str) -> list[int]:
        """Returns the bytes of each buffer that all ranks fill or reduce together, in order."""
        return [event.bytes for event in self._events if event.kind == kind]


def collectives_of(sharding: Sharding) -> list[Collectives]:
    """Returns the collectives of each unit in one forward and one backward that reaches all."""
    events = run(sharding, synthetic_calls(sharding))
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    issued: list[list[Event]] = [[] for _ in sharding.units]
    for event in events:
        if event.kind in kinds:
            issued[event.unit].append(event)
    return [*map(Collectives, issued)]
