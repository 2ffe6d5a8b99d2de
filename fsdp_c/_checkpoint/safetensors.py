"""Reads safetensors files with the safetensors library, which checks the header and maps the file.

The module executes no code of a file, and reads a tensor at its first use.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import torch

try:
    from safetensors import SafetensorError, safe_open
except ImportError:
    safe_open = None  # type: ignore[assignment,misc]

_LENGTH_BYTES = 8


def _check_library() -> None:
    """Raises ``ImportError`` if the safetensors library is missing or too old.

    Called when a file is opened, so that ``import fsdp_c`` works without the library.
    """
    if not hasattr(safe_open, "offset_keys"):  # added in safetensors 0.6
        raise ImportError(
            "reading safetensors files needs the library safetensors: "
            "pip install 'safetensors>=0.6'"
        )


class SafetensorsFile(Mapping[str, torch.Tensor]):
    """Maps names to the tensors of a file, in file order. Callers must not write to the tensors.

    Args:
        path: A ``.safetensors`` file.

    Raises:
        ValueError: The size of the file does not match its header, the header does not cover the
            file, or the header has a name twice.
        OSError: The file cannot be opened.
        ImportError: The safetensors library is missing or too old.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        _check_library()
        self.path = Path(path)
        try:
            self._file: Any = safe_open(str(self.path), framework="pt", device="cpu")
        except SafetensorError as error:
            raise self._make_error(str(error)) from None
        except OSError as error:
            if str(self.path) not in str(error):
                raise OSError(f"{self.path}: {error}") from None
            raise
        self._names = dict.fromkeys(self._file.offset_keys())
        self._check_names()

    def _make_error(self, reason: str) -> ValueError:
        return ValueError(f"{self.path} is not a safetensors file: {reason}")

    def _check_names(self) -> None:
        """Raises for duplicate names in the header. The library would use the last entry."""
        with open(self.path, "rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            header = file.read(length)

        def check_unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            result = dict(pairs)
            if len(result) < len(pairs):
                raise self._make_error("its header has a name twice")
            return result

        json.loads(header, object_pairs_hook=check_unique)

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self._names:
            raise KeyError(name)
        tensor: torch.Tensor = self._file.get_tensor(name)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)

    def get_dtype_and_shape(self, name: str) -> tuple[torch.dtype, torch.Size]:
        """Returns dtype and shape of a tensor, without reading its values."""
        tensor = self[name]
        return tensor.dtype, tensor.shape


class SafetensorsIndex(Mapping[str, torch.Tensor]):
    """Maps names to the tensors of a checkpoint in several files (``.safetensors.index.json``).

    The index has the files' paths, relative to its folder. Links are followed, because Hugging
    Face's cache consists of links.

    Raises:
        ValueError: The index is invalid, names a file outside of its folder, or names a tensor that
            its file does not have; or a file is invalid.
        OSError: A file cannot be opened.
        ImportError: The safetensors library is missing or too old.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        path = Path(path)
        index = _read_index(path)
        files = {name: SafetensorsFile(path.parent / name) for name in sorted(set(index.values()))}
        self._files: dict[str, SafetensorsFile] = {}
        for name, file_name in sorted(index.items(), key=lambda item: item[1]):
            if name not in files[file_name]:
                raise ValueError(f"{path} places '{name}' in {file_name}, which does not have it")
            self._files[name] = files[file_name]

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._files[name][name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def get_dtype_and_shape(self, name: str) -> tuple[torch.dtype, torch.Size]:
        """Returns dtype and shape of a tensor."""
        return self._files[name].get_dtype_and_shape(name)


def _read_index(path: Path) -> dict[str, str]:
    """Returns the map from tensor names to file names in the index at ``path``."""
    try:
        index = dict(json.loads(path.read_bytes())["weight_map"])
    except (ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(f"{path} is not an index of safetensors files") from None
    for name, file_name in index.items():
        if not isinstance(file_name, str) or not file_name or "\0" in file_name:
            raise ValueError(f"{path} places '{name}' in {file_name!r}, which is not a file name")
        if PurePath(file_name).is_absolute() or ".." in PurePath(file_name).parts:
            raise ValueError(f"{path} places '{name}' in {file_name!r}, which is not in its folder")
    return index


def _choose_file(folder: Path) -> Path:
    """Returns the index or file of the name ``model``, else the index, else the file."""
    suffixes = (".safetensors.index.json", ".safetensors")
    for suffix in suffixes:
        if (folder / f"model{suffix}").is_file():
            return folder / f"model{suffix}"
    for suffix in suffixes:
        # macOS writes files "._name" on foreign file systems.
        paths = [path for path in sorted(folder.glob(f"*{suffix}")) if path.name[0] != "."]
        if len(paths) > 1:
            names = ", ".join(path.name for path in paths)
            raise ValueError(f"{folder} has several checkpoints: {names}; pass the path of one")
        if paths:
            return paths[0]
    raise FileNotFoundError(f"no safetensors file in {folder}")


def open_safetensors(path: str | os.PathLike[str]) -> SafetensorsFile | SafetensorsIndex:
    """Opens a file, the files of an index, or a folder with either.

    Raises:
        FileNotFoundError: The path is empty, does not exist, or is a folder without such a file.
        ValueError: The file or index is invalid, or a folder has several, and none is ``model``.
        ImportError: The safetensors library is missing or too old.
    """
    if not os.fspath(path):  # Path("") is the current folder
        raise FileNotFoundError("the path is empty; expected a safetensors file or its folder")
    path = Path(path)
    if path.is_dir():
        path = _choose_file(path)
    return SafetensorsIndex(path) if path.suffix == ".json" else SafetensorsFile(path)
