"""Optimizer steps on local tensors, without the overhead of DTensor dispatch.

An element-wise optimizer can update each shard separately. torch's optimizers pass parameters,
gradients and states in lists, which ``_init_group`` fills. fsdp_c's ``_init_group`` fills the lists
with local tensors. States stay DTensors, checkpoints are unchanged, and results equal torch's bits.
"""

from __future__ import annotations

import functools
import numbers
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import torch
from torch.distributed.tensor import DTensor, Partial
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

import fsdp_c._C as _C

from ._runtime.env import is_env_enabled

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
_SWITCHES = ("amsgrad", "capturable", "centered", "foreach", "fused", "momentum")
"""Options of which ``_init_group`` reads only the truth value."""


def accelerate(optimizer: Accelerated) -> Accelerated:
    """Makes the steps of ``optimizer`` run on the local tensors of its sharded parameters.

    Supports torch's element-wise optimizers, and subclasses that do not override ``step`` or
    ``_init_group``. Changes ``optimizer`` in place; a second call has no effect. Parameters, states
    and checkpoints equal torch's bits in all implementations (``foreach``, ``fused``, neither). The
    default implementation is the one that torch chooses for DTensors. Plain parameters in the same
    groups are updated as before.

    torch's code runs for a group whose step is not element-wise on shards. Examples are gradients
    or states with other placements than their parameter, and ``Partial`` placements. Other examples
    are ``differentiable=True``, a compiled step, a ``GradScaler`` with DTensors, and an
    ``_init_group`` in the attributes of the optimizer object.

    With ``FSDP_C=1`` and after :func:`fsdp_c.install`, each supported optimizer with DTensors is
    accelerated at its first step, unless ``FSDP_C_OPTIM=0`` is set.

    Args:
        optimizer: An optimizer of parameters that ``fully_shard`` sharded, or of other DTensors.

    Returns:
        ``optimizer``.

    Raises:
        TypeError: The step is not known to be element-wise (Adafactor, Muon, LBFGS, and classes
            that torch does not have).
    """
    element_wise_class = _find_element_wise_class(optimizer)
    if element_wise_class is None:
        raise TypeError(
            f"{type(optimizer).__name__} is not one of torch's element-wise optimizers: "
            + ", ".join(supported_class.__name__ for supported_class in _ELEMENT_WISE)
        )
    _skipped.discard(optimizer)
    if optimizer not in _accelerated:
        _accelerated[optimizer] = _Acceleration(optimizer, element_wise_class)
    return optimizer


def restore(optimizer: Optimizer) -> None:
    """Undoes :func:`accelerate`, and prevents automatic acceleration. Keeps the states."""
    _skipped.add(optimizer)
    acceleration = _accelerated.pop(optimizer, None)
    if acceleration is not None:
        acceleration.undo(optimizer)


def _find_element_wise_class(optimizer: Optimizer) -> type[Optimizer] | None:
    """Returns torch's element-wise class whose step the optimizer uses, or None."""
    for element_wise_class in _ELEMENT_WISE:
        if (
            isinstance(optimizer, element_wise_class)
            and _unwrap_function(type(optimizer).step) is _unwrap_function(element_wise_class.step)
            and type(optimizer)._init_group is element_wise_class._init_group
        ):
            return element_wise_class
    return None


def _unwrap_function(function: Any) -> Any:
    """Unwraps a step: torch wraps it for the profiler when a class has its first instance."""
    while hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return function


# ---- one optimizer -------------------------------------------------------------------------------


