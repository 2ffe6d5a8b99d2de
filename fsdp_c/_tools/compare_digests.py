"""Digests and norms of tensors, and names of parameters, for the observer of ``compare``.

Imports only torch and the standard library, because processes that run torch without fsdp_c load
this file. No function copies a contiguous tensor as a whole.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn as nn

CHUNK_BYTES = 4 << 20
CHUNK_ELEMENTS = 4 << 20
"""The largest parts that are copied at a time, of a tensor to hash and of a norm."""

WRAPPERS = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
"""Components that wrappers add to parameter names. ``fsdp_c.names`` has the same set."""


def list_plain_tensors(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the plain tensors of this rank inside ``tensor``: of a DTensor, its local tensor."""
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        pending: Any = tensor
        yield from list_plain_tensors(pending.wait())
    elif type(tensor) not in (torch.Tensor, nn.Parameter) and hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        for inner in (getattr(tensor, name) for name in names):
            if isinstance(inner, torch.Tensor):  # a DTensor also has a mesh
                yield from list_plain_tensors(inner)
    elif tensor.is_sparse:
        yield from (tensor._indices(), tensor._values())
    else:
        yield tensor


def count_bytes(tensor: torch.Tensor) -> int:
    """Returns the bytes of the plain tensors of this rank inside ``tensor``."""
    return sum(plain.numel() * plain.itemsize for plain in list_plain_tensors(tensor))


def compute_digest(tensor: torch.Tensor | None) -> str:
    """Returns a digest of the dtypes, shapes and bits of this rank's part of ``tensor``, in hex.

    The digest of None is ``"None"``. Equal digests mean equal bits: 0.0 and -0.0 differ.
    """
    if tensor is None:
        return "None"
    hasher = hashlib.blake2b(digest_size=16)
    with torch.no_grad():
        for plain in list_plain_tensors(tensor.detach()):
            hasher.update(f"{plain.dtype} {tuple(plain.shape)} ".encode())
            _add_bits(hasher, plain)
    return hasher.hexdigest()


def _add_bits(hasher: Any, tensor: torch.Tensor) -> None:
    """Adds the bytes of a plain tensor. ``numpy()`` would forbid later resizes of the storage."""
    if tensor.numel() == 0 or tensor.is_meta:
        return
    flat = tensor.resolve_conj().resolve_neg().contiguous().view(-1)
    if flat.is_cpu:
        size = flat.numel() * flat.element_size()
        hasher.update((ctypes.c_char * size).from_address(flat.data_ptr()))
        return
    for chunk in flat.split(CHUNK_BYTES // flat.element_size()):
        _add_bits(hasher, chunk.cpu())


def compute_squared_norm(tensor: torch.Tensor | None) -> float:
    """Returns the sum of squares of this rank's part of ``tensor``, added in float64."""
    if tensor is None:
        return 0.0
    total = 0.0
    with torch.no_grad():
        for plain in list_plain_tensors(tensor.detach()):
            if plain.is_meta or not (plain.is_floating_point() or plain.is_complex()):
                continue
            for chunk in plain.reshape(-1).split(CHUNK_ELEMENTS):
                real_chunk = torch.view_as_real(chunk) if chunk.is_complex() else chunk
                total += float(real_chunk.double().square().sum())
    return total


def count_replicas(tensor: torch.Tensor, world_size: int) -> int:
    """Returns the number of ranks that hold the same part of ``tensor`` as this rank.

    All ranks hold a plain tensor. A part of a DTensor is repeated along the mesh dimensions with a
    ``Replicate`` placement.
    """
    placements = getattr(tensor, "placements", None)
    if placements is None:
        return world_size
    mesh: Any = tensor.device_mesh  # type: ignore[attr-defined]
    return math.prod(mesh.size(i) for i, p in enumerate(placements) if p.is_replicate())


def find_parameter_names() -> dict[int, str]:
    """Returns the names of the parameters of all live models, by ``id`` of the parameter.

    The names are those of the outermost module, without the components of wrappers.
    """
    modules: list[nn.Module] = [m for m in gc.get_objects() if issubclass(type(m), nn.Module)]
    children = {
        id(child)
        for module in modules
        for child in module.__dict__.get("_modules", {}).values()
        if child is not None
    }
    names: dict[int, str] = {}
    for module in modules:
        if id(module) in children or "_modules" not in module.__dict__:
            continue
        with contextlib.suppress(Exception):  # named_parameters() may be overridden
            for name, param in nn.Module.named_parameters(module):
                names.setdefault(id(param), clean_name(name))
    return names


def clean_name(name: str) -> str:
    """Removes the components of wrappers. The last component is the parameter's own name."""
    *path, own_name = name.split(".")
    return ".".join([*(part for part in path if part not in WRAPPERS), own_name])
