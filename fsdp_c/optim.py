"""Optimizer steps on shards: the same numbers without DTensor's cost.

An element-wise optimizer does to a sharded parameter what it does to the shard. torch's optimizers
hand their parameters, gradients and states on in lists; here these lists hold the local tensors.
States stay DTensors, with the same checkpoints, and bits are torch's.
"""

from __future__ import annotations

import functools
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.tensor import DTensor, Partial
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

import fsdp_c._C as _C

from .switches import is_on

Accelerated = TypeVar("Accelerated", bound=Optimizer)

ENVIRONMENT_SWITCH = "FSDP_C_OPTIM"
_ELEMENT_WISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.Adamax,
    torch.optim.Adadelta,
    torch.optim.Adagrad,
    torch.optim.RMSprop,
    torch.optim.Rprop,
    torch.optim.ASGD,
)


def accelerate(optimizer: Accelerated) -> Accelerated:
    """Makes the steps of ``optimizer`` run on the local tensors of its sharded parameters.

    For torch's element-wise optimizers, and for classes derived from one that leave ``step`` and
    ``_init_group`` alone; in place, once is enough. Parameters, states and their checkpoints are
    those of torch, bit for bit, in all of its implementations (``foreach``, ``fused``, neither);
    what torch would choose by itself for DTensors, it chooses here. Plain parameters in the same
    groups are as before. A group is left to torch in a step where something is not element-wise on
    shards: gradients or states that are laid out otherwise than their parameter, ``Partial``
    placements, ``differentiable=True``, a compiled step, a ``GradScaler``'s DTensor. With
    ``FSDP_C=1`` and after :func:`fsdp_c.install` this happens by itself (``FSDP_C_OPTIM=0``
    leaves it).

    Args:
        optimizer: over parameters that ``fully_shard`` has sharded, or other DTensors.

    Returns:
        ``optimizer``.

    Raises:
        TypeError: its step is not known to be element-wise (Adafactor, Muon, LBFGS, and classes
            that torch does not have).
    """
    kind = _element_wise_class(optimizer)
    if kind is None:
        raise TypeError(
            f"{type(optimizer).__name__} is not one of torch's element-wise optimizers: "
            + ", ".join(known.__name__ for known in _ELEMENT_WISE)
        )
    if optimizer not in _accelerated:
        _accelerated[optimizer] = _Acceleration(optimizer, kind)
    return optimizer


def restore(optimizer: Optimizer) -> None:
    """Undoes :func:`accelerate`; its states stay what they are."""
    acceleration = _accelerated.pop(optimizer, None)
    if acceleration is not None:
        acceleration.undo(optimizer)


def _element_wise_class(optimizer: Optimizer) -> type[Optimizer] | None:
    """The class of torch's whose step the optimizer has."""
    for kind in _ELEMENT_WISE:
        if (
            isinstance(optimizer, kind)
            and _plain(type(optimizer).step) is _plain(kind.step)
            and type(optimizer)._init_group is kind._init_group
        ):
            return kind
    return None