class _Acceleration:
    """The hooks and ``_init_group`` of one optimizer, and the changes to revert after a step.

    The optimizer has this ``_init_group`` during its step only. A compiled step does not have it:
    dynamo treats a call of torch's own ``_init_group`` specially.
    """

    def __init__(self, optimizer: Optimizer, element_wise_class: type[Optimizer]) -> None:
        self._is_sgd = element_wise_class is torch.optim.SGD
        self._init_group: Any = element_wise_class._init_group  # type: ignore[attr-defined]
        self._recipes = _Recipes()
        self._sgd_params: list[tuple[torch.Tensor, DTensor]] = []
        self._hooks = [
            optimizer.register_step_pre_hook(self._begin_step),
            optimizer.register_step_post_hook(self._restore_after_step),
            optimizer.register_state_dict_pre_hook(self._restore_after_step, prepend=True),
        ]
        # Runs before the user's post hooks, so that they read the same states as with torch.
        optimizer._optimizer_step_post_hooks.move_to_end(self._hooks[1].id, last=False)  # type: ignore[attr-defined]
        self._init_group_of_step = functools.partial(
            _init_group, weakref.ref(optimizer), weakref.ref(self)
        )

    def undo(self, optimizer: Optimizer) -> None:
        self._restore_after_step(optimizer)
        for hook in self._hooks:
            hook.remove()

    def fill_lists(
        self, optimizer: Optimizer, group: dict[str, Any], lists: tuple[Any, ...]
    ) -> Any:
        """Fills ``lists`` as torch's ``_init_group`` does, with local tensors for DTensors.

        The first call runs torch's code and records which state goes into which list. Later calls
        fill the lists from this recipe in C. Returns the result of torch's ``_init_group``.
        """
        needs_torch = _needs_torch(optimizer, group)
        recipe = None if needs_torch or any(lists) else self._recipes.find_recipe(optimizer, group)
        lists_from_recipe = None if recipe is None else recipe.make_local_lists(optimizer, group)
        if recipe is not None and lists_from_recipe is not None:
            result, params, local = recipe.result, lists_from_recipe[0], lists_from_recipe[1:]
        else:
            result = self._init_group(optimizer, group, *lists)
            local_lists = None if needs_torch else _get_local_lists(lists)
            if local_lists is None:
                return result
            params, local = lists[0], local_lists
            self._recipes.record_recipe(optimizer, group, lists, result)
        # Writes to a local tensor do not change the version of the DTensor, by which autograd
        # detects writes.
        torch.autograd.graph.increment_version(params)
        if self._is_sgd and group["momentum"] != 0:
            pairs = zip(local[0], params)
            self._sgd_params += [
                (local_tensor, p) for local_tensor, p in pairs if local_tensor is not p
            ]
        for target, values in zip(lists, local, strict=True):
            target[:] = values
        return result

    def _begin_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._restore_after_step(optimizer)  # a step may have failed
        if not torch.compiler.is_compiling():
            vars(optimizer).setdefault("_init_group", self._init_group_of_step)

    def _restore_after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Restores the optimizer after a step, and before a step or checkpoint if a step failed.

        A compiled step changes nothing here, so its trace contains only this condition.
        """
        if "_init_group" in vars(optimizer):
            self._restore_state(optimizer)

    def _restore_state(self, optimizer: Optimizer) -> None:
        if vars(optimizer).get("_init_group") is self._init_group_of_step:
            del vars(optimizer)["_init_group"]
        for local, param in self._sgd_params:  # SGD stores momentum under the tensors in its list
            stored = optimizer.state.pop(local, None)
            if stored is None:  # the step failed before torch stored the momentum
                continue
            buffer = stored.get("momentum_buffer")
            state = optimizer.state[param]
            momentum = state.get("momentum_buffer")
            if (
                buffer is None
                or not isinstance(momentum, DTensor)
                or momentum._local_tensor is not buffer
            ):
                state["momentum_buffer"] = buffer if buffer is None else _make_like(param, buffer)
        self._sgd_params.clear()


def _init_group(
    optimizer_ref: weakref.ref[Optimizer],
    acceleration_ref: weakref.ref[_Acceleration],
    group: dict[str, Any],
    *lists: Any,
    **keyword_lists: Any,
) -> Any:
    optimizer, acceleration = optimizer_ref(), acceleration_ref()
    assert optimizer is not None and acceleration is not None
    return acceleration.fill_lists(optimizer, group, (*lists, *keyword_lists.values()))


def _needs_torch(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether torch's code must run: a differentiable or compiled step, or a scale in DTensors."""
    scales = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))
    return (
        bool(group.get("differentiable"))
        or torch.compiler.is_compiling()
        or any(isinstance(tensor, DTensor) for tensor in scales)
    )


_accelerated: weakref.WeakKeyDictionary[Optimizer, _Acceleration] = weakref.WeakKeyDictionary()


# ---- lists ---------------------------------------------------------------------------------------

_same_layouts: dict[int, tuple[Any, Any]] = {}
"""Maps the ``id`` of any tensor's spec to (this spec, a parameter's spec with an equal layout)."""
_MAX_SAME_LAYOUTS = 100_000


class _Recipe(NamedTuple):
    """A record of how torch's ``_init_group`` fills a group's lists, once all states exist.

    Attributes:
        group: The group.
        options: :func:`_list_options` of the group: the values that torch's code may depend on.
        keys: The state's name for each list after parameters and gradients; None for empty lists.
        result: The return value of torch's code.
    """

    group: dict[str, Any]
    options: list[Any]
    keys: tuple[str | None, ...]
    result: Any

    def make_local_lists(
        self, optimizer: Optimizer, group: dict[str, Any]
    ) -> tuple[list[Any], ...] | None:
        """Returns the parameters with gradients, then all lists, as local tensors.

        Returns None if a state is missing or has another layout, or a tensor is sparse or complex.
        """
        return _C.local_group(
            group["params"], optimizer.state, self.keys, _get_bounded_cache(), _have_same_layout
        )


