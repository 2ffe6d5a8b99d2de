"""How two runs of a client are compared: what their ranks noted, and the files they left.

Files are equal where their bytes are. Some formats put the time or a random number into
their files; those are opened and compared by what they hold, bit for bit.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import pickle
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

VOLATILE = ("time", "timestamp", "_per_second")
"""Ends of keys whose values tell the time rather than a result."""

LEAVES = (enum.Enum, type, types.FunctionType)
"""Objects that have a ``__dict__`` and are compared as one thing all the same."""


def differences(left: Path, right: Path) -> Iterator[str]:
    """What is not the same in two folders of files, one line each; nothing where they are equal."""
    names = {folder: _names(folder) for folder in (left, right)}
    yield from (f"{name}: only in the first" for name in sorted(names[left] - names[right]))
    yield from (f"{name}: only in the second" for name in sorted(names[right] - names[left]))
    for name in sorted(names[left] & names[right]):
        yield from _file_differences(name, left / name, right / name)


def _names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def _file_differences(name: str, left: Path, right: Path) -> Iterator[str]:
    if left.read_bytes() == right.read_bytes():
        return
    read = _reader(left)
    if read is None:
        yield f"{name}: the bytes differ"
        return
    yield from unequal(name, read(left), read(right))


def _reader(path: Path) -> Any:
    if path.suffix == ".json":
        return lambda path: json.loads(path.read_text())
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        return lambda path: torch.load(path, weights_only=False, map_location="cpu")
    if path.name == ".metadata":
        return _metadata
    return None


def _metadata(path: Path) -> Any:
    """DCP's metadata but for the identity of the one save."""
    made = pickle.loads(path.read_bytes())
    return dataclasses.replace(made, storage_meta=None)


def unequal(place: str, left: Any, right: Any) -> Iterator[str]:
    """Where two trees of results differ, one line each; volatile entries do not count."""
    if type(left) is not type(right):
        yield f"{place}: {type(left).__name__} and {type(right).__name__}"
    elif isinstance(left, dict):
        yield from _unequal_keys(place, left, right)
    elif isinstance(left, list | tuple):
        if len(left) != len(right):
            yield f"{place}: {len(left)} and {len(right)} items"
        for index, (one, other) in enumerate(zip(left, right)):
            yield from unequal(f"{place}[{index}]", one, other)
    elif isinstance(left, torch.Tensor):
        if not same_tensor(left, right):
            yield f"{place}: tensors differ"
    elif hasattr(left, "__dict__") and not isinstance(left, LEAVES):
        yield from _unequal_keys(place, vars(left), vars(right))
    elif isinstance(left, float):
        if left.hex() != right.hex():
            yield f"{place}: {left!r} and {right!r}"
    elif left != right:
        yield f"{place}: {left!r} and {right!r}"


def _unequal_keys(place: str, left: dict[Any, Any], right: dict[Any, Any]) -> Iterator[str]:
    if list(left) != list(right):
        yield f"{place}: keys {sorted(map(str, set(left) ^ set(right)))} or their order differ"
    for key in left:
        if key in right and not str(key).endswith(VOLATILE):
            yield from unequal(f"{place}.{key}", left[key], right[key])


def same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether dtype, shape and bits are the same (subclasses: of all their inner tensors)."""
    if type(left) is not type(right) or left.dtype != right.dtype or left.shape != right.shape:
        return False
    if hasattr(left, "__tensor_flatten__"):
        names, context = left.__tensor_flatten__()
        other_names, other = right.__tensor_flatten__()
        same = list(names) == list(other_names) and str(context) == str(other)
        return same and all(same_tensor(getattr(left, n), getattr(right, n)) for n in names)
    if left.layout != right.layout or left.device != right.device:
        return False
    return _bytes(left) == _bytes(right)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
