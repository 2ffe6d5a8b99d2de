"""Patches of torch's FSDP2 take effect on our modules too.

Libraries and torch's own tests replace methods of ``FSDPParamGroup``, ``FSDPState`` and
``FSDPParam``, attributes of single groups, and functions of FSDP2's modules. Three things make
that work here:

- Our classes show torch's methods (:class:`_Shown`): an attribute of one of our objects is what
  torch's class has under that name now, patched or not.
- torch's own functions, called with one of our objects, run our code (a patch usually ends in a
  call of what it replaced).
- The C core asks before each transition whether anything is patched (``csrc/python/guard.c``) and
  then calls the method; :func:`bind` tells it what is expected where.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable
from types import FunctionType, MethodDescriptorType, ModuleType, SimpleNamespace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_collectives as stock_collectives
import torch.distributed.fsdp._fully_shard._fsdp_param_group as stock_group
import torch.distributed.fsdp._fully_shard._fsdp_state as stock_state
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

import fsdp_c._C as _C
from fsdp_c_redirect import Redirection, copy_of

from ._compat import patches
from .compat import ALL_GATHER, REDUCE_SCATTER
from .originals import codes_of, expected_in, is_from_torch, is_torchs, original_of

logger = logging.getLogger("torch.distributed.fsdp.fully_shard")


# ---- torch's own functions -----------------------------------------------------------------------

_originals: dict[tuple[type, str], FunctionType] = {}  # the function objects, redirected or not
_redirections: dict[tuple[type, str], Redirection] = {}  # while a sharded model needs them


def original(cls: type, name: str) -> Callable[..., Any]:
    """What torch's ``cls.name`` does to torch's own objects."""
    redirection = _redirections.get((cls, name))
    return redirection.original if redirection is not None else getattr(cls, name)


# ---- our classes under torch's names -------------------------------------------------------------


class _Shown:
    """A method of ours under the name it has in torch's class: whatever is there now."""

    def __init__(self, stock: type, name: str, own: Callable[..., Any]) -> None:
        self.stock = stock
        self.name = name
        self.own = own
        self.__doc__ = own.__doc__

    def __get__(self, obj: object, owner: type | None = None) -> Any:
        current = vars(self.stock).get(self.name, self.own)
        if current is _originals.get((self.stock, self.name)) and not self.is_redirected:
            current = self.own
        bind = getattr(type(current), "__get__", None)
        return current if bind is None else bind(current, obj, owner)

    @property
    def is_redirected(self) -> bool:
        return (self.stock, self.name) in _redirections


_Class = TypeVar("_Class", bound=type)


def shows(stock: type) -> Callable[[_Class], _Class]:
    """Decorates a class of ours: methods that torch's ``stock`` has too are torch's to replace.

    torch's function, called with one of our objects, runs our method, and our class shows torch's.
    Methods of ours that call ``super()`` are not run by torch's function, which they call.
    """

    def decorate(own_class: _Class) -> _Class:
        _show(own_class, stock)
        return own_class

    return decorate


def _show(own_class: type, stock: type) -> None:
    for name, found in list(vars(stock).items()):
        own = next((vars(c)[name] for c in own_class.__mro__[:-1] if name in vars(c)), None)
        is_ours = own is not None and own is not found
        if name.startswith("__") or not is_ours or not callable(own) or isinstance(found, property):
            continue
        function = original_of(found, stock.__module__, f"{stock.__name__}.{name}")
        if function is None:
            logger.warning(
                "fsdp_c: %s.%s was replaced before fsdp_c was imported, by something that does not "
                "lead to torch's own; it is called as it is",
                stock.__name__,
                name,
            )
        else:
            _originals[stock, name] = function
            if "__class__" not in getattr(getattr(own, "__code__", None), "co_freevars", ()):
                patches.apply_with_first_model(
                    (stock, name),
                    functools.partial(_redirect, stock, name, own_class, own),
                )
        setattr(own_class, name, _Shown(stock, name, own))


def _redirect(
    stock: type, name: str, own_class: type, own: Callable[..., Any]
) -> Callable[[], bool]:
    """Makes torch's ``stock.name`` run ``own`` for objects of ``own_class``. Returns the undo.

    Redirects the innermost function: torch's decorators around it disable dynamo and functorch.
    Arguments that are passed by torch's names reach ``own`` by position.
    """

    function = inspect.unwrap(_originals[stock, name])
    original = copy_of(function)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, own_class):
            return original(self, *args, **kwargs)
        if kwargs:
            bound = inspect.signature(original).bind(self, *args, **kwargs)
            return own(*bound.args, **bound.kwargs)
        return own(self, *args)

    def undo() -> bool:
        _redirections.pop((stock, name), None)
        redirection.undo()
        return True

    redirection = _redirections[stock, name] = Redirection(function, run)
    return undo


