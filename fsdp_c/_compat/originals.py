"""Finds torch's own functions, even if a library replaced them before fsdp_c was imported.

With ``FSDP_C=1`` the first ``fully_shard`` call imports fsdp_c, so libraries patch torch first. An
attribute of a torch module may then be a library's object. Two sources still have torch's function:
the code that the module's loader returns, and the function that a pass-through wrapper calls.
"""

from __future__ import annotations

import functools
import os
import sys
from types import BuiltinFunctionType, CodeType, FunctionType, ModuleType
from typing import Any

import torch

from fsdp_c_autoload.redirect import iterate_wrapped

_TORCH_FOLDER = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_NO_GRAD_FILE = os.path.join(_TORCH_FOLDER, "utils", "_contextlib.py")


# ---- a module's code -----------------------------------------------------------------------------


@functools.cache
def get_codes(module: ModuleType) -> dict[str, CodeType]:
    """Returns the module's functions and class bodies by name, from its loader.

    Returns an empty dict if the loader has no code, for example for a module that code created.
    """
    get_code = getattr(getattr(module, "__loader__", None), "get_code", None)
    code = get_code(module.__name__) if get_code is not None else None
    if code is None:
        return {}
    return {const.co_name: const for const in code.co_consts if isinstance(const, CodeType)}


def has_parameter(module: ModuleType, function: str, parameter: str) -> bool | None:
    """Whether torch's function of that name has the parameter; ``None`` without its code."""
    code = get_codes(module).get(function)
    if code is None:
        return None
    return parameter in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]


# ---- functions inside of wrappers ----------------------------------------------------------------


def is_torch_function(function: Any, module: str, qualname: str) -> bool:
    """Whether ``function`` is torch's function of that name.

    It may have decorators of torch that are context managers, such as ``no_grad()``.
    """
    if not isinstance(function, FunctionType):
        return False
    if (function.__module__, function.__qualname__) != (module, qualname):
        return False
    # functools.wraps copies both names, so only the code distinguishes a library's wrapper. A
    # function with the decorator no_grad() has the code of the decorator.
    code: Any = function.__code__
    while code is not None and code.co_filename == _NO_GRAD_FILE:
        function = getattr(function, "__wrapped__", None)
        code = getattr(function, "__code__", None)
    folder = os.path.dirname(sys.modules[module].__file__ or _TORCH_FOLDER) + os.sep
    return code is not None and bool(code.co_filename.startswith(folder))


def find_original(candidate: Any, module: str, qualname: str) -> FunctionType | None:
    """Returns torch's function: ``candidate``, or the function that ``candidate`` wraps."""
    for function in iterate_wrapped(candidate):
        if is_torch_function(function, module, qualname):
            return function
    return None


def find_undecorated(module: ModuleType, name: str) -> Any:
    """Returns torch's function of that name without decorators and without a library's wrappers.

    Raises:
        AttributeError: The module's attribute is not torch's function and does not wrap it.
    """
    for function in iterate_wrapped(getattr(module, name)):
        code = getattr(function, "__code__", None)
        if code is not None and (code.co_name, code.co_filename) == (name, _get_code_file(module)):
            return function
    raise AttributeError(
        f"{module.__name__}.{name} was replaced by {getattr(module, name)!r}, which does not call "
        "torch's function: import fsdp_c before the library that replaces it"
    )


@functools.cache
def _get_code_file(module: ModuleType) -> str | None:
    """Returns the file name in the code of the module's functions."""
    return next((code.co_filename for code in get_codes(module).values()), module.__file__)


# ---- attributes of modules -----------------------------------------------------------------------


def is_from_torch(candidate: Any) -> bool:
    """Whether torch defines the function, the class, or the class of the object."""
    code = getattr(candidate, "__code__", None)
    if code is not None:
        return bool(code.co_filename.startswith(_TORCH_FOLDER))
    defining_class = (
        candidate if isinstance(candidate, (BuiltinFunctionType, type)) else type(candidate)
    )
    return str(defining_class.__module__).partition(".")[0] == "torch"


def find_torch_object(module: ModuleType, name: str) -> Any:
    """Returns torch's object ``name`` of the module, also below wrappers; None if not found."""
    for function in iterate_wrapped(vars(module).get(name)):
        if is_from_torch(function) and getattr(function, "__name__", None) == name:
            return function
    return None
