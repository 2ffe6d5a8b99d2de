"""Runs fsdp_c's C core on the sizes of a model, without tensors, devices or ranks.

``fsdp_c._dry_run`` is the same core as ``fsdp_c._C``, linked with functions that count bytes and
record events instead of calling torch. The order of events therefore equals a training step's.
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
        arguments: Integers, as ``_dry_run.run`` expects them.
        in_backward: For ``pre_forward``: whether the forward is a recomputation in backward.
    """

    name: str
    arguments: tuple[int, ...] = ()
    in_backward: bool = False


def run(
    sharding: Sharding, calls: Iterable[Call], *, core: Callable[..., Any] = _dry_run.run
) -> list[Event]:
    """Runs the calls with the code of csrc/core. Returns the events. Tests replace ``core``.

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
    events, _ = core(units, states, arguments, streams=sharding.streams)
    recorded: list[Event] = events
    return recorded


def _describe_unit(unit: UnitSizes) -> dict[str, Any]:
    return {
        "state": unit.state,
        "world": unit.world,
        "replicas": unit.replicas,
        "post_forward_world": 0 if isinstance(unit.reshard, bool) else unit.reshard,
        "reduce": None if unit.reduce_dtype is None else str(unit.reduce_dtype),
        "bucket_bytes": unit.bucket_bytes,
        "reshard_after_forward": bool(unit.reshard),
        "unshard_in_backward": unit.unshard_in_backward,
        "overlap": unit.overlaps,
        "offload": unit.offloads,
        "params": [
            {
                "name": param.name,
                "sizes": param.sizes,
                "dim": param.dim,
                "dtype": str(param.orig_dtype),
                "compute": str(param.compute_dtype),
                "reduce": str(param.reduce_dtype),
                "requires_grad": param.requires_grad,
            }
            for param in unit.params
        ],
        **unit.settings,
    }


def make_step_calls(
    sharding: Sharding, trace: Trace | None, activations: float = 1.0
) -> list[Call]:
    """Returns the calls of one step.

    Args:
        sharding: The units of the model.
        trace: The events of a step on fake tensors. Storages that are in use at its end are freed
            by the last calls. ``None``: all units run in order, and the model has no activations.
        activations: Scales the allocations that the model makes, but not its gradients.
    """
    return (
        make_synthetic_calls(sharding)
        if trace is None
        else _make_traced_calls(sharding, trace, activations)
    )


def _make_traced_calls(sharding: Sharding, trace: Trace, activations: float) -> list[Call]:
    calls: list[Call] = []
    live_storages: dict[int, int] = {}  # storage -> bytes
    outside_gradients = _count_bytes_outside_gradients(trace)
    for name, number, value in trace.events:
        if name == "alloc":
            live_storages[number] = value
            calls.append(Call(name, (number, int(value * activations))))
        elif name == "free":
            live_storages.pop(number, None)
            calls.append(Call(name, (number,)))
        elif name == "grad":
            unit, index, _ = value
            param = sharding.units[unit].params[index]
            size = param.numel * param.compute_dtype.itemsize
            storage = number if live_storages.pop(number, None) is not None else -1
            if storage >= 0:
                size += outside_gradients[storage]
            calls.append(Call("gradient", (unit, index, storage, size)))
        elif name in _HOOKS:
            calls.append(Call(name, (number,), value is True))
        else:
            calls.append(Call(name))
    return [*calls, *(Call("free", (storage,)) for storage in live_storages)]


def _count_bytes_outside_gradients(trace: Trace) -> Counter[int]:
    """Returns, for each storage that contains gradients, the bytes that belong to no gradient.

    A gradient may be a view, and gradients may share a storage.
    """
    sizes = {number: value for name, number, value in trace.events if name == "alloc"}
    gradients = {
        (number, *value[:2]): value[2] for name, number, value in trace.events if name == "grad"
    }
    outside_gradients: Counter[int] = Counter()
    for (storage, *_), size in gradients.items():
        outside_gradients[storage] -= size
    return Counter({s: max(0, sizes.get(s, 0) + outside_gradients[s]) for s in outside_gradients})


def make_synthetic_calls(sharding: Sharding) -> list[Call]:
    """Returns the calls of a step in which all units run in order, and in reverse in backward.

    The first root contains all other states. The model has no activations.
    """
    calls = [Call("pre_forward", (0,))]
    inner_states = range(1, len(sharding.states))
    for state in inner_states:
        calls += [Call("pre_forward", (state,)), Call("post_forward", (state,))]
    calls += [Call("post_forward", (0,)), Call("backward"), Call("pre_backward", (0,))]
    for state in [*reversed(inner_states), 0]:
        if state != 0:
            calls.append(Call("pre_backward", (state,)))
        for unit_index, unit in reversed([*enumerate(sharding.units)]):
            if unit.state == state:
                calls += _make_gradient_calls(unit_index, unit)
        calls.append(Call("post_backward", (state,)))
    return [*calls, Call("end")]


def _make_gradient_calls(unit_index: int, unit: UnitSizes) -> Iterable[Call]:
    for index, param in reversed([*enumerate(unit.params)]):
        if param.requires_grad:
            size = param.numel * param.compute_dtype.itemsize
            yield Call("gradient", (unit_index, index, -1, size))


class Collectives:
    """The collectives that one unit issues in a step.

    Kinds: ``all_gather``, ``reduce_scatter`` and ``all_reduce``.
    """

    def __init__(self, events: Iterable[Event]) -> None:
        self._events = list(events)

    def list_sizes(self, kind: str) -> list[int]:
        """Returns the unsharded bytes of each collective of one kind, in order."""
        return [event.bytes for event in self._events if event.kind == kind]


def simulate_collectives(sharding: Sharding) -> list[Collectives]:
    """Returns the collectives that each unit issues in one forward and backward of all units."""
    events = run(sharding, make_synthetic_calls(sharding))
    kinds = ("all_gather", "reduce_scatter", "all_reduce")
    events_by_unit: list[list[Event]] = [[] for _ in sharding.units]
    for event in events:
        if event.kind in kinds:
            events_by_unit[event.unit].append(event)
    return [*map(Collectives, events_by_unit)]
