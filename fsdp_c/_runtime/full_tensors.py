"""Gathers full tensors in the dtype of their shards, and copies full tensors to the shards.

One all-gather runs for each process group and dtype.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

_all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def get_first_rank(mesh: Any) -> int:
    return int(mesh.mesh.flatten()[0])


def gather_full(
    shards: list[DTensor], device: torch.device, rank0_only: bool
) -> list[torch.Tensor | None]:
    """Returns new full tensors on ``device``.

    With ``rank0_only``, only the first rank of a tensor's mesh gets it. Others get None.
    """
    full: list[torch.Tensor | None] = [None] * len(shards)
    indices_by_mesh: dict[Any, list[int]] = {}
    for i, shard in enumerate(shards):
        sharded_mesh_dim = _find_shard_dim(shard)
        if sharded_mesh_dim is None:
            moved: Any = shard if shard.device == device else shard.to(device)
            full_param = moved.full_tensor()
            if not rank0_only or dist.get_rank() == get_first_rank(shard.device_mesh):
                shares_memory = full_param.data_ptr() == shard._local_tensor.data_ptr()
                full[i] = full_param.clone() if shares_memory else full_param
        else:
            key = (shard.device_mesh, sharded_mesh_dim, shard.dtype)
            indices_by_mesh.setdefault(key, []).append(i)
    for (mesh, mesh_dim, _), indices in indices_by_mesh.items():
        parts = [_pad_shard(shards[i], mesh_dim).to(device) for i in indices]
        rank_shards = _gather_shards(torch.cat(parts), mesh, mesh_dim, rank0_only)
        if rank_shards is None:
            continue
        offset = 0
        for i, part in zip(indices, parts):
            full[i] = _join_shards(
                rank_shards[:, offset : offset + part.numel()], shards[i], mesh_dim
            )
            offset += part.numel()
    return full


def _find_shard_dim(shard: DTensor) -> int | None:
    """Returns the mesh dimension of the only ``Shard``; None for other placements or subclasses."""
    sharded_mesh_dims = [i for i, p in enumerate(shard.placements) if not p.is_replicate()]
    is_plain = type(shard._local_tensor) is torch.Tensor
    if (
        len(sharded_mesh_dims) == 1
        and type(shard.placements[sharded_mesh_dims[0]]) is Shard
        and is_plain
    ):
        return sharded_mesh_dims[0]
    return None


def _get_chunk(shard: DTensor, mesh_dim: int) -> tuple[int, int]:
    """Returns the sharded tensor dimension, and the largest shard's length there."""
    dim: int = shard.placements[mesh_dim].dim  # type: ignore[attr-defined]
    return dim, -(-shard.shape[dim] // shard.device_mesh.size(mesh_dim))


def _pad_shard(shard: DTensor, mesh_dim: int) -> torch.Tensor:
    """Returns this rank's shard as a 1-D tensor, sharded dimension first, with padding."""
    dim, chunk = _get_chunk(shard, mesh_dim)
    local = shard._local_tensor.detach().movedim(dim, 0)
    if local.shape[0] == chunk:
        return local.reshape(-1)
    padded = local.new_zeros((chunk, *local.shape[1:]))
    padded[: local.shape[0]] = local
    return padded.view(-1)


def _gather_shards(
    part: torch.Tensor, mesh: Any, mesh_dim: int, rank0_only: bool
) -> torch.Tensor | None:
    """Gathers shards to (ranks, elements); returns None if this rank does not get the result.

    Gathers bytes, because gloo has no collectives of some dtypes, such as float8.
    """
    group = mesh.get_group(mesh_dim)
    size = mesh.size(mesh_dim)
    sent = part.view(torch.uint8)
    if not rank0_only:
        received = sent.new_empty(size * sent.numel())
        _all_gather(received, sent, group=group)
        return received.view(part.dtype).view(size, part.numel())
    first_rank = get_first_rank(mesh)
    if first_rank not in dist.get_process_group_ranks(group):
        return None
    if dist.get_rank() != first_rank:
        dist.gather(sent, dst=first_rank, group=group)
        return None
    received = sent.new_empty(size * sent.numel())
    dist.gather(sent, list(received.view(size, sent.numel()).unbind()), dst=first_rank, group=group)
    return received.view(part.dtype).view(size, part.numel())


def _join_shards(rank_shards: torch.Tensor, shard: DTensor, mesh_dim: int) -> torch.Tensor:
    """Returns the full tensor from gathered shards of shape (ranks, elements)."""
    dim, chunk = _get_chunk(shard, mesh_dim)
    other_sizes = [n for i, n in enumerate(shard.shape) if i != dim]
    full_param = rank_shards.reshape(rank_shards.shape[0] * chunk, *other_sizes)[: shard.shape[dim]]
    # A copy, so that the gathered memory of all parameters can be freed.
    return full_param.movedim(0, dim).clone(memory_format=torch.contiguous_format)


def write_back(shard: DTensor, full_param: Any, has_new_version: bool) -> None:
    """Copies this rank's part of ``full_param`` to the shard, if it may differ from the shard.

    Writes through ``.data`` or numpy leave the version unchanged. Therefore plain tensors of an
    unchanged version are compared bit by bit. An equal shard keeps its version.
    """
    if isinstance(full_param, DTensor) or not isinstance(full_param, torch.Tensor):
        raise ValueError(
            f"full_params expects a plain tensor to write back, not {type(full_param).__name__}"
        )
    if full_param.shape != shard.shape:
        raise ValueError(
            f"full_params cannot write back a parameter of shape {tuple(full_param.shape)} where "
            f"{tuple(shard.shape)} was"
        )
    local = shard._local_tensor
    if local.numel() > 0:
        own_part = distribute_tensor(
            full_param.to(local.device), shard.device_mesh, shard.placements, src_data_rank=None
        )
        if has_new_version or _have_other_bits(own_part._local_tensor, local):
            local.copy_(own_part._local_tensor)


def _have_other_bits(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether ``tensor`` differs from a plain tensor in dtype or bits. False for subclasses."""
    if type(other) is not torch.Tensor:
        return False
    if tensor.dtype != other.dtype:
        return True
    tensor_bytes, other_bytes = (
        each.resolve_conj().resolve_neg().reshape(-1).view(torch.uint8) for each in (tensor, other)
    )
    return not torch.equal(tensor_bytes.to(other.device), other_bytes)
