"""The source of ``load_full_state_dict``, and collectives of the ranks that load together.

A failure on one rank raises on all ranks, so that no rank waits in a collective forever.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from .._runtime import object_collectives
from ..names import clean_tensor_name
from .safetensors import open_safetensors

Source = Mapping[str, Any] | str | os.PathLike[str] | None


def is_extra_state(name: str) -> bool:
    """Whether the value of ``name`` is an extra state. It may be any object, also a tensor."""
    return name.rpartition(".")[2] == "_extra_state"


@dataclass
class Header:
    """The contents of the source: dtype and shape of its tensors, and its other values.

    ``objects`` has extra states and values that are not tensors. ``unsent`` has the names of those
    that are not sent, because the model of the reading rank does not have them.
    """

    tensors: dict[str, tuple[torch.dtype, torch.Size]] = field(default_factory=dict)
    objects: dict[str, Any] = field(default_factory=dict)
    unsent: list[str] = field(default_factory=list)


class LoadingRanks:
    """Collectives of the ranks that load together.

    Raises ``ValueError`` if this rank is not in ``group``.
    """

    def __init__(self, src: int, group: dist.ProcessGroup | None) -> None:
        if dist.is_initialized() and dist.get_rank(group) < 0:
            raise ValueError(
                f"load_full_state_dict: rank {dist.get_rank()} is not in `group`; call the "
                "function only on ranks of the group"
            )
        self.src = src
        self.group = group
        self.size = dist.get_world_size(group) if dist.is_initialized() else 1
        self.is_source = self.size == 1 or dist.get_rank() == src
        device_types = {"cpu"}
        if dist.is_initialized():
            process_group = group if group is not None else dist.group.WORLD
            device_types = {device.type for device in process_group._device_types}  # type: ignore[union-attr]
        self.device_types = device_types

    def choose_device(self, destinations: Iterable[torch.device]) -> torch.device:
        """Returns the device of broadcasts, which has the same type on all ranks.

        The type is that of the first destination on each rank that has any, if the group supports
        it. If the types differ, or none is supported, it is the CPU or what the group supports.
        """
        own_device = next(iter(destinations), None)
        types = sorted(self.device_types)
        own_type = None if own_device is None else own_device.type
        votes = self.reduce_max([int(own_type == name) for name in types])
        chosen = [name for name, vote in zip(types, votes) if vote]
        device_type = chosen[0] if len(chosen) == 1 else self._default_type
        if own_device is not None and own_type == device_type:
            return own_device
        return torch.device(device_type)

    @property
    def _default_type(self) -> str:
        return "cpu" if "cpu" in self.device_types else min(self.device_types)

    def broadcast(self, buffer: torch.Tensor) -> Callable[[], Any]:
        """Starts a broadcast from the source rank. Returns a function that waits for it."""
        if self.size == 1:
            return lambda: None
        work: Any = dist.broadcast(buffer, src=self.src, group=self.group, async_op=True)
        return work.wait

    def broadcast_object(self, message: Any) -> Any:
        """Returns the source rank's ``message``, which must be picklable, on all ranks."""
        if self.size == 1:
            return message
        return object_collectives.broadcast_object(message, self.src, self.group)

    def reduce_max(self, values: list[int]) -> list[int]:
        """Returns the maximum over the ranks of each of ``values``, equally many on each rank."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.int64, device="cpu").to(self._default_type)
        dist.all_reduce(tensor, dist.ReduceOp.MAX, self.group)
        return tensor.tolist()

    def raise_if_any_failed(self, failure: Exception | None, peer_message: str) -> None:
        """Raises on all ranks if at least one rank has failed.

        A rank with a ``failure`` raises this exception. Other ranks raise a ``RuntimeError`` with
        ``peer_message``.
        """
        (any_failed,) = self.reduce_max([failure is not None])
        if failure is not None:
            raise failure
        if any_failed:
            raise RuntimeError(f"load_full_state_dict: another rank {peer_message}")


class Reader:
    """Reads the source's tensors under the model's names."""

    def __init__(self, source: Any, rename: Callable[[str], str | None] | None) -> None:
        if isinstance(source, (str, os.PathLike)):
            source = open_safetensors(source)
        if not isinstance(source, Mapping):
            raise TypeError(
                "load_full_state_dict expects a state dict or a path on the source rank, not "
                f"{type(source).__name__}"
            )
        self._source = source
        self._keys: dict[str, str] = {}
        for key in source:
            name = rename(key) if rename is not None else key
            if name is None:
                continue
            if not isinstance(name, str):
                raise TypeError(f"load_full_state_dict: names should be strings, not {name!r}")
            name = clean_tensor_name(name)
            if name in self._keys:
                raise ValueError(f"both '{self._keys[name]}' and '{key}' map to '{name}'")
            self._keys[name] = key

    def read_header(self, targets: Collection[str]) -> Header:
        """Returns the header, without objects that are not in ``targets``, the model's names."""
        header = Header()
        get_dtype_and_shape = getattr(self._source, "get_dtype_and_shape", None)
        for name, key in self._keys.items():
            if get_dtype_and_shape is not None and not is_extra_state(name):
                header.tensors[name] = get_dtype_and_shape(key)
                continue
            value = self._source[key]
            if isinstance(value, DTensor):
                raise TypeError(f"'{key}' is a DTensor; load_full_state_dict takes full tensors")
            if name in targets and isinstance(value, torch.Tensor):
                _check_values(key, value)
            if isinstance(value, torch.Tensor) and is_extra_state(name):
                header.objects[name] = value.detach().cpu().clone()  # pickled without its storage
            elif isinstance(value, torch.Tensor):
                header.tensors[name] = (value.dtype, value.shape)
            elif name in targets:
                header.objects[name] = value
            else:
                header.unsent.append(name)
        return header

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._source[self._keys[name]].detach()