def is_overridden(obj: Any, stock: type, name: str) -> bool:
    """Whether ``obj.name`` is anything but our own method."""
    expected = _originals.get((stock, name))
    return (
        name in vars(obj)
        or not isinstance(getattr_static(type(obj), name), _Shown)
        or vars(stock).get(name) is not expected
    )


def getattr_static(cls: type, name: str) -> Any:
    """The class attribute itself, not what it gives."""
    return next((vars(c)[name] for c in cls.__mro__ if name in vars(c)), None)


# ---- methods of single parameters ----------------------------------------------------------------

# What of FSDPParam the core does for a whole group while nobody has replaced it, and is done by the
# methods, one parameter after the other, where somebody has.
_GATHERS = _C.CALL_GATHER | _C.CALL_MEMORY
PARAM_METHODS = {
    "all_gather_inputs": _GATHERS,
    "init_all_gather_outputs": _GATHERS,
    "alloc_all_gather_outputs": _GATHERS,
    "init_unsharded_param": _GATHERS,
    "free_unsharded_param": _GATHERS,
    "_setattr_on_modules": _C.CALL_SWAP,
    "to_sharded": _C.CALL_SWAP,
    "to_sharded_post_forward": _C.CALL_SWAP,
    "to_unsharded": _C.CALL_SWAP,
    "to_sharded_dtensor": _C.CALL_REDUCE,
    "accumulate_unsharded_grad_if_needed": _C.CALL_GRADS,
    "to_accumulated_grad_if_needed": _C.CALL_GRADS,
    "unsharded_accumulated_grad_data": _C.CALL_GRADS,
    "unsharded_grad_data": _C.CALL_GRADS,
    "_get_grad_inner_tensor": _C.CALL_GRADS,
}
# Whoever replaces one of these decides what a parameter is: torch's own constructor runs it.
_CONSTRUCTION = (
    "__init__",
    "_init_sharded_param",
    "_init_sharded_post_forward_param_metadata",
    "init_unsharded_param",
)
# What makes a parameter with these: where all are torch's, parameters that are alike are made by
# what the first of them has become (alike.py).
_PARTS = (
    "_init_shard_mesh",
    "_init_sharding_spec",
    "_init_sharding_spec_plain",
    "to_sharded_dtensor",
    "init_dtype_attrs",
    "_init_extensions",
)
# A property that the core has in its place.
_WITHOUT_EFFECT = ("unsharded_param",)


def _stock_of(name: str) -> Any:
    """torch's own method or property of ``FSDPParam``; None: patched before fsdp_c was imported."""
    found = vars(FSDPParam).get(name)
    function = getattr(found, "fget", found)
    return found if is_torchs(function, FSDPParam.__module__, f"FSDPParam.{name}") else None


_STOCK = {
    name: _stock_of(name) for name in (*PARAM_METHODS, *_CONSTRUCTION, *_PARTS, *_WITHOUT_EFFECT)
}
_unheard: set[str] = set()


def is_patched(name: str) -> bool:
    """Whether torch's ``FSDPParam`` has something else under the name than torch's own method."""
    return name in vars(FSDPParam) and vars(FSDPParam)[name] is not _STOCK[name]


def _is_above(cls: type, own_class: type, name: str) -> bool:
    """Whether a class in front of ours, a subclass of ``FSDPParam``, has the method."""
    if cls is own_class:
        return False
    mro = cls.__mro__
    return any(name in vars(c) for c in mro[: mro.index(own_class)])


def is_constructed_by_others(cls: type, own_class: type) -> bool:
    """Whether somebody has replaced how torch makes a parameter, for our ``own_class``."""
    return any(
        is_patched(name) or (name != "__init__" and _is_above(cls, own_class, name))
        for name in _CONSTRUCTION
    )


def is_constructed_as_usual() -> bool:
    """Whether nothing of what makes a parameter has been replaced in torch's class."""
    return not any(is_patched(name) for name in (*_CONSTRUCTION, *_PARTS))


def overridden_by(param: Any, own_class: type) -> int:
    """Bits of what this object, or a class in front of ours, overrides of ``FSDPParam``."""
    found = 0
    if type(param) is own_class and PARAM_METHODS.keys().isdisjoint(vars(param)):
        return found
    for name, bits in PARAM_METHODS.items():
        if name in vars(param) or _is_above(type(param), own_class, name):
            found |= bits
    return found


def warn_of_patches_without_effect() -> None:
    """Logs, once per name, what of torch's ``FSDPParam`` is patched and not called by our core."""
    for name in _WITHOUT_EFFECT:
        if name in _unheard or not is_patched(name):
            continue
        _unheard.add(name)
        logger.warning(
            "fsdp_c: FSDPParam.%s has been replaced. It is not called: fsdp_c has a property of "
            "its own there. Replace init_unsharded_param, which sets _unsharded_param",
            name,
        )


# ---- what the C core calls -----------------------------------------------------------------------


def log_debug(group: Any, label: str) -> None:
    """A debug line as torch writes it; ``group`` None: of no group."""
    label = f"FSDP::{label}"
    stock_state.logger.debug("%s", label if group is None else group._with_fqn(label))


