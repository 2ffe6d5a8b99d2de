"""Redirection: a function that runs another one in its place, whoever holds it and since whenever.

A function is redirected by giving it another code object, in place: its identity, attributes and
``__wrapped__`` stay as they are. Imports nothing of ``fsdp_c`` or torch, because
``fsdp_c_autoload`` needs it where neither may be imported.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any

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
        function.__code__ = _calling(self.number, self.code)

    def undo(self) -> None:
        """Gives the function its own code back."""
        self.function.__code__ = self.code
        active.pop(self.number, None)


def original(function: Callable[..., Any]) -> Callable[..., Any]:
    """What ``function`` does where it is not redirected."""
    for redirection in list(active.values()):
        if redirection.function is function:
            return redirection.original
    return function


def _calling(number: int, replaced: CodeType) -> CodeType:
    """Code that hands every argument to a target, for a function with ``replaced``'s closure."""
    names = replaced.co_freevars  # as many cells are wanted; nothing reads them
    lines = ["def outer():"]
    lines += [f"    {name} = None" for name in names]
    lines += ["    def inner(*args, **kwargs):"]
    lines += [f"        from {__name__} import active"]
    lines += [f"        return active[{number}].target(*args, **kwargs)"]
    lines += [f"        {name}" for name in names]
    outer = compile("\n".join(lines), "<redirected by fsdp_c>", "exec").co_consts[0]
    inner = next(const for const in outer.co_consts if isinstance(const, CodeType))
    return inner.replace(co_name=replaced.co_name)