def _check_values(key: str, tensor: torch.Tensor) -> None:
    if tensor.is_meta or tensor.layout is not torch.strided:
        reason = "has no values (meta)" if tensor.is_meta else f"is sparse ({tensor.layout})"
        raise TypeError(f"'{key}' {reason}; load_full_state_dict takes dense tensors with values")


def open_source(
    source: Source,
    rename: Callable[[str], str | None] | None,
    shared_file: bool,
    targets: Collection[str],
    ranks: LoadingRanks,
    prepare: Callable[[], Any],
) -> tuple[Reader | None, Header]:
    """Opens the source. Returns the reader, if this rank reads, and the header.

    ``prepare`` runs on the source rank, unless all ranks read a shared file. A failure on one rank
    raises on all ranks.
    """
    reader: Reader | None = None
    header = Header()
    failure: Exception | None = None
    pickled_header = b""
    if ranks.is_source or shared_file:
        try:
            if shared_file and not isinstance(source, (str, os.PathLike)):
                raise TypeError("shared_file=True needs the path of a file")
            reader = Reader(source, rename)
            header = reader.read_header(targets)
            if not shared_file:
                prepare()
                pickled_header = _pickle_header(header) if ranks.size > 1 else b""
        except Exception as error:
            failure = error
    if shared_file:
        ranks.raise_if_any_failed(failure, "cannot read the source; nothing was loaded")
        return reader, header
    reason = None if failure is None else f"{type(failure).__name__}: {failure}"
    reason, pickled_header = ranks.broadcast_object((reason, pickled_header))
    if failure is not None:
        raise failure
    if reason is not None:
        raise RuntimeError(
            f"load_full_state_dict cannot read the source: {reason} (on rank {ranks.src})"
        )
    if not ranks.is_source:
        try:
            header = pickle.loads(pickled_header)
        except Exception as error:  # a class that this rank cannot import
            failure = error
    ranks.raise_if_any_failed(
        failure, "cannot unpickle the values of the source rank; nothing was loaded"
    )
    return reader, header


def _pickle_header(header: Header) -> bytes:
    try:
        return pickle.dumps(header)
    except Exception as error:
        for name, value in header.objects.items():
            try:
                pickle.dumps(value)
            except Exception as reason:
                raise TypeError(
                    f"'{name}' cannot be sent to the other ranks, because its "
                    f"{type(value).__name__} cannot be pickled: {reason}"
                ) from error
        raise
