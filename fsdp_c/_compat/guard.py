"""Makes patches of torch's FSDP2 take effect on fsdp_c's modules, too.

Libraries and torch's own tests replace methods of ``FSDPParamGroup``, ``FSDPState`` and
``FSDPParam``, attributes of single groups, and functions of FSDP2's modules. Three mechanisms
support these patches:

- A descriptor (:class:`_PatchableMethod`) on fsdp_c's classes returns the current attribute of
  torch's class if it is patched, else fsdp_c's method.
- torch's own functions run fsdp_c's methods for fsdp_c's objects. Patches usually call the
  function that they replaced.
- The C code compares torch's attributes with the expected attributes once per hook
  (``csrc/python/guard.c``), and calls the patched method if an attribute differs. :func:`bind`
  passes the expected attributes to the core.
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
import torch.distributed.fsdp._fully_shard._fsdp_collectives as torch_collectives
import torch.distributed.fsdp._fully_shard._fsdp_param_group as torch_group
import torch.distributed.fsdp._fully_shard._fsdp_state as torch_state
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam

import fsdp_c._C as _C
from fsdp_c_autoload.redirect import Redirection, copy_function

from . import patches
from .originals import find_original, find_torch_object, get_codes, is_from_torch, is_torch_function
from .torch_releases import ALL_GATHER, REDUCE_SCATTER, SymmMemAllGather, SymmMemReduceScatter

logger = logging.getLogger("torch.distributed.fsdp.fully_shard")


# ---- torch's own functions -----------------------------------------------------------------------

_originals: dict[tuple[type, str], FunctionType] = {}  # torch's functions, redirected or not
_redirections: dict[tuple[type, str], Redirection] = {}  # kept while a sharded model exists


def get_torch_function(cls: type, name: str) -> Callable[..., Any]:
    """Returns the ``cls.name`` that torch's own objects use, without redirection."""
    redirection = _redirections.get((cls, name))
    return redirection.original if redirection is not None else getattr(cls, name)


# ---- descriptors for methods that torch's classes also have --------------------------------------


class _PatchableMethod:
    """Descriptor that returns torch's current attribute if patched, else fsdp_c's method."""

    def __init__(self, torch_class: type, name: str, own_method: Callable[..., Any]) -> None:
        self.torch_class = torch_class
        self.name = name
        self.own_method = own_method
        self.__doc__ = own_method.__doc__

    def __get__(self, obj: object, owner: type | None = None) -> Any:
        current = vars(self.torch_class).get(self.name, self.own_method)
        if current is _originals.get((self.torch_class, self.name)) and not self.is_redirected:
            current = self.own_method
        bind = getattr(type(current), "__get__", None)
        return current if bind is None else bind(current, obj, owner)

    @property
    def is_redirected(self) -> bool:
        return (self.torch_class, self.name) in _redirections


_Class = TypeVar("_Class", bound=type)


def follow_patches(torch_class: type) -> Callable[[_Class], _Class]:
    """Class decorator: patches of ``torch_class`` apply to the methods of the decorated class.

    torch's functions run the decorated class's methods for its objects. Methods that call
    ``super()`` are an exception, because such a method calls torch's function itself.
    """

    def decorate(own_class: _Class) -> _Class:
        _add_descriptors(own_class, torch_class)
        return own_class

    return decorate


def _add_descriptors(own_class: type, torch_class: type) -> None:
    for name, attribute in list(vars(torch_class).items()):
        own_method = next((vars(c)[name] for c in own_class.__mro__[:-1] if name in vars(c)), None)
        is_redefined = own_method is not None and own_method is not attribute
        if (
            name.startswith("__")
            or not is_redefined
            or not callable(own_method)
            or isinstance(attribute, property)
        ):
            continue
        function = find_original(
            attribute, torch_class.__module__, f"{torch_class.__name__}.{name}"
        )
        if function is None:
            logger.warning(
                "fsdp_c: %s.%s was replaced before fsdp_c was imported, by an object that does not "
                "wrap torch's function; fsdp_c calls the replacement",
                torch_class.__name__,
                name,
            )
        else:
            _originals[torch_class, name] = function
            if "__class__" not in getattr(getattr(own_method, "__code__", None), "co_freevars", ()):
                patches.apply_with_first_model(
                    (torch_class, name),
                    functools.partial(_redirect, torch_class, name, own_class, own_method),
                )
        setattr(own_class, name, _PatchableMethod(torch_class, name, own_method))


def _redirect(
    torch_class: type, name: str, own_class: type, own_method: Callable[..., Any]
) -> Callable[[], bool]:
    """Makes torch's ``torch_class.name`` run ``own_method`` for objects of ``own_class``.

    Redirects the innermost function, because torch's decorators around it disable dynamo and
    functorch. Keyword arguments reach ``own_method`` by position. Returns a function that undoes
    the redirection.
    """

    function = inspect.unwrap(_originals[torch_class, name])
    original = copy_function(function)

    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, own_class):
            return original(self, *args, **kwargs)
        if kwargs:
            bound = inspect.signature(original).bind(self, *args, **kwargs)
            return own_method(*bound.args, **bound.kwargs)
        return own_method(self, *args)

    def undo() -> bool:
        _redirections.pop((torch_class, name), None)
        redirection.undo()
        return True

    redirection = _redirections[torch_class, name] = Redirection(function, run)
    return undo


