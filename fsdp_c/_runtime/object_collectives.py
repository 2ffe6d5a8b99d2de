"""Collectives of Python objects. torch's own functions require numpy, which may be missing."""

from __future__ import annotations

import ctypes
import pickle
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_object_coll_device


def gather_objects(item: Any) -> list[Any]:
    """Returns the items of all ranks of the default group, in rank order, on all ranks."""
    device = torch.device(_get_object_coll_device())
    own_data = _pickle_to_tensor(item).to(device)
    count = torch.tensor([own_data.numel()], device=device)
    counts = [torch.empty_like(count) for _ in range(dist.get_world_size())]
    dist.all_gather(counts, count)
    sizes = [int(size) for size in counts]
    padded = own_data.new_zeros(max(sizes))
    padded[: own_data.numel()] = own_data
    gathered = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(gathered, padded)
    return [_unpickle_tensor(data[:size]) for data, size in zip(gathered, sizes)]


def broadcast_object(item: Any, src: int, group: dist.ProcessGroup | None) -> Any:
    """Returns the item of rank ``src`` (in the default group) on all ranks of ``group``."""
    device = torch.device(_get_object_coll_device(group))
    is_source = dist.get_rank() == src
    data = _pickle_to_tensor(item).to(device) if is_source else torch.empty(0, dtype=torch.uint8)
    count = torch.tensor([data.numel()], device=device)
    dist.broadcast(count, src=src, group=group)
    if not is_source:
        data = torch.empty(int(count), dtype=torch.uint8, device=device)
    dist.broadcast(data, src=src, group=group)
    return item if is_source else _unpickle_tensor(data)


def _pickle_to_tensor(item: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(item)), dtype=torch.uint8)


def _unpickle_tensor(data: torch.Tensor) -> Any:
    contiguous = data.cpu().contiguous()
    return pickle.loads(ctypes.string_at(contiguous.data_ptr(), contiguous.numel()))