class _Recipes:
    """The recipes of an optimizer's groups."""

    def __init__(self) -> None:
        self._by_group: dict[int, _Recipe] = {}

    def find_recipe(self, optimizer: Optimizer, group: dict[str, Any]) -> _Recipe | None:
        """Returns the group's recipe, or None if the group has changed or a mode intercepts torch.

        A subclass of dict or list and a torch function mode could observe torch's accesses.
        """
        recipe = self._by_group.get(id(group))
        if recipe is None or recipe.group is not group or recipe.options != _list_options(group):
            return None
        states, params = optimizer.state, group.get("params")
        is_plain = type(states) in (dict, defaultdict) and type(params) is list
        return recipe if is_plain and torch._C._len_torch_function_stack() == 0 else None

    def record_recipe(
        self, optimizer: Optimizer, group: dict[str, Any], lists: tuple[Any, ...], result: Any
    ) -> None:
        """Records a recipe from lists that torch's ``_init_group`` has just filled."""
        if len(self._by_group) > len(optimizer.param_groups):
            self._by_group.clear()  # drop recipes of removed groups
        self._by_group.pop(id(group), None)
        if result not in (None, False, (False, False)):  # a tensor is sparse or complex
            return
        states = [optimizer.state.get(param, {}) for param in lists[0]]
        keys = [_find_key(values, states) for values in lists[2:]]
        if _UNKNOWN not in keys:
            self._by_group[id(group)] = _Recipe(group, _list_options(group), tuple(keys), result)


_UNKNOWN = ""


def _find_key(values: list[Any], states: list[dict[str, Any]]) -> str | None:
    """Returns the name under which ``values`` are in the states, ``_UNKNOWN``, or None if empty."""
    if not values:
        return None
    names = [name for name, state in states[0].items() if state is values[0]]
    is_unique = len(names) == 1 and len(values) == len(states)
    if not is_unique or any(s.get(names[0]) is not v for s, v in zip(states, values)):
        return _UNKNOWN
    return names[0]


def _list_options(group: dict[str, Any]) -> list[Any]:
    """Returns the options that ``_init_group`` may depend on: names, flags, types and signs."""
    return [
        (name, value if value is None or type(value) is bool else _classify_value(name, value))
        for name, value in group.items()
        if name != "params"
    ]


def _classify_value(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, numbers.Real):
        return type(value), bool(value), value < 0
    return type(value), name in _SWITCHES and bool(value)


def _get_bounded_cache() -> dict[int, tuple[Any, Any]]:
    if len(_same_layouts) > _MAX_SAME_LAYOUTS:
        _same_layouts.clear()
    return _same_layouts


def _get_local_lists(lists: tuple[list[Any], ...]) -> tuple[list[Any], ...] | None:
    """Returns the lists with local tensors for DTensors.

    Returns None if there are no DTensors, or if a step on local tensors would differ. A list has an
    item for each parameter, or is empty.
    """
    if not any(isinstance(param, DTensor) for param in lists[0]):
        return None
    return _C.local_lists(lists, _get_bounded_cache(), _have_same_layout)


def _have_same_layout(spec: Any, other: Any) -> bool:
    """Whether two specs have equal mesh, placements and shape, without ``Partial``."""
    return (
        spec.mesh == other.mesh
        and spec.placements == other.placements
        and spec.shape == other.shape
        and not any(isinstance(placement, Partial) for placement in spec.placements)
    )


def _make_like(param: DTensor, local: torch.Tensor) -> DTensor:
    """Returns ``local`` as a DTensor with the spec of ``param``."""
    return DTensor(local, param._spec, requires_grad=False)


# ---- automatic acceleration ----------------------------------------------------------------------

_skipped: weakref.WeakSet[Optimizer] = weakref.WeakSet()
"""Restored optimizers, and those not element-wise or without DTensors at their first step."""


def accelerate_all() -> Callable[[], bool]:
    """Accelerates each optimizer that holds DTensors at its first step.

    Returns:
        A function that removes the hook and undoes every :func:`accelerate`.
    """
    is_enabled = is_env_enabled(ENVIRONMENT_SWITCH, "1")
    hooks = [register_optimizer_step_pre_hook(_before_step)] if is_enabled else []

    def undo() -> bool:
        for hook in hooks:
            hook.remove()
        restore_all()
        return True

    return undo


def restore_all() -> None:
    """Undoes every :func:`accelerate` and :func:`restore`."""
    for optimizer in list(_accelerated):
        restore(optimizer)
    _skipped.clear()


def _before_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    # torch.compile traces hooks into a compiled step, which uses torch's code (_needs_torch).
    if torch.compiler.is_compiling() or optimizer in _accelerated or optimizer in _skipped:
        return
    params = (param for group in optimizer.param_groups for param in group["params"])
    if _find_element_wise_class(optimizer) is None or not any(
        isinstance(p, DTensor) for p in params
    ):
        _skipped.add(optimizer)
    else:
        accelerate(optimizer)