def is_overridden(obj: Any, torch_class: type, name: str) -> bool:
    """Whether ``obj.name`` is not fsdp_c's own method."""
    expected = _originals.get((torch_class, name))
    return (
        name in vars(obj)
        or not isinstance(getattr_static(type(obj), name), _PatchableMethod)
        or vars(torch_class).get(name) is not expected
    )


def getattr_static(cls: type, name: str) -> Any:
    """Returns the attribute of ``cls`` or a base without calling descriptors, or None."""
    return next((vars(c)[name] for c in cls.__mro__ if name in vars(c)), None)


# ---- methods of single parameters ----------------------------------------------------------------

# Methods of FSDPParam. The core does their work for a whole group. If one of them is overridden,
# the core calls the methods of that kind (CALL_*) for each parameter.
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
# If one of these methods is replaced, torch's constructor makes the parameters.
_CONSTRUCTION = (
    "__init__",
    "_init_sharded_param",
    "_init_sharded_post_forward_param_metadata",
    "init_unsharded_param",
)
# Further methods that the constructor calls. If none is replaced, the template cache makes equal
# parameters from the attributes of the first parameter.
_CONSTRUCTION_HELPERS = (
    "_init_shard_mesh",
    "_init_sharding_spec",
    "_init_sharding_spec_plain",
    "to_sharded_dtensor",
    "init_dtype_attrs",
    "_init_extensions",
)
# A property that the core implements. Replacing it in torch's class has no effect.
_WITHOUT_EFFECT = ("unsharded_param",)


def _get_torch_attribute(name: str) -> Any:
    """Returns torch's ``FSDPParam`` attribute; None if absent, or patched before this import."""
    attribute = vars(FSDPParam).get(name)
    function = getattr(attribute, "fget", attribute)
    return (
        attribute
        if is_torch_function(function, FSDPParam.__module__, f"FSDPParam.{name}")
        else None
    )


_EXPECTED = {
    name: _get_torch_attribute(name)
    for name in (*PARAM_METHODS, *_CONSTRUCTION, *_CONSTRUCTION_HELPERS, *_WITHOUT_EFFECT)
}
_warned_names: set[str] = set()  # names that a warning was logged for


def is_patched(name: str) -> bool:
    """Whether the attribute ``name`` of torch's ``FSDPParam`` is not torch's own."""
    return name in vars(FSDPParam) and vars(FSDPParam)[name] is not _EXPECTED[name]


def _is_defined_before(cls: type, own_class: type, name: str) -> bool:
    """Whether a class before ``own_class`` in the MRO of ``cls`` defines ``name``."""
    if cls is own_class:
        return False
    mro = cls.__mro__
    return any(name in vars(c) for c in mro[: mro.index(own_class)])


def has_custom_constructor(cls: type, own_class: type) -> bool:
    """Whether a patch or a subclass replaces a method that constructs a parameter."""
    return any(
        is_patched(name) or (name != "__init__" and _is_defined_before(cls, own_class, name))
        for name in _CONSTRUCTION
    )


def has_torch_constructor() -> bool:
    """Whether all methods that construct a parameter are torch's own."""
    return not any(is_patched(name) for name in (*_CONSTRUCTION, *_CONSTRUCTION_HELPERS))


def find_overridden_methods(param: Any, own_class: type) -> int:
    """Returns the ``CALL_*`` bits of the methods that ``param`` or its subclass overrides."""
    overridden = 0
    if type(param) is own_class and PARAM_METHODS.keys().isdisjoint(vars(param)):
        return overridden
    for name, bits in PARAM_METHODS.items():
        if name in vars(param) or _is_defined_before(type(param), own_class, name):
            overridden |= bits
    return overridden


def warn_of_patches_without_effect() -> None:
    """Warns once per patched attribute of torch's ``FSDPParam`` that the core does not call."""
    for name in _WITHOUT_EFFECT:
        if name in _warned_names or not is_patched(name):
            continue
        _warned_names.add(name)
        logger.warning(
            "fsdp_c: FSDPParam.%s has been replaced. fsdp_c does not call the replacement, "
            "because its FSDPParam has its own property. Replace init_unsharded_param, which sets "
            "_unsharded_param",
            name,
        )


# ---- functions that the C core calls -------------------------------------------------------------


def log_debug(group: Any, label: str) -> None:
    """Logs a debug line in torch's format; ``group`` may be None."""
    label = f"FSDP::{label}"
    torch_state.logger.debug("%s", label if group is None else group._with_fqn(label))


def insert_node(group: Any, args: Any, kwargs: Any) -> Any:
    """Inserts the post-backward node by torch's own class, for patches of that class."""
    insert = get_torch_function(torch_group.FSDPParamGroup, "_register_post_backward_hook")
    return insert(group, args, kwargs)


