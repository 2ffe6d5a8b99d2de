"""Compares two runs of a client: the reports of their ranks and the files that they wrote.

Files are first compared by their bytes. Some formats store the time or a random number; such files
are loaded, and their contents are compared bit for bit.
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
"""Suffixes of keys whose values depend on the time of the run."""

LEAVES = (enum.Enum, type, types.FunctionType)
"""Types that have a ``__dict__`` but are compared as a whole."""


def differences(left: Path, right: Path) -> Iterator[str]:
    """Yields one line per difference between the files of two folders."""
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
    yield from value_differences(name, read(left), read(right))


def _reader(path: Path) -> Any:
    if path.suffix == ".json":
        return lambda path: json.loads(path.read_text())
    if path.suffix in (".pt", ".pth", ".bin", ".ckpt"):
        return lambda path: torch.load(path, weights_only=False, map_location="cpu")
    if path.name == ".metadata":
        return _metadata
    return None


def _metadata(path: Path) -> Any:
    """Reads DCP's metadata without the identity of the save operation."""
    metadata = pickle.loads(path.read_bytes())
    return dataclasses.replace(metadata, storage_meta=None)


def value_differences(path: str, left: Any, right: Any) -> Iterator[str]:
    """Yields one line per difference between two nested results. Volatile entries are ignored."""
    if type(left) is not type(right):
        yield f"{path}: {type(left).__name__} and {type(right).__name__}"
    elif isinstance(left, dict):
        yield from _dict_differences(path, left, right)
    elif isinstance(left, list | tuple):
        if len(left) != len(right):
            yield f"{path}: {len(left)} and {len(right)} items"
        for index, (left_item, right_item) in enumerate(zip(left, right)):
            yield from value_differences(f"{path}[{index}]", left_item, right_item)
    elif isinstance(left, torch.Tensor):
        if not same_tensor(left, right):
            yield f"{path}: tensors differ"
    elif hasattr(left, "__dict__") and not isinstance(left, LEAVES):
        yield from _dict_differences(path, vars(left), vars(right))
    elif isinstance(left, float):
        if left.hex() != right.hex():
            yield f"{path}: {left!r} and {right!r}"
    elif left != right:
        yield f"{path}: {left!r} and {right!r}"


def _dict_differences(path: str, left: dict[Any, Any], right: dict[Any, Any]) -> Iterator[str]:
    if list(left) != list(right):
        yield f"{path}: keys {sorted(map(str, set(left) ^ set(right)))} or their order differ"
    for key in left:
        if key in right and not str(key).endswith(VOLATILE):
            yield from value_differences(f"{path}.{key}", left[key], right[key])


def same_tensor(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Returns whether dtype, shape and bits are equal, for subclasses of all inner tensors."""
    if type(left) is not type(right) or left.dtype != right.dtype or left.shape != right.shape:
        return False
    if hasattr(left, "__tensor_flatten__"):
        names, context = left.__tensor_flatten__()
        right_names, right_context = right.__tensor_flatten__()
        same = list(names) == list(right_names) and str(context) == str(right_context)
        return same and all(same_tensor(getattr(left, n), getattr(right, n)) for n in names)
    if left.layout != right.layout or left.device != right.device:
        return False
    return _bytes(left) == _bytes(right)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