def _plain(function: Any) -> Any:
    """A step without the profiler's wrapping, which each class gets at its first instance."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


# ---- one optimizer -------------------------------------------------------------------------------


class _Acceleration:
    """What is put on an optimizer, and what one step of it has to put back."""

    def __init__(self, optimizer: Optimizer, kind: type[Optimizer]) -> None:
        self._keeps_buffers = kind is torch.optim.SGD
        self._init_group: Any = kind._init_group  # type: ignore[attr-defined]
        self._recipes = _Recipes()
        self._taken: list[tuple[torch.Tensor, DTensor]] = []
        self._undecided: list[dict[str, Any]] = []
        self._hooks = [
            optimizer.register_step_pre_hook(self._settle),
            optimizer.register_step_post_hook(self._settle),
            optimizer.register_state_dict_pre_hook(self._settle, prepend=True),
        ]
        # Hooks that were there before see what torch would have left.
        optimizer._optimizer_step_post_hooks.move_to_end(self._hooks[1].id, last=False)  # type: ignore[attr-defined]
        own = functools.partial(_init_group, weakref.ref(optimizer), weakref.ref(self))
        vars(optimizer)["_init_group"] = own

    def undo(self, optimizer: Optimizer) -> None:
        self._settle(optimizer)
        for hook in self._hooks:
            hook.remove()
        vars(optimizer).pop("_init_group", None)

    def fill(self, optimizer: Optimizer, group: dict[str, Any], lists: tuple[Any, ...]) -> Any:
        """torch's ``_init_group``, and then local tensors in place of DTensors.

        Once it is known which states torch puts into which list, both are done in one go.
        """
        is_torchs = _is_torchs(optimizer, group)
        recipe = None if is_torchs or any(lists) else self._recipes.find(optimizer, group)
        found = None if recipe is None else recipe.lists(optimizer, group)
        if recipe is not None and found is not None:
            result, params, local = recipe.result, found[0], found[1:]
        else:
            result = self._init_group(optimizer, group, *lists)
            made = None if is_torchs else _local_lists(lists)
            if made is None:
                return result
            params, local = lists[0], made
            self._recipes.learn(optimizer, group, lists, result)
        if self._keeps_buffers and group["momentum"] != 0:
            pairs = zip(local[0], params)
            self._taken += [(mine, p) for mine, p in pairs if mine is not p]
        if group.get("foreach") is None and not group.get("fused"):
            # torch looks at the classes of the parameters: DTensors go one by one.
            group["foreach"] = False
            self._undecided.append(group)
        for to, values in zip(lists, local, strict=True):
            to[:] = values
        return result

    def _settle(self, optimizer: Optimizer, *_: Any) -> None:
        """Restores the optimizer after a step, or before a checkpoint or step after a failed one.

        A compiled step changes nothing that this restores, so that tracing ends at the test."""
        if self._undecided or self._taken:
            self._restore_state(optimizer)

    def _restore_state(self, optimizer: Optimizer) -> None:
        for group in self._undecided:
            group["foreach"] = None
        self._undecided.clear()
        for local, param in self._taken:  # SGD stores momentum under what it had in its list
            buffer = optimizer.state.pop(local, {}).get("momentum_buffer")
            state = optimizer.state[param]
            kept = state.get("momentum_buffer")
            if buffer is None or not isinstance(kept, DTensor) or kept._local_tensor is not buffer:
                state["momentum_buffer"] = buffer if buffer is None else _like(param, buffer)
        self._taken.clear()


def _init_group(
    of: weakref.ref[Optimizer],
    acceleration: weakref.ref[_Acceleration],
    group: dict[str, Any],
    *lists: Any,
    **named: Any,
) -> Any:
    optimizer, mine = of(), acceleration()
    assert optimizer is not None and mine is not None
    return mine.fill(optimizer, group, (*lists, *named.values()))


def _is_torchs(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether this step is not one on shards alone."""
    scaling = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
    return (
        bool(group.get("differentiable"))
        or torch.compiler.is_compiling()
        or any(isinstance(tensor, DTensor) for tensor in scaling)
    )


_accelerated: weakref.WeakKeyDictionary[Optimizer, _Acceleration] = weakref.WeakKeyDictionary()


# ---- lists ---------------------------------------------------------------------------------------

_same: dict[int, tuple[Any, Any]] = {}
"""``id`` of a spec -> itself, and the spec of a parameter that it lays tensors out like."""
_SAME_MAX = 100_000


class _Recipe(NamedTuple):
    """How torch's ``_init_group`` makes a group's lists, where it changes nothing.

    Attributes:
        group: The group.
        options: :func:`_options` of it: what torch's code may ask for.
        keys: For each list after parameters and gradients its state's name; None: it stays empty.
        result: What torch's code returned.
    """

    group: dict[str, Any]
    options: list[Any]
    keys: tuple[str | None, ...]
    result: Any

    def lists(self, optimizer: Optimizer, group: dict[str, Any]) -> tuple[list[Any], ...] | None:
        """The parameters with gradients, and then all lists, of local tensors. None: a state is
        missing or laid out otherwise, or a tensor is sparse or complex."""
        return _C.local_group(group["params"], optimizer.state, self.keys, _seen(), _alike)


