"""Plans buckets of full tensors, packs them on the source rank, and unpacks them into shards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import distribute_tensor

from .destinations import Destination
from .source import Reader

_ALIGNMENT = 16
HEADER_BYTES = 16
"""Bytes before the data of a bucket. The first byte is 1 if the source rank has failed."""


@dataclass(frozen=True)
class Chunk:
    """Rows of a tensor from ``first`` on, at byte ``offset`` of a bucket. A scalar is one row."""

    name: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    first: int
    offset: int

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.sizes) * self.dtype.itemsize


def plan_buckets(
    tensors: dict[str, tuple[torch.dtype, torch.Size]],
    destinations: dict[str, Destination],
    limit: int,
) -> list[list[Chunk]]:
    """Returns buckets of at most ``limit`` bytes, with chunks in the order of the source.

    A row of more than ``limit`` bytes gets a separate bucket, and so does such a tensor that cannot
    be split into rows.
    """
    buckets: list[list[Chunk]] = []
    used = limit
    for name, (dtype, shape) in tensors.items():
        rows = shape[0] if shape else 1
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        is_one_row = destinations[name].starts is None or not shape
        first = 0
        while first < rows:
            free = max(limit - used, 0)
            count = rows if is_one_row else min(rows - first, free // max(row_bytes, 1))
            if count * row_bytes > free or count == 0:
                if used > 0:  # continue in a new bucket
                    buckets.append([])
                    used = 0
                    continue
                count = max(count, 1)
            sizes = (count, *shape[1:]) if shape else ()
            chunk = Chunk(name, dtype, sizes, first, used)
            buckets[-1].append(chunk)
            used = -(-chunk.end // _ALIGNMENT) * _ALIGNMENT
            first += count
    return buckets


def _view_chunk(typed: dict[torch.dtype, torch.Tensor], buffer: torch.Tensor, chunk: Chunk) -> Any:
    """Returns a view of the chunk in its bucket."""
    if chunk.dtype not in typed:
        length = buffer.numel() // chunk.dtype.itemsize * chunk.dtype.itemsize
        typed[chunk.dtype] = buffer[:length].view(chunk.dtype)
    strides = [math.prod(chunk.sizes[i + 1 :]) for i in range(len(chunk.sizes))]
    start = (HEADER_BYTES + chunk.offset) // chunk.dtype.itemsize
    return typed[chunk.dtype].as_strided(chunk.sizes, strides, start)


def pack_bucket(reader: Reader, bucket: list[Chunk], buffer: torch.Tensor) -> None:
    typed: dict[torch.dtype, torch.Tensor] = {}
    views, sources = [], []
    for chunk in bucket:
        tensor = reader[chunk.name]
        if chunk.sizes and chunk.sizes[0] < tensor.shape[0]:
            tensor = tensor.narrow(0, chunk.first, chunk.sizes[0])
        views.append(_view_chunk(typed, buffer, chunk))
        sources.append(tensor)
    if views:
        torch._foreach_copy_(views, sources)


def unpack_bucket(
    bucket: Sequence[Chunk], buffer: torch.Tensor, destinations: dict[str, Destination]
) -> None:
    typed: dict[torch.dtype, torch.Tensor] = {}
    copies = [
        copy
        for chunk in bucket
        for copy in iterate_copies(
            _view_chunk(typed, buffer, chunk), chunk.first, destinations[chunk.name]
        )
    ]
    copy_all(copies)


def copy_all(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if copies:
        to, values = zip(*copies)
        torch._foreach_copy_(to, values)


def iterate_copies(
    rows: torch.Tensor, first: int, destination: Destination
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields (destination, source) for the part of ``rows`` that this rank's shard has.

    ``rows`` are rows of the full tensor from index ``first`` on.
    """
    local = destination.local
    if destination.starts is None:
        value: Any = destination.value
        distributed = distribute_tensor(
            rows.to(local.device), value.device_mesh, value.placements, src_data_rank=None
        )
        yield local, distributed._local_tensor
        return
    if local.ndim == 0:
        yield local, rows
        return
    begin = max(first, destination.starts[0])
    end = min(first + rows.shape[0], destination.starts[0] + local.shape[0])
    if end <= begin or local.numel() == 0:
        return
    if end - begin < rows.shape[0]:
        rows = rows.narrow(0, begin - first, end - begin)
    if end - begin < local.shape[0]:
        local = local.narrow(0, begin - destination.starts[0], end - begin)
    for dim in range(1, local.ndim):
        if rows.shape[dim] != local.shape[dim]:
            rows = rows.narrow(dim, destination.starts[dim], local.shape[dim])
    yield local, rows
