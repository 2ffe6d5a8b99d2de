"""torch's mesh infos, extended to notify parameter groups of assignments.

torch's FSDP2 reads the process groups from a mesh info at each collective. Fault-tolerance
libraries assign other process groups to the mesh info. The C core has its own references to process
groups, so it must be notified of an assignment.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard._fsdp_common import DataParallelMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_init import _init_default_mesh

from .._compat import patches

_SUBSCRIBERS = "_fsdp_c_subscribers"


_default_meshes: weakref.WeakValueDictionary[Any, DeviceMesh] = weakref.WeakValueDictionary()
_default_group: weakref.ref[Any] | None = None


def get_default_mesh() -> DeviceMesh:
    """Returns torch's default mesh, cached per thread until the default process group changes.

    The cache has weak references. With a dispatch mode the mesh is made anew.
    """
    global _default_group
    if not dist.is_initialized() or torch._C._len_torch_dispatch_stack() > 0:
        return _init_default_mesh()
    group = dist.group.WORLD
    if _default_group is None or _default_group() is not group:
        _default_meshes.clear()
        _default_group = weakref.ref(group)
    key = (threading.get_ident(), torch._C._get_accelerator().type)
    mesh = _default_meshes.get(key)
    if mesh is None:
        mesh = _default_meshes[key] = _init_default_mesh()
    return mesh


class MeshSubscriber(Protocol):
    """A parameter group that a mesh info notifies of assignments."""

    def _refresh_process_groups(self) -> None: ...


def _set_and_notify(self: Any, name: str, value: Any) -> None:
    """Sets an attribute and notifies all subscribers.

    If a subscriber raises, restores the previous value, notifies all again and raises.
    """
    absent = object()
    previous = self.__dict__.get(name, absent)
    object.__setattr__(self, name, value)
    # An object that was created from a notifying class has no subscribers.
    subscribers = _list_subscribers(self)
    try:
        for subscriber in subscribers:
            subscriber._refresh_process_groups()
    except BaseException:
        if previous is absent:
            object.__delattr__(self, name)
        else:
            object.__setattr__(self, name, previous)
        for subscriber in subscribers:
            with contextlib.suppress(Exception):  # the first exception is raised
                subscriber._refresh_process_groups()
        raise


@functools.cache
def _make_notifying_class(cls: type) -> type:
    """Returns a subclass of ``cls`` whose ``__setattr__`` notifies."""

    def convert_to_base(value: Any) -> Any:
        if type(value) is not notifying_class:
            return value
        copy: Any = object.__new__(cls)
        vars(copy).update(vars(value))
        return copy

    def is_equal(self: Any, other: object) -> bool:
        """Compares as ``cls`` does. Dataclasses are unequal if their classes differ."""
        return bool(convert_to_base(self) == convert_to_base(other))

    namespace = {
        "__setattr__": _set_and_notify,
        "__eq__": is_equal,
        "__hash__": cls.__hash__,
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    notifying_class = type(cls.__name__, (cls,), namespace)
    return notifying_class


_notifying_infos: dict[int, weakref.ref[Any]] = {}
"""Maps the ``id`` of a mesh info whose class :func:`subscribe` has replaced to a weak reference."""


def subscribe(info: DataParallelMeshInfo, subscriber: MeshSubscriber) -> None:
    """Makes ``info`` notify ``subscriber`` of assignments to its attributes."""
    references: set[weakref.ref[Any]] = info.__dict__.setdefault(_SUBSCRIBERS, set())
    references.add(weakref.ref(subscriber, references.discard))
    cls: Any = type(info)
    if cls.__setattr__ is not _set_and_notify:
        info_id = id(info)
        patches.apply(patches.Scope.MODELS, "mesh infos", lambda: _restore_unused_classes)
        _notifying_infos[info_id] = weakref.ref(info, lambda _: _notifying_infos.pop(info_id, None))
        info.__class__ = _make_notifying_class(cls)


def unsubscribe(info: DataParallelMeshInfo, subscriber: MeshSubscriber) -> None:
    """Undoes :func:`subscribe`. Restores the class of ``info`` if it has no other subscriber."""
    info.__dict__.get(_SUBSCRIBERS, set()).discard(weakref.ref(subscriber))
    if not _list_subscribers(info):
        _restore_class(info)


def _list_subscribers(info: DataParallelMeshInfo) -> list[MeshSubscriber]:
    # The GIL makes the copy atomic. The iteration of a WeakSet fails if another thread adds to it.
    references = list(info.__dict__.get(_SUBSCRIBERS, ()))
    return [s for reference in references if (s := reference()) is not None]


def _restore_unused_classes() -> bool:
    """Restores the classes of mesh infos without subscribers.

    Returns whether no mesh info has subscribers.
    """
    infos = [
        info for reference in list(_notifying_infos.values()) if (info := reference()) is not None
    ]
    for info in infos:
        if not _list_subscribers(info):
            _restore_class(info)
    return not any(map(_list_subscribers, infos))


def _restore_class(info: DataParallelMeshInfo) -> None:
    cls: Any = type(info)
    if cls.__dict__.get("__setattr__") is _set_and_notify:  # otherwise other code derived a class
        info.__dict__.pop(_SUBSCRIBERS, None)
        info.__class__ = cls.__base__
        _notifying_infos.pop(id(info), None)


def list_process_groups(info: Any, post_forward: Any) -> tuple[Any, Any, Any, Any]:
    """Returns the groups of a unit's collectives: shard, reduce-scatter, replicate, post-forward.

    Args:
        info: The mesh info of the unit.
        post_forward: The mesh info between forward and backward, or None. Gradients are not
            all-reduced over its replicate group.
    """
    return (
        getattr(info, "shard_process_group", None),
        getattr(info, "reduce_scatter_process_group", None),  # not in torch 2.11
        getattr(info, "replicate_process_group", None),
        getattr(post_forward, "shard_process_group", None),
    )


def has_own_size(group: Any) -> bool:
    """Whether the class of ``group`` overrides ``size()``: the size may change in each step."""
    return getattr(type(group), "size", None) is not dist.ProcessGroup.size


def get_size_and_rank(group: Any, size: int, rank: int) -> tuple[int, int]:
    """Returns size and rank of a process group.

    For a group with its own ``size()``, returns ``size`` and ``rank`` of the mesh, because
    ``size()`` of a fault-tolerant group may wait for a quorum.
    """
    return (size, rank) if has_own_size(group) else (group.size(), group.rank())


def get_group_name(group: Any) -> str:
    """Returns the registered name of a process group, or its class name."""
    try:
        return str(group.group_name)
    except (AttributeError, RuntimeError):
        return type(group).__name__


def find_unregistered_group(group: Any) -> dist.ProcessGroup | None:
    """Returns ``group`` if it is a process group of torch that is not registered under its name.

    Returns ``None`` in all other cases.
    """
    if not isinstance(group, dist.ProcessGroup):
        return None
    try:
        return None if _resolve_process_group(get_group_name(group)) is group else group  # type: ignore[arg-type]
    except RuntimeError:
        return group
