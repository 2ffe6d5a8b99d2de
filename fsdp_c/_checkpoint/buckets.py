"""Plans buckets of full tensors, packs them on the source rank, and unpacks them into shards."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import distribute_tensor

from .destinations import Destination
from .source import LoadingRanks, Reader

_ALIGNMENT = 16
HEADER_BYTES = 16
"""Bytes before the data of a bucket. The first byte is 1 if the source rank has failed."""


@dataclass(frozen=True)
class Chunk:
    """Rows of a tensor from ``first_row`` on, at byte ``offset`` of a bucket. A scalar is a row."""

    name: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    first_row: int
    offset: int

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.sizes) * self.dtype.itemsize


def plan_buckets(
    tensors: dict[str, tuple[torch.dtype, torch.Size]], undivided: set[str], limit: int
) -> list[list[Chunk]]:
    """Returns buckets of at most ``limit`` bytes, with chunks in the order of the source.

    A row of more than ``limit`` bytes gets a separate bucket. Tensors in ``undivided`` count as one
    row.
    """
    buckets: list[list[Chunk]] = [[]]
    used_bytes = 0
    for name, (dtype, shape) in tensors.items():
        rows = shape[0] if shape else 1
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        is_one_row = name in undivided or not shape
        first_row = 0
        while first_row < rows:
            free_bytes = max(limit - used_bytes, 0)
            count = rows if is_one_row else min(rows - first_row, free_bytes // max(row_bytes, 1))
            if count * row_bytes > free_bytes or count == 0:
                if used_bytes > 0:  # continue in a new bucket
                    buckets.append([])
                    used_bytes = 0
                    continue
                count = max(count, 1)
            sizes = (count, *shape[1:]) if shape else ()
            chunk = Chunk(name, dtype, sizes, first_row, used_bytes)
            buckets[-1].append(chunk)
            used_bytes = -(-chunk.end // _ALIGNMENT) * _ALIGNMENT
            first_row += count
    return buckets if buckets[0] else []


def plan_buckets_on_all_ranks(
    tensors: dict[str, tuple[torch.dtype, torch.Size]],
    destinations: dict[str, Destination],
    limit: int,
    ranks: LoadingRanks,
) -> list[list[Chunk]]:
    """Returns equal buckets on all ranks, of the tensors that at least one rank loads.

    Raises on all ranks if their limits differ.
    """
    needs = []  # 0: not loaded, 1: loaded, 2: loaded undivided
    for name in tensors:
        has_block = name in destinations and destinations[name].starts is not None
        needs.append(0 if name not in destinations else 1 if has_block else 2)
    high, low, *needs = ranks.reduce_max([limit, -limit, *needs])
    if high != -low:
        raise RuntimeError(
            "load_full_state_dict: ranks broadcast different buckets. This rank has buckets of "
            f"{limit} bytes, other ranks of {-low} to {high} bytes. Pass equal bucket_bytes"
        )
    need_of = dict(zip(tensors, needs))
    loaded = {name: entry for name, entry in tensors.items() if need_of[name]}
    return plan_buckets(loaded, {name for name in loaded if need_of[name] == 2}, limit)


def _view_chunk(
    buffers_by_dtype: dict[torch.dtype, torch.Tensor], buffer: torch.Tensor, chunk: Chunk
) -> Any:
    """Returns a view of the chunk in its bucket."""
    if chunk.dtype not in buffers_by_dtype:
        length = buffer.numel() // chunk.dtype.itemsize * chunk.dtype.itemsize
        buffers_by_dtype[chunk.dtype] = buffer[:length].view(chunk.dtype)
    strides = [math.prod(chunk.sizes[i + 1 :]) for i in range(len(chunk.sizes))]
    start = (HEADER_BYTES + chunk.offset) // chunk.dtype.itemsize
    return buffers_by_dtype[chunk.dtype].as_strided(chunk.sizes, strides, start)


def pack_bucket(reader: Reader, bucket: list[Chunk], buffer: torch.Tensor) -> None:
    buffers_by_dtype: dict[torch.dtype, torch.Tensor] = {}
    views, sources = [], []
    for chunk in bucket:
        tensor = reader[chunk.name]
        if chunk.sizes and chunk.sizes[0] < tensor.shape[0]:
            tensor = tensor.narrow(0, chunk.first_row, chunk.sizes[0])
        views.append(_view_chunk(buffers_by_dtype, buffer, chunk))
        sources.append(tensor)
    if views:
        torch._foreach_copy_(views, sources)


def unpack_bucket(
    bucket: Sequence[Chunk], buffer: torch.Tensor, destinations: dict[str, Destination]
) -> None:
    """Copies the rows of this rank's shards. Skips tensors without a destination on this rank."""
    buffers_by_dtype: dict[torch.dtype, torch.Tensor] = {}
    copies = [
        copy
        for chunk in bucket
        if chunk.name in destinations
        for copy in iterate_copies(
            _view_chunk(buffers_by_dtype, buffer, chunk), chunk.first_row, destinations[chunk.name]
        )
    ]
    copy_tensors(copies)


def copy_tensors(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if copies:
        targets, values = zip(*copies)
        torch._foreach_copy_(targets, values)


def iterate_copies(
    rows: torch.Tensor, first_row: int, destination: Destination
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields (destination, source) for the part of ``rows`` that this rank's shard has.

    ``rows`` are rows of the full tensor from index ``first_row`` on.
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
    begin = max(first_row, destination.starts[0])
    end = min(first_row + rows.shape[0], destination.starts[0] + local.shape[0])
    if end <= begin or local.numel() == 0:
        return
    if end - begin < rows.shape[0]:
        rows = rows.narrow(0, begin - first_row, end - begin)
    if end - begin < local.shape[0]:
        local = local.narrow(0, begin - destination.starts[0], end - begin)
    for dim in range(1, local.ndim):
        if rows.shape[dim] != local.shape[dim]:
            rows = rows.narrow(dim, destination.starts[dim], local.shape[dim])
    yield local, rows
