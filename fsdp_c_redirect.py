"""Redirection: a function of torch runs one of fsdp_c, for every holder of the function.

A function is redirected by giving it another code object, in place: its identity, attributes,
``__wrapped__``, signature and source stay as they are. Functions of modules that are not imported
yet are redirected as soon as they are, by an import hook.

Imports nothing of ``fsdp_c`` or torch: ``fsdp_c_autoload`` runs before the one is wanted and before
the other is complete.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import itertools
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any

FUNCTIONS: dict[str, tuple[str, ...]] = {
    "torch.distributed.fsdp._fully_shard._fully_shard": ("fully_shard",),
    "torch.distributed._composable.replicate_with_fsdp": ("replicate",),
}
"""Module of torch -> its functions that fsdp_c has, too."""

# ---- one function --------------------------------------------------------------------------------

active: dict[int, Redirection] = {}
"""The redirections there are. Redirected functions find theirs by its number: code objects are not
to hold functions (dynamo, for one, does not expect it)."""

_numbers = itertools.count()  # each is used once: a copy of the code must not find another target


class Redirection:
    """One function that runs ``target`` in its place, until :meth:`undo`."""

    def __init__(self, function: FunctionType, target: Callable[..., Any]) -> None:
        self.function = function
        self.code = function.__code__
        self.original = FunctionType(
            self.code,
            function.__globals__,
            function.__name__,
            function.__defaults__,
            function.__closure__,
        )
        self.original.__kwdefaults__ = function.__kwdefaults__
        self.original.__dict__.update(function.__dict__)
        self.target = target
        self.number = next(_numbers)
        active[self.number] = self
        function.__signature__ = _signature_of(function)  # type: ignore[attr-defined]
        function.__code__ = _calling(self.number, self.code)

    def undo(self) -> None:
        """Gives the function its own code back."""
        self.function.__code__ = self.code
        vars(self.function).pop("__signature__", None)
        active.pop(self.number, None)


def original(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function that ``function`` is without its redirection."""
    for redirection in list(active.values()):
        if redirection.function is function:
            return redirection.original
    return function


def reachable(function: Any, depth: int = 4) -> Iterator[Any]:
    """The function and those it wraps: in ``__wrapped__``, closures and defaults."""
    yield function
    if depth == 0:
        return
    inner = [getattr(function, "__wrapped__", None), getattr(function, "__func__", None)]
    inner += [getattr(function, "func", None), *(getattr(function, "__defaults__", None) or ())]
    for cell in getattr(function, "__closure__", None) or ():
        try:
            inner.append(cell.cell_contents)
        except ValueError:  # an empty cell
            continue
    for candidate in inner:
        if callable(candidate):
            yield from reachable(candidate, depth - 1)


def find_torchs(module: ModuleType, name: str) -> FunctionType | None:
    """torch's function of that name, which a library's wrapper may have replaced in the module."""
    torch = os.path.dirname(os.path.abspath(sys.modules["torch"].__file__ or "")) + os.sep
    for function in reachable(getattr(module, name, None)):
        is_named = isinstance(function, FunctionType) and function.__name__ == name
        if is_named and function.__code__.co_filename.startswith(torch):
            return function
    return None


def is_redirected(function: Any) -> bool:
    """Whether ``function`` runs another in its place now."""
    return any(redirection.function is function for redirection in list(active.values()))


def _signature_of(function: FunctionType) -> Any:
    import inspect  # not needed where nothing is redirected

    return inspect.signature(function)


def _calling(number: int, replaced: CodeType) -> CodeType:
    """Code that hands every argument to a target, for a function with ``replaced``'s closure.

    File and first line are ``replaced``'s: ``inspect.getsource`` finds torch's source. All
    statements are on the first line, so that a traceback shows no line that did not run.
    """
    names = replaced.co_freevars  # as many cells are wanted; nothing reads them
    body = [f"from {__name__} import active", f"return active[{number}].target(*args, **kwargs)"]
    lines = ["def outer():"]
    lines += [f"    {name} = None" for name in names]
    lines += [f"    def inner(*args, **kwargs): {'; '.join([*body, *names])}"]
    outer = compile("\n".join(lines), replaced.co_filename, "exec").co_consts[0]
    inner = next(const for const in outer.co_consts if isinstance(const, CodeType))
    return inner.replace(co_name=replaced.co_name, co_firstlineno=replaced.co_firstlineno)


# ---- torch's functions ---------------------------------------------------------------------------

_redirected: dict[str, Redirection] = {}  # "module.name" of each
_find: Callable[[str], Callable[..., Any]] | None = None  # None: nothing is to be redirected


def redirect_all(find: Callable[[str], Callable[..., Any]]) -> None:
    """Redirects all :data:`FUNCTIONS`, of modules not imported yet as soon as they are.

    Does nothing where they are already.

    Args:
        find: Gives fsdp_c's function of a name; asked when torch's is called.
    """
    global _find
    if _find is not None:
        return
    _find = find
    sys.meta_path.insert(0, _finder)
    for name in FUNCTIONS:
        module = sys.modules.get(name)
        if module is not None:
            _redirect_in(module, find)


def restore_all() -> None:
    """Undoes :func:`redirect_all`."""
    global _find
    if _find is not None:
        sys.meta_path.remove(_finder)
    for redirection in _redirected.values():
        redirection.undo()
    _redirected.clear()
    _find = None


def redirected() -> list[str]:
    """The functions that are redirected now, as ``module.name``."""
    return list(_redirected)


def _redirect_in(module: ModuleType, find: Callable[[str], Callable[..., Any]]) -> None:
    for name in FUNCTIONS[module.__name__]:
        key = f"{module.__name__}.{name}"
        function = find_torchs(module, name)
        if function is not None and key not in _redirected:
            _redirected[key] = Redirection(function, _calling_found(name, find))


def _calling_found(name: str, find: Callable[[str], Callable[..., Any]]) -> Callable[..., Any]:
    def call_ours(*args: Any, **kwargs: Any) -> Any:
        return find(name)(*args, **kwargs)

    return call_ours


class _Finder(importlib.abc.MetaPathFinder):
    """Sees the target modules go by and redirects them once they have been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in FUNCTIONS:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """A module's own loader, and then the redirection."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:  # get_source, is_package and the like
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader  # what everybody else should see
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if _find is not None:
            _redirect_in(module, _find)


_finder = _Finder()
