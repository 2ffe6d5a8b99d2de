"""Registry of the changes that fsdp_c makes to objects of torch and of Python.

:func:`apply` makes a change and records its undo. An undo restores an object only while fsdp_c's
value is still in place: a later patch by other code is never removed.

A change has a scope, which determines how long it stays:

- ``Scope.INSTALL``: torch's functions run fsdp_c's functions. Present from :func:`install` to
  :func:`uninstall`.
- ``Scope.MODELS``: sharded models need the change to train. Present from the first sharded model
  on, while fsdp_c is installed or a sharded model is alive.
- ``Scope.EXIT``: torch's threads need the change at the end of the process, also without a live
  model. Present from the first lazy init of a root on. :func:`uninstall` undoes the change. If a
  model is alive, the change is undone when the last model is freed.

"Installed" and "a sharded model is alive" are independent::

                    no live model                      live model
                 +------------------+   fully_shard  +------------------+
    not          | none             | -------------> | MODELS           |
    installed    | (and EXIT)       | <------------- | (and EXIT)       |
                 +------------------+   last is freed+------------------+
                  install |   ^ uninstall            install |   ^ uninstall
                          v   |                              v   |
                 +------------------+   fully_shard  +------------------+
    installed    | INSTALL          | -------------> | INSTALL, MODELS  |
                 | (MODELS, EXIT    | <------------- | (and EXIT)       |
                 |  where present)  |   last is freed|                  |
                 +------------------+                +------------------+

A model is alive while one of its states or parameter groups exists: each holds the lease of
:func:`lease`. Python frees models in reference cycles at a garbage collection, so a deleted model
may stay alive until the next collection.

The last lease can end at any point of the program, also while torch iterates over a dict of hooks.
The undo of a hook would change this dict. In this case all undos wait for the next garbage
collection.

Objects of a sharded model itself (its class, hooks and attributes, its process groups' backends)
are not registered: they are freed with the model, as under torch's ``fully_shard``.
"""

from __future__ import annotations

import enum
import os
import sys
import threading
import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

Undo = Callable[[], bool]
"""Undoes one change. Returns False if other code has set a newer value, which is kept."""


class Scope(enum.Enum):
    """The lifetime of a change: see the module's docstring."""

    INSTALL = enum.auto()
    MODELS = enum.auto()
    EXIT = enum.auto()


class _Lease:
    """An object that keeps the changes of ``Scope.MODELS`` in place while it is alive."""

    __slots__ = ("__weakref__",)


Change = Callable[[], Undo]
"""Makes a change and returns its undo. The caller holds ``_lock``, so a change may call no function
of this module but :func:`set_attribute` and :func:`add_hook`, and may not shard a model."""

_lock = threading.Lock()  # held while changes are made or undone
_changes: dict[Hashable, tuple[Scope, Undo]] = {}  # in the order of application
_model_changes: dict[Hashable, Change] = {}
_lease: weakref.ref[_Lease] | None = None
_cycle: weakref.ref[_Cycle] | None = None
_is_installed = False
_is_exit_needed = True
_is_undo_due = False  # a lease has ended since the last undo

_ABSENT = object()


# ---- making changes ------------------------------------------------------------------------------


def apply(scope: Scope, key: Hashable, change: Change) -> None:
    """Makes a change now, unless a change with this key is in place.

    Args:
        scope: How long the change stays. For ``Scope.MODELS`` the caller holds a lease.
        key: Identifies the change.
        change: Makes the change and returns its undo.
    """
    global _is_exit_needed
    if scope is Scope.EXIT:
        _is_exit_needed = True
    if key not in _changes:
        with _hold_lock():
            _apply(scope, key, change)


def apply_with_first_model(key: Hashable, change: Change) -> None:
    """Registers a change of ``Scope.MODELS``: :func:`lease` makes it for the first live model."""
    _model_changes[key] = change


def set_attribute(owner: Any, name: str, value: Any, previous: Any = _ABSENT) -> Undo:
    """Sets ``owner.name`` and returns the undo.

    Args:
        previous: The value that the undo restores. Default: the present value.
    """
    if previous is _ABSENT:
        previous = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)

    def undo() -> bool:
        current = vars(owner).get(name, _ABSENT)
        if current is value and previous is _ABSENT:
            delattr(owner, name)
        elif current is value:
            setattr(owner, name, previous)
        return current is value or current is previous

    return undo


def set_class_attribute(cls: type, name: str, value: Any, previous: Any = _ABSENT) -> None:
    """Applies :func:`set_attribute` to a class, with ``Scope.MODELS``."""
    apply(Scope.MODELS, (cls, name), lambda: set_attribute(cls, name, value, previous))