class _Recipes:
    """The recipes of an optimizer's groups."""

    def __init__(self) -> None:
        self._of: dict[int, _Recipe] = {}

    def find(self, optimizer: Optimizer, group: dict[str, Any]) -> _Recipe | None:
        """The group's, if it still is what was learned and nobody looks at what torch asks."""
        known = self._of.get(id(group))
        if known is None or known.group is not group or known.options != _options(group):
            return None
        states, params = optimizer.state, group.get("params")
        is_usual = type(states) in (dict, defaultdict) and type(params) is list
        return known if is_usual and torch._C._len_torch_function_stack() == 0 else None

    def learn(
        self, optimizer: Optimizer, group: dict[str, Any], lists: tuple[Any, ...], result: Any
    ) -> None:
        """From lists that torch has just made, states and all."""
        if len(self._of) > len(optimizer.param_groups):
            self._of.clear()  # groups that there are no more
        self._of.pop(id(group), None)
        if result not in (None, False, (False, False)):  # sparse or complex ones
            return
        states = [optimizer.state.get(param, {}) for param in lists[0]]
        keys = [_key_of(values, states) for values in lists[2:]]
        if _UNKNOWN not in keys:
            self._of[id(group)] = _Recipe(group, _options(group), tuple(keys), result)


_UNKNOWN = ""


def _key_of(values: list[Any], states: list[dict[str, Any]]) -> str | None:
    """Under which name all ``values`` are in the states; None: there are none."""
    if not values:
        return None
    names = [name for name, state in states[0].items() if state is values[0]]
    alike = len(names) == 1 and len(values) == len(states)
    if not alike or any(s.get(names[0]) is not v for s, v in zip(states, values)):
        return _UNKNOWN
    return names[0]


def _options(group: dict[str, Any]) -> list[Any]:
    """What an ``_init_group`` may decide by: names, flags, kinds of values, and which are zero."""
    return [
        (name, value if value is None or type(value) is bool else _kind(value))
        for name, value in group.items()
        if name != "params"
    ]


def _kind(value: Any) -> Any:
    return (type(value), value > 0, value < 0) if type(value) in (int, float) else type(value)


def _seen() -> dict[int, tuple[Any, Any]]:
    if len(_same) > _SAME_MAX:
        _same.clear()
    return _same


def _local_lists(lists: tuple[list[Any], ...]) -> tuple[list[Any], ...] | None:
    """The lists with local tensors for DTensors; None: there are none, or it would not be the same.

    A list has an item for each parameter, or is empty.
    """
    if not any(isinstance(param, DTensor) for param in lists[0]):
        return None
    return _C.local_lists(lists, _seen(), _alike)


def _alike(one: Any, other: Any) -> bool:
    """Whether equal elements have equal places in tensors of the two specs, without ``Partial``."""
    return (
        one.mesh == other.mesh
        and one.placements == other.placements
        and one.shape == other.shape
        and not any(isinstance(placement, Partial) for placement in one.placements)
    )


def _like(param: DTensor, local: torch.Tensor) -> DTensor:
    """A DTensor laid out as ``param``."""
    return DTensor(local, param._spec, requires_grad=False)


# ---- by itself -----------------------------------------------------------------------------------

_left: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Optimizers that cannot be accelerated."""


def accelerate_all() -> Callable[[], bool]:
    """Makes each optimizer that holds DTensors accelerated from its first step on.

    Returns:
        The undo, which also undoes every :func:`accelerate`.
    """
    is_wanted = is_on(ENVIRONMENT_SWITCH, "1")
    hooks = [register_optimizer_step_pre_hook(_before_step)] if is_wanted else []

    def undo() -> bool:
        for hook in hooks:
            hook.remove()
        restore_all()
        return True

    return undo


def restore_all() -> None:
    """Undoes every :func:`accelerate`."""
    _left.clear()
    for optimizer in list(_accelerated):
        restore(optimizer)


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # torch.compile traces hooks into a compiled step, which stays torch's: see _is_torchs().
    if torch.compiler.is_compiling() or optimizer in _accelerated or optimizer in _left:
        return
    params = (param for group in optimizer.param_groups for param in group["params"])
    if _element_wise_class(optimizer) is None or not any(isinstance(p, DTensor) for p in params):
        _left.add(optimizer)
    else:
        accelerate(optimizer)
