"""Reading safetensors files: the header is checked, tensors are views of the mapped file.

A file is eight bytes with the length of a JSON header, the header (name -> dtype, shape, range of
bytes), and the bytes of all tensors. Nothing is executed and nothing is read before it is used.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "U16": torch.uint16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I32": torch.int32,
    "U32": torch.uint32,
    "F32": torch.float32,
    "I64": torch.int64,
    "U64": torch.uint64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}

_LENGTH_BYTES = 8
_LARGEST_HEADER = 100_000_000


class SafetensorsFile(Mapping[str, torch.Tensor]):
    """The tensors of a file by name, in the order in which they lie in it; read-only by intent.

    Args:
        path: A ``.safetensors`` file.

    Raises:
        ValueError: the file is not what its header says; the message names file and tensor.
        OSError: it cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        size = self.path.stat().st_size
        with open(self.path, "rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            if size < _LENGTH_BYTES or length > min(_LARGEST_HEADER, size - _LENGTH_BYTES):
                raise self._broken(f"its header cannot be {length} bytes long")
            header = self._parsed(file.read(length))
        self._begin = _LENGTH_BYTES + length
        self._entries = {
            name: self._checked(name, entry, size - self._begin)
            for name, entry in header.items()
            if name != "__metadata__"
        }
        order = sorted(self._entries, key=lambda name: self._entries[name][2])
        self._entries = {name: self._entries[name] for name in order}
        self._bytes: torch.Tensor | None = None
        self._size = size

    def _broken(self, why: str) -> ValueError:
        return ValueError(f"{self.path} is not a safetensors file: {why}")

    def _parsed(self, text: bytes) -> dict[str, Any]:
        try:
            header = json.loads(text)
        except ValueError as error:
            raise self._broken(f"its header is no JSON ({error})") from None
        if not isinstance(header, dict):
            raise self._broken("its header is no JSON object")
        return header

    def _checked(
        self, name: str, entry: Any, size: int
    ) -> tuple[torch.dtype, tuple[int, ...], int, int]:
        """dtype, shape, first and last byte of one tensor."""
        try:
            kind, shape = entry["dtype"], tuple(entry["shape"])
            begin, end = entry["data_offsets"]
            numbers = [*shape, begin, end]
        except (TypeError, KeyError, ValueError):
            raise self._broken(f"the entry of '{name}' is incomplete") from None
        if kind not in DTYPES:
            raise self._broken(f"'{name}' has the unknown dtype {kind!r}")
        if not all(type(number) is int and number >= 0 for number in numbers):
            raise self._broken(f"'{name}' has a shape or range that is no list of sizes")
        if end - begin != math.prod(shape) * DTYPES[kind].itemsize or end > size:
            raise self._broken(
                f"'{name}' ({kind}, shape {list(shape)}) does not fit bytes {begin} to {end}"
            )
        return DTYPES[kind], shape, begin, end

    def __getitem__(self, name: str) -> torch.Tensor:
        dtype, shape, begin, end = self._entries[name]
        if begin == end:
            return torch.empty(shape, dtype=dtype)
        if self._bytes is None:
            self._bytes = torch.from_file(str(self.path), size=self._size, dtype=torch.uint8)
        piece = self._bytes[self._begin + begin : self._begin + end]
        if piece.storage_offset() % dtype.itemsize:
            piece = piece.clone()  # the format does not promise alignment
        return piece.view(dtype).view(shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def facts(self, name: str) -> tuple[torch.dtype, torch.Size]:
        """dtype and shape of a tensor, from the header."""
        dtype, shape, _, _ = self._entries[name]
        return dtype, torch.Size(shape)


class SafetensorsIndex(Mapping[str, torch.Tensor]):
    """The tensors of a checkpoint in several files, by its ``.safetensors.index.json``.

    Raises:
        ValueError: the index is none, or names a tensor that its file does not have.
        OSError: a file cannot be opened.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = Path(path)
        try:
            places = dict(json.loads(path.read_bytes())["weight_map"])
        except (ValueError, KeyError, TypeError):
            raise ValueError(f"{path} is not an index of safetensors files") from None
        files = {name: SafetensorsFile(path.parent / name) for name in sorted(set(places.values()))}
        self._files: dict[str, SafetensorsFile] = {}
        for name, place in sorted(places.items(), key=lambda item: item[1]):
            if name not in files[place]:
                raise ValueError(f"{path} places '{name}' in {place}, which does not have it")
            self._files[name] = files[place]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._files[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def facts(self, name: str) -> tuple[torch.dtype, torch.Size]:
        """dtype and shape of a tensor, from its file's header."""
        return self._files[name].facts(name)


def open_safetensors(path: str | os.PathLike[str]) -> SafetensorsFile | SafetensorsIndex:
    """A file, the files of an index, or the one or the other in a folder.

    Raises:
        FileNotFoundError: nothing of the kind is there.
        ValueError: what is there is broken.
    """
    path = Path(path)
    if path.is_dir():
        found = [
            *sorted(path.glob("*.safetensors.index.json")),
            *sorted(path.glob("*.safetensors")),
        ]
        if not found:
            raise FileNotFoundError(f"no safetensors file in {path}")
        path = found[0]
    return SafetensorsIndex(path) if path.suffix == ".json" else SafetensorsFile(path)
