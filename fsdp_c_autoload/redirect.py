"""Redirection: calls of a function of torch run a function of fsdp_c.

:class:`Redirection` replaces the code object of a function, in place. The function's identity,
attributes, ``__wrapped__``, signature and source stay as they are, so code that imported the
function earlier is redirected too. An import hook redirects functions of modules that are not
imported yet.

``autoload`` imports this module before torch is complete and before fsdp_c is imported. This
module therefore imports neither. ``fsdp_c.install`` registers its changes in
``fsdp_c/_compat/patches.py``.
"""

from __future__ import annotations

import functools
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
"""Maps a module of torch to its functions that fsdp_c implements."""

# ---- one function --------------------------------------------------------------------------------

active: dict[str, Redirection] = {}
"""Maps a key to its redirection. The code of a redirected function has the key as a constant, and
no function, because dynamo does not support functions as constants. Entries stay after
:meth:`Redirection.undo`, because another thread may be about to read one. A later redirection of
the same function replaces the entry."""

_numbers = itertools.count()
_KEY = "<key of a redirection>"


class Redirection:
    """Makes ``function`` run ``target``, from construction until :meth:`undo`.

    Attributes:
        original: A function with the code that ``function`` had at construction.
        called: ``target`` until :meth:`undo`, then ``original``.
    """

    def __init__(self, function: FunctionType, target: Callable[..., Any]) -> None:
        self.function = function
        self.code = function.__code__
        self.original = copy_function(function)
        self.called = target
        previous = next((r for r in list(active.values()) if r._is_undone_for(function)), None)
        self.key: str = str(next(_numbers)) if previous is None else previous.key
        self.replacement: CodeType = (
            _make_calling_code(self.key, self.code) if previous is None else previous.replacement
        )
        active[self.key] = self
        self.signature: Any = None  # inspect.signature() would else return (*args, **kwargs)
        if "__signature__" not in vars(function):
            self.signature = _get_signature(function)
            function.__signature__ = self.signature  # type: ignore[attr-defined]
        function.__code__ = self.replacement

    def undo(self) -> None:
        """Restores the function's code, unless other code has replaced it after the redirection.

        In that case the newer code stays. The redirected code, if still called, runs ``original``.
        """
        self.called = self.original
        if self.function.__code__ is self.replacement:
            self.function.__code__ = self.code
        if vars(self.function).get("__signature__", self) is self.signature:
            del self.function.__signature__  # type: ignore[attr-defined]

    def _is_undone_for(self, function: FunctionType) -> bool:
        """Whether the redirection is undone, and ``function`` has the code that it replaced."""
        return self.function is function and self.code is function.__code__


def copy_function(function: FunctionType) -> FunctionType:
    """Returns a function with the code, defaults, closure and attributes of ``function``."""
    copy = FunctionType(
        function.__code__,
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__.update(function.__dict__)
    return copy


def original(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a copy of ``function`` from before its redirection; ``function`` if there is none."""
    for redirection in list(active.values()):
        if redirection.function is function and redirection.called is not redirection.original:
            return redirection.original
    return function


def iterate_wrapped(function: Any, depth: int = 4) -> Iterator[Any]:
    """Yields the function and the functions that it wraps: ``__wrapped__``, closures, defaults.

    Then yields functions in global variables that the function reads, but none that they wrap.
    """
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
            yield from iterate_wrapped(candidate, depth - 1)
    if isinstance(function, FunctionType):
        values = (function.__globals__.get(name) for name in function.__code__.co_names)
        yield from filter(callable, values)


def find_torch_function(module: ModuleType, name: str) -> FunctionType | None:
    """Returns torch's function of this name, or None.

    A library may have replaced the function in the module by a wrapper.
    """
    torch = os.path.dirname(os.path.abspath(sys.modules["torch"].__file__ or "")) + os.sep
    for function in iterate_wrapped(getattr(module, name, None)):
        is_named = isinstance(function, FunctionType) and function.__name__ == name
        if is_named and function.__code__.co_filename.startswith(torch):
            return function
    return None


def is_redirected(function: Any) -> bool:
    """Whether a redirection of ``function`` is in effect."""
    return original(function) is not function


def _get_signature(function: FunctionType) -> Any:
    import inspect  # not needed where nothing is redirected

    return inspect.signature(function)


def _make_calling_code(key: str, replaced: CodeType) -> CodeType:
    """Returns code that passes all arguments to ``active[key].called``.

    File and first line are those of ``replaced``: ``inspect.getsource`` finds torch's source.
    """
    code = _compile_calling_code(replaced.co_freevars)
    constants = tuple(key if constant == _KEY else constant for constant in code.co_consts)
    return code.replace(
        co_name=replaced.co_name,
        co_consts=constants,
        co_filename=replaced.co_filename,
        co_firstlineno=replaced.co_firstlineno,
    )


@functools.cache
def _compile_calling_code(free_names: tuple[str, ...]) -> CodeType:
    """Compiles the code for functions with these free variables.

    CPython requires as many free variables as the function's closure has cells. The variables are
    never read. All statements are on the first line, so that a traceback shows no line that did not
    run.
    """
    body = [f"from {__name__} import active", f"return active[{_KEY!r}].called(*args, **kwargs)"]
    lines = ["def outer():"]
    lines += [f"    {name} = None" for name in free_names]
    lines += [f"    def inner(*args, **kwargs): {'; '.join([*body, *free_names])}"]
    outer = compile("\n".join(lines), "<redirected>", "exec").co_consts[0]
    return next(const for const in outer.co_consts if isinstance(const, CodeType))


# ---- torch's functions ---------------------------------------------------------------------------

_redirected: dict[str, Redirection] = {}  # keys: "module.name"
_find: Callable[[str], Callable[..., Any]] | None = None  # None outside redirect_all..restore_all


def redirect_all(find: Callable[[str], Callable[..., Any]]) -> None:
    """Redirects all :data:`FUNCTIONS`. Modules that are not imported yet are redirected at
    their import.

    A second call does nothing.

    Args:
        find: Returns fsdp_c's function for a name. Each call of a redirected function calls
            ``find``.
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
    """Undoes :func:`redirect_all`. A second call does nothing."""
    global _find
    if _finder in sys.meta_path:
        sys.meta_path.remove(_finder)
    for redirection in _redirected.values():
        redirection.undo()
    _redirected.clear()
    _find = None


def is_redirecting() -> bool:
    """Whether :func:`redirect_all` is in effect."""
    return _find is not None


def list_redirected() -> list[str]:
    """Returns the names of the redirected functions, as ``module.name``."""
    return list(_redirected)


def _redirect_in(module: ModuleType, find: Callable[[str], Callable[..., Any]]) -> None:
    for name in FUNCTIONS[module.__name__]:
        key = f"{module.__name__}.{name}"
        function = find_torch_function(module, name)
        if function is not None and key not in _redirected:
            _redirected[key] = Redirection(function, _make_caller(name, find))


def _make_caller(name: str, find: Callable[[str], Callable[..., Any]]) -> Callable[..., Any]:
    def call_fsdp_c(*args: Any, **kwargs: Any) -> Any:
        return find(name)(*args, **kwargs)

    return call_fsdp_c


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps the loaders of the modules in :data:`FUNCTIONS`. It finds no modules itself."""

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
    """Runs a module's own loader, then redirects the module's functions."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:  # get_source, is_package and the like
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader  # for code that reads the module's own loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if _find is not None:
            _redirect_in(module, _find)


_finder = _Finder()