def insert_node(group: Any, args: Any, kwargs: Any) -> Any:
    """The post-backward node by torch's own class, which somebody has patched."""
    insert = original(stock_group.FSDPParamGroup, "_register_post_backward_hook")
    return insert(group, args, kwargs)


def node_backward(group: Any, grads: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The patched backward of torch's node; the gradients that go on."""
    context = SimpleNamespace(
        param_group=group, needs_input_grad=(False, *(True for _ in grads)), saved_tensors=()
    )
    changed = stock_group.RegisterPostBackwardFunction.backward(context, *grads)
    passed = changed[1:] if isinstance(changed, tuple) else ()
    return tuple(torch.zeros_like(grad) if new is None else new for grad, new in zip(grads, passed))


# ---- what is expected where ----------------------------------------------------------------------


def _methods(own_class: type, stock: type, names: tuple[str, ...]) -> tuple[Any, ...]:
    """For guard.c: torch's class, and (name, our attribute, torch's function) for each name."""
    rows = []
    for name in names:
        function = _originals.get((stock, name))
        if function is None:
            function = original_of(
                vars(stock).get(name), stock.__module__, f"{stock.__name__}.{name}"
            )
        rows.append((name, getattr_static(own_class, name), function))
    return (stock, *rows)


def _functions(module: ModuleType, names: Iterable[str], bits: int) -> list[tuple[Any, ...]]:
    """Watched functions and classes of a module. Where a library replaced one before fsdp_c was
    imported, torch's own is expected, or ``None``: patched in any case."""
    return [(vars(module), name, expected_in(module, name), None, bits) for name in names]


def _class_attributes(cls: type, names: Iterable[str], bits: int) -> list[tuple[Any, ...]]:
    """Watched methods of a class, its own or inherited; they may be static."""
    rows: list[tuple[Any, ...]] = []
    for name in names:
        static = getattr_static(cls, name)
        function = getattr(static, "__func__", static)
        own = is_from_torch(function)
        rows.append((cls, name, static if own else None, function if own else None, bits))
    return rows


def _log_enabled() -> bool:
    return stock_state.logger.isEnabledFor(logging.DEBUG)


def _resize() -> Any:
    """torch's method of storages: the one that is no Python function."""
    found = (vars(c).get("resize_") for c in torch.UntypedStorage.__mro__)
    return next((method for method in found if isinstance(method, MethodDescriptorType)), None)


def _entries() -> tuple[tuple[Any, ...], ...]:
    """Everything besides methods of groups and states: (place, name, expected, also, bits)."""
    both = _C.CALL_GATHER | _C.CALL_REDUCE
    defined = [name for name in codes_of(stock_collectives) if name in vars(stock_collectives)]
    rows = [
        *_functions(dist, (ALL_GATHER,), _C.CALL_GATHER),
        *_functions(dist, (REDUCE_SCATTER, "all_reduce"), _C.CALL_REDUCE),
        *_functions(
            stock_group, ("foreach_all_gather", "foreach_all_gather_copy_out"), _C.CALL_GATHER
        ),
        *_functions(stock_group, ("foreach_reduce",), _C.CALL_REDUCE),
        *_functions(stock_group, ("RegisterPostBackwardFunction",), _C.CALL_NODE_CLASS),
        *_functions(stock_collectives, defined, both),
    ]
    gathers: list[type] = [stock_group.DefaultAllGather, stock_group.ProcessGroupAllocAllGather]
    for cls in gathers:
        rows += _class_attributes(cls, ("__call__", "allocate"), _C.CALL_GATHER)
    scatters = [stock_group.DefaultReduceScatter, stock_group.ProcessGroupAllocReduceScatter]
    for cls in scatters:
        rows += _class_attributes(cls, ("__call__", "allocate"), _C.CALL_REDUCE)
    node = stock_group.RegisterPostBackwardFunction
    rows += _class_attributes(node, ("backward",), _C.CALL_NODE)
    # autograd's own setup_context, where the node has none
    rows += _class_attributes(node, ("forward", "setup_context"), _C.CALL_NODE_CLASS)
    for name, bits in PARAM_METHODS.items():
        if name in vars(FSDPParam):
            rows.append((FSDPParam, name, _STOCK[name], None, bits))
    # torch's memory trackers replace it: what changes sizes must then go through it.
    rows.append((torch.UntypedStorage, "resize_", _resize(), None, both | _C.CALL_MEMORY))
    return tuple(rows)


def bind(group_class: type, state_class: type) -> None:
    """Tells the C core what torch's classes and modules hold while nobody has patched them."""
    _C.guard_bind(
        _methods(group_class, stock_group.FSDPParamGroup, _C.GROUP_METHODS),
        _methods(state_class, stock_state.FSDPState, _C.STATE_METHODS),
        _entries(),
        stock_state.logger._cache,  # type: ignore[attr-defined]
        _log_enabled,
    )