def run_node_backward(group: Any, grads: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """Runs the patched backward of torch's node; returns the gradients for the next nodes."""
    context = SimpleNamespace(
        param_group=group, needs_input_grad=(False, *(True for _ in grads)), saved_tensors=()
    )
    changed = torch_group.RegisterPostBackwardFunction.backward(context, *grads)
    passed = changed[1:] if isinstance(changed, tuple) else ()
    if any(extra is not None for extra in passed[len(grads) :]):
        return passed  # autograd accepts further results if they are None; the caller raises
    return tuple(torch.zeros_like(grad) if new is None else new for grad, new in zip(grads, passed))


# ---- expected attributes -------------------------------------------------------------------------


def _list_methods(own_class: type, torch_class: type, names: tuple[str, ...]) -> tuple[Any, ...]:
    """Returns torch's class, and (name, fsdp_c's attribute, torch's function) for each name."""
    rows = []
    for name in names:
        function = _originals.get((torch_class, name))
        if function is None:
            function = find_original(
                vars(torch_class).get(name),
                torch_class.__module__,
                f"{torch_class.__name__}.{name}",
            )
        rows.append((name, getattr_static(own_class, name), function))
    return (torch_class, *rows)


def _list_functions(module: ModuleType, names: Iterable[str], bits: int) -> list[tuple[Any, ...]]:
    """Returns an entry for each function or class of a module.

    The entry expects torch's object, even if a library replaced it before fsdp_c was imported. If
    torch's object is unknown, the entry expects ``None``, which counts as patched.
    """
    return [(vars(module), name, find_torch_object(module, name), None, bits) for name in names]


def _list_class_attributes(cls: type, names: Iterable[str], bits: int) -> list[tuple[Any, ...]]:
    """Returns an entry for each method of a class: its own, inherited or static."""
    rows: list[tuple[Any, ...]] = []
    for name in names:
        static = getattr_static(cls, name)
        function = getattr(static, "__func__", static)
        expected = (static, function) if is_from_torch(function) else (None, None)
        rows.append((cls, name, *expected, bits))
    return rows


def _is_debug_enabled() -> bool:
    return torch_state.logger.isEnabledFor(logging.DEBUG)


def _find_resize() -> Any:
    """Returns torch's ``UntypedStorage.resize_``, which is not a Python function."""
    methods = (vars(c).get("resize_") for c in torch.UntypedStorage.__mro__)
    return next((method for method in methods if isinstance(method, MethodDescriptorType)), None)


def _list_entries() -> tuple[tuple[Any, ...], ...]:
    """Returns (owner, name, expected, also accepted, bits) for all but group and state methods."""
    gather_and_reduce = _C.CALL_GATHER | _C.CALL_REDUCE
    defined = [name for name in get_codes(torch_collectives) if name in vars(torch_collectives)]
    rows = [
        *_list_functions(dist, (ALL_GATHER,), _C.CALL_GATHER),
        *_list_functions(dist, (REDUCE_SCATTER, "all_reduce"), _C.CALL_REDUCE),
        *_list_functions(
            torch_group, ("foreach_all_gather", "foreach_all_gather_copy_out"), _C.CALL_GATHER
        ),
        *_list_functions(torch_group, ("foreach_reduce",), _C.CALL_REDUCE),
        *_list_functions(torch_group, ("RegisterPostBackwardFunction",), _C.CALL_NODE_CLASS),
        *_list_functions(torch_collectives, defined, gather_and_reduce),
    ]
    gathers = (torch_group.DefaultAllGather, torch_group.ProcessGroupAllocAllGather)
    for cls in (*gathers, *filter(None, [SymmMemAllGather])):
        rows += _list_class_attributes(cls, ("__call__", "allocate"), _C.CALL_GATHER)
    scatters = (torch_group.DefaultReduceScatter, torch_group.ProcessGroupAllocReduceScatter)
    for cls in (*scatters, *filter(None, [SymmMemReduceScatter])):
        rows += _list_class_attributes(cls, ("__call__", "allocate"), _C.CALL_REDUCE)
    node = torch_group.RegisterPostBackwardFunction
    rows += _list_class_attributes(node, ("backward",), _C.CALL_NODE)
    # inherited from autograd.Function if the node defines none
    rows += _list_class_attributes(node, ("forward", "setup_context"), _C.CALL_NODE_CLASS)
    for name, bits in PARAM_METHODS.items():
        if name in vars(FSDPParam):
            rows.append((FSDPParam, name, _EXPECTED[name], None, bits))
    # torch's memory trackers replace resize_. All size changes then call the replacement.
    rows.append(
        (torch.UntypedStorage, "resize_", _find_resize(), None, gather_and_reduce | _C.CALL_MEMORY)
    )
    return tuple(rows)


def bind(group_class: type, state_class: type) -> None:
    """Passes the unpatched attributes of torch's classes and modules to the C core."""
    _C.guard_bind(
        _list_methods(group_class, torch_group.FSDPParamGroup, _C.GROUP_METHODS),
        _list_methods(state_class, torch_state.FSDPState, _C.STATE_METHODS),
        _list_entries(),
        torch_state.logger._cache,  # type: ignore[attr-defined]
        _is_debug_enabled,
    )