def add_hook(register: Callable[[Any], Any], hook: Callable[..., Any]) -> Undo:
    """Calls ``register(hook)``, one of torch's registration functions, and returns the undo."""
    handle = register(hook)

    def undo() -> bool:
        handle.remove()
        return True

    return undo


def keys() -> list[Hashable]:
    """Returns the keys of the changes that are in place."""
    return list(_changes)


def _apply(scope: Scope, key: Hashable, change: Change) -> None:
    """Makes the change unless it is in place. Caller holds ``_lock``."""
    if key not in _changes:
        _changes[key] = (scope, change())


# ---- the two states ------------------------------------------------------------------------------


def lease() -> object:
    """Returns an object that keeps the changes of ``Scope.MODELS`` in place while it is alive.

    Makes the registered changes that are not in place. All callers share one lease.
    """
    global _lease, _is_undo_due
    current = None if _lease is None else _lease()
    if current is not None:
        return current
    with _hold_lock():
        current = None if _lease is None else _lease()
        if current is None:
            try:
                for key, change in _model_changes.items():
                    _apply(Scope.MODELS, key, change)
                current = _Lease()
                _lease = weakref.ref(current, _on_lease_end)
            except BaseException:
                _is_undo_due = True  # undoes the changes made so far
                raise
    return current


def install(changes: Mapping[Hashable, Change]) -> None:
    """Enters the state "installed" and makes the ``changes``, of ``Scope.INSTALL``."""
    global _is_installed
    with _hold_lock():
        _is_installed = True
        for key, change in changes.items():
            _apply(Scope.INSTALL, key, change)


def uninstall() -> None:
    """Leaves the state "installed" and undoes all changes that no live model needs."""
    global _is_installed, _is_exit_needed
    with _hold_lock():
        _is_installed = _is_exit_needed = False
        _undo_unneeded()


def has_live_models() -> bool:
    """Whether a sharded model is alive."""
    return _lease is not None and _lease() is not None


# ---- undoing changes -----------------------------------------------------------------------------


@contextmanager
def _hold_lock() -> Iterator[None]:
    """Holds the lock. Then undoes unneeded changes, if a lease has ended in the meantime."""
    try:
        with _lock:
            yield
    finally:
        _undo_if_due()


def _on_lease_end(_ended: weakref.ref[Any]) -> None:
    """Runs at the end of a lease or cycle, in any thread and at any point of the program."""
    global _is_undo_due
    if sys.is_finalizing():
        return
    _is_undo_due = True
    _undo_if_due()


def _undo_if_due() -> None:
    """Undoes changes that are not needed, if a lease has ended. Never blocks.

    If the lock is held, also by this thread, its holder undoes them afterwards.
    """
    global _is_undo_due
    while _is_undo_due and _lock.acquire(blocking=False):
        try:
            _is_undo_due = False
            if _is_iterating_over_hooks():
                _undo_after_garbage_collection()
            else:
                _undo_unneeded()
        finally:
            _lock.release()


def _undo_unneeded() -> None:
    """Undoes changes in reverse order. Caller holds ``_lock``."""
    needed_scopes = set()
    if _is_installed:
        needed_scopes = {Scope.INSTALL, Scope.MODELS}
    if has_live_models():
        needed_scopes |= {Scope.MODELS, Scope.EXIT}
    if _is_exit_needed:
        needed_scopes.add(Scope.EXIT)
    for key, (scope, undo) in reversed(list(_changes.items())):
        if scope not in needed_scopes and undo():
            del _changes[key]


_HOOK_ITERATIONS = {
    (os.path.join("torch", "optim", "optimizer.py"), "wrapper"),
    (os.path.join("torch", "nn", "modules", "module.py"), "register_parameter"),
}
"""Functions of torch (file, name) that iterate over dicts of global hooks."""


def _is_iterating_over_hooks() -> bool:
    """Whether a thread executes one of ``_HOOK_ITERATIONS``."""
    return any(map(_is_within_iteration, sys._current_frames().values()))


def _is_within_iteration(frame: FrameType | None) -> bool:
    while frame is not None:
        code = frame.f_code
        if any(
            code.co_name == name and code.co_filename.endswith(file)
            for file, name in _HOOK_ITERATIONS
        ):
            return True
        frame = frame.f_back
    return False


class _Cycle:
    """An object that only a garbage collection frees."""

    __slots__ = ("__weakref__", "itself")

    def __init__(self) -> None:
        self.itself = self


def _undo_after_garbage_collection() -> None:
    """Undoes unneeded changes at the next garbage collection. Caller holds ``_lock``.

    ``gc.callbacks`` is not used: a callback that removes itself makes Python skip the next one.
    """
    global _cycle
    if _cycle is None or _cycle() is None:
        _cycle = weakref.ref(_Cycle(), _on_lease_end)
