"""``load_full_state_dict``: loads full weights into a sharded model, from one rank or a file.

The source rank packs tensors into buckets and broadcasts each bucket. Every rank copies the rows of
its shards. Two buckets are alive at a time: one is broadcast while the other is unpacked.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_device_from_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.modules.module import _IncompatibleKeys

from ._checkpoint.source import Header, LoadingRanks, Reader, Source, open_source
from .names import clean_tensor_name

_ALIGNMENT = 16
_HEAD = 16
"""Bytes before the data of a bucket. The first byte is 1 if the source rank has failed."""


def load_full_state_dict(
    model: nn.Module,
    source: Source,
    *,
    strict: bool = True,
    src: int = 0,
    group: torch.distributed.ProcessGroup | None = None,
    rename: Callable[[str], str | None] | None = None,
    bucket_bytes: int | None = None,
    shared_file: bool = False,
    progress: bool | None = None,
) -> _IncompatibleKeys:
    """Loads full tensors into the parameters and buffers of ``model``, sharded or not.

    Every rank calls it. Only rank ``src`` reads ``source``. Parameters and buffers on the meta
    device are made on the device of their mesh. Values are cast to the dtype of the target.

    Args:
        source: The full state dict on rank ``src``; other ranks may pass ``None``. Or the path of a
            safetensors file, of an index of several files, or of a folder with either.
        strict: Whether names must match exactly, as in ``nn.Module.load_state_dict``. One name of
            a tied parameter is sufficient.
        src: The rank in the default group that reads.
        group: The ranks that load together. ``None``: all.
        rename: Maps a name in the source to the name in the model, or to ``None`` to skip it.
            Prefixes of wrappers are then removed from the names on both sides.
        bucket_bytes: The bytes of one broadcast. Each rank uses twice as much memory. ``None``: 4
            MiB if the group sends from host memory, else 32 MiB.
        shared_file: Whether every rank reads its own rows from the file, without communication.
        progress: Whether rank ``src`` shows a progress bar (needs tqdm). ``None``: if it has a
            terminal.

    Returns:
        The names that are missing in the source, and the names that the model does not have.

    Raises:
        RuntimeError: Names or shapes do not match (on all ranks, before any change), or another
            rank failed. If the source fails after the start, the model is partly loaded, and the
            message states it.
        ValueError: The file is broken, two names in the source become one, or ``bucket_bytes`` is
            not positive.
        TypeError: ``source`` is neither a mapping nor a path, has a DTensor, or has an object for
            the model that cannot be pickled.

    The other ranks raise a RuntimeError for each of these failures.
    """
    if bucket_bytes is not None and bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes should be positive, not {bucket_bytes}")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    targets = _collect_targets(model)
    link = LoadingRanks(src, group)
    reader, header = open_source(
        source, rename, shared_file, targets, link, lambda: _find_tqdm(progress)
    )
    keys = _match_names(model, targets, header, strict, link)
    wanted = {name: facts for name, facts in header.tensors.items() if name in targets}
    places = _agree_on_destinations(model, {name: targets[name] for name in wanted}, link)
    if shared_file:
        failure = _read_own_rows(reader, wanted, places)
    else:
        devices = (place.local.device for place in places.values())
        device = link.device_for(next(devices, torch.device("cpu")))
        limit = bucket_bytes or (4 if device.type == "cpu" else 32) * 2**20
        buckets = _plan_buckets(wanted, places, limit)
        with _show_progress(progress, link, buckets) as advance:
            failure = _stream_buckets(reader, places, buckets, link, device, advance)
    if failure is None:
        try:
            _register_tensors(model, places)
            _load_other_entries(model, targets, places, header.objects)
        except Exception as error:
            failure = error
    link.agree(failure, f"{_READ_FAILED}. {_PARTLY_LOADED}")
    return keys


# ---- the entries of the model


def _collect_targets(model: nn.Module) -> dict[str, Any]:
    """Returns the values of the model's state dict (not detached), by clean name."""
    targets: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        targets[clean_tensor_name(name)] = value
    return targets


@dataclass
class _Destination:
    """The destination of a full tensor: ``local`` is its block that begins at index ``starts``.

    ``starts`` is None if ``local`` is not one block of the full tensor.
    """

    value: torch.Tensor
    local: torch.Tensor
    starts: tuple[int, ...] | None


def _make_destinations(model: nn.Module, targets: dict[str, Any]) -> dict[str, _Destination]:
    places: dict[str, _Destination] = {}
    made: dict[int, torch.Tensor] = {}
    for name, value in targets.items():
        local = value._local_tensor if isinstance(value, DTensor) else value
        if local.is_meta:
            if id(value) not in made:
                made[id(value)] = torch.empty_like(local, device=_choose_device(value, model))
            local = made[id(value)]
        places[name] = _Destination(value, local.detach(), _find_block_start(value))
    return places


def _agree_on_destinations(
    model: nn.Module, targets: dict[str, Any], link: LoadingRanks
) -> dict[str, _Destination]:
    """Returns the places. Raises on all ranks if one has no memory for its meta tensors."""
    places: dict[str, _Destination] = {}
    failure: Exception | None = None
    try:
        places = _make_destinations(model, targets)
    except Exception as error:
        failure = error
    link.agree(failure, "has no place for the values; nothing was loaded")
    return places


def _choose_device(value: torch.Tensor, model: nn.Module) -> torch.device:
    """Returns the device on which to make a meta tensor."""
    meshes = (p.device_mesh for p in (value, *model.parameters()) if isinstance(p, DTensor))
    mesh = next(meshes, None)
    return torch.device("cpu") if mesh is None else _get_device_from_mesh(mesh)


def _find_block_start(value: torch.Tensor) -> tuple[int, ...] | None:
    """Returns the first index of this rank's block in each dimension, or None if not one block."""
    starts = [0] * value.ndim
    if not isinstance(value, DTensor):
        return tuple(starts)
    sizes = list(value.shape)
    mesh = value.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return None
    for dim, placement in enumerate(value.placements):
        if placement.is_replicate():
            continue
        if type(placement) is not Shard:
            return None
        axis = placement.dim
        chunk = -(-sizes[axis] // mesh.size(dim))
        begin = min(chunk * coordinate[dim], sizes[axis])
        starts[axis] += begin
        sizes[axis] = min(chunk, sizes[axis] - begin)
    return tuple(starts) if tuple(sizes) == tuple(value._local_tensor.shape) else None


# ---- matching of names


def _match_names(
    model: nn.Module, targets: dict[str, Any], header: Header, strict: bool, link: LoadingRanks
) -> _IncompatibleKeys:
    """Returns the names that only one side has; raises the errors of ``load_state_dict``."""
    offered = header.tensors.keys() | header.objects.keys()
    given = {id(value) for name, value in targets.items() if name in offered}
    missing = [n for n, v in targets.items() if n not in offered and id(v) not in given]
    unexpected = [name for name in (*header.tensors, *header.objects) if name not in targets]
    problems = []
    if strict and missing:
        names = ", ".join(f'"{name}"' for name in missing)
        problems.append(f"Missing key(s) in state_dict: {names}.")
    if strict and unexpected:
        names = ", ".join(f'"{name}"' for name in unexpected)
        problems.append(f"Unexpected key(s) in state_dict: {names}.")
    for name, (_, shape) in header.tensors.items():
        value = targets.get(name)
        if isinstance(value, torch.Tensor) and value.shape != shape:
            problems.append(
                f"size mismatch for {name}: copying a param with shape {shape} from checkpoint, "
                f"the shape in current model is {value.shape}."
            )
        elif value is not None and not isinstance(value, torch.Tensor):
            problems.append(f"{name}: a tensor in the checkpoint, none in the model.")
    for name in header.objects:
        if isinstance(targets.get(name), torch.Tensor):
            problems.append(f"{name}: a tensor in the model, none in the checkpoint.")
    failure = None
    if problems:
        lines = "\n\t".join(problems)
        name = type(model).__name__
        failure = RuntimeError(f"Error(s) in loading state_dict for {name}:\n\t{lines}")
    link.agree(failure, "refused; nothing was loaded")
    return _IncompatibleKeys(missing, unexpected)


# ---- the stream


@dataclass(frozen=True)
class _Chunk:
    """Rows of a tensor from ``first`` on, at byte ``offset`` of a bucket. A scalar is one row."""

    name: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    first: int
    offset: int

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.sizes) * self.dtype.itemsize


def _plan_buckets(
    wanted: dict[str, tuple[torch.dtype, torch.Size]], places: dict[str, _Destination], limit: int
) -> list[list[_Chunk]]:
    """Returns buckets of at most ``limit`` bytes, with pieces in the order of the source.

    A row that is longer, or a tensor that cannot be split into rows, gets a separate bucket.
    """
    buckets: list[list[_Chunk]] = []
    used = limit
    for name, (dtype, shape) in wanted.items():
        rows = shape[0] if shape else 1
        row_bytes = math.prod(shape[1:]) * dtype.itemsize
        whole = places[name].starts is None or not shape
        first = 0
        while first < rows:
            free = max(limit - used, 0)
            count = rows if whole else min(rows - first, free // max(row_bytes, 1))
            if count * row_bytes > free or count == 0:
                if used > 0:  # continue in a new bucket
                    buckets.append([])
                    used = 0
                    continue
                count = max(count, 1)
            sizes = (count, *shape[1:]) if shape else ()
            piece = _Chunk(name, dtype, sizes, first, used)
            buckets[-1].append(piece)
            used = -(-piece.end // _ALIGNMENT) * _ALIGNMENT
            first += count
    return buckets


def _view_chunk(typed: dict[torch.dtype, torch.Tensor], buffer: torch.Tensor, piece: _Chunk) -> Any:
    """Returns a view of the piece in its bucket."""
    if piece.dtype not in typed:
        length = buffer.numel() // piece.dtype.itemsize * piece.dtype.itemsize
        typed[piece.dtype] = buffer[:length].view(piece.dtype)
    strides = [math.prod(piece.sizes[i + 1 :]) for i in range(len(piece.sizes))]
    start = (_HEAD + piece.offset) // piece.dtype.itemsize
    return typed[piece.dtype].as_strided(piece.sizes, strides, start)


def _pack_bucket(reader: Reader, bucket: list[_Chunk], buffer: torch.Tensor) -> None:
    typed: dict[torch.dtype, torch.Tensor] = {}
    views, sources = [], []
    for piece in bucket:
        tensor = reader[piece.name]
        if piece.sizes and piece.sizes[0] < tensor.shape[0]:
            tensor = tensor.narrow(0, piece.first, piece.sizes[0])
        views.append(_view_chunk(typed, buffer, piece))
        sources.append(tensor)
    if views:
        torch._foreach_copy_(views, sources)


def _unpack_bucket(
    bucket: Sequence[_Chunk], buffer: torch.Tensor, places: dict[str, _Destination]
) -> None:
    typed: dict[torch.dtype, torch.Tensor] = {}
    copies = [
        copy
        for piece in bucket
        for copy in _iterate_copies(
            _view_chunk(typed, buffer, piece), piece.first, places[piece.name]
        )
    ]
    _copy_all(copies)


def _copy_all(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if copies:
        to, values = zip(*copies)
        torch._foreach_copy_(to, values)


def _iterate_copies(
    rows: torch.Tensor, first: int, place: _Destination
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yields (destination, source) for the part of ``rows`` that this rank's shard has.

    ``rows`` are rows of the full tensor from index ``first`` on.
    """
    local = place.local
    if place.starts is None:
        value: Any = place.value
        whole = distribute_tensor(
            rows.to(local.device), value.device_mesh, value.placements, src_data_rank=None
        )
        yield local, whole._local_tensor
        return
    if local.ndim == 0:
        yield local, rows
        return
    begin = max(first, place.starts[0])
    end = min(first + rows.shape[0], place.starts[0] + local.shape[0])
    if end <= begin or local.numel() == 0:
        return
    if end - begin < rows.shape[0]:
        rows = rows.narrow(0, begin - first, end - begin)
    if end - begin < local.shape[0]:
        local = local.narrow(0, begin - place.starts[0], end - begin)
    for dim in range(1, local.ndim):
        if rows.shape[dim] != local.shape[dim]:
            rows = rows.narrow(dim, place.starts[dim], local.shape[dim])
    yield local, rows


@torch.no_grad()
def _read_own_rows(
    reader: Reader | None,
    wanted: dict[str, tuple[torch.dtype, torch.Size]],
    places: dict[str, _Destination],
) -> Exception | None:
    """Reads this rank's rows from the file. Returns the failure, or None."""
    assert reader is not None
    try:
        for name in wanted:
            _copy_all(list(_iterate_copies(reader[name], 0, places[name])))
    except Exception as error:
        return _make_partial_load_error("this rank", error)
    return None


@torch.no_grad()
def _stream_buckets(
    reader: Reader | None,
    places: dict[str, _Destination],
    buckets: list[list[_Chunk]],
    link: LoadingRanks,
    device: torch.device,
    advance: Callable[[int], Any],
) -> Exception | None:
    """Broadcasts and unpacks all buckets.

    Returns this rank's failure, or None. Raises if the source rank has failed.
    """
    if not buckets:
        return None
    sizes = [_HEAD + max(piece.end for piece in bucket) for bucket in buckets]
    buffers = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in buckets[:2]]
    works: list[Callable[[], Any]] = []
    failure: Exception | None = None
    for i in range(len(buckets) + 1):
        if i < len(buckets):
            buffer = buffers[i % 2][: sizes[i]]
            if link.is_source:
                failure = _fill_bucket(reader, buckets[i], buffer, failure)
            works.append(link.broadcast(buffer))
        if i > 0:
            works[i - 1]()
            buffer = buffers[(i - 1) % 2][: sizes[i - 1]]
            if buffer[0].item() != 0:
                works[-1]()  # all ranks have started this broadcast, too
                raise _make_partial_load_error(f"rank {link.src}", failure)
            if failure is None:  # after a failure, this rank only takes part in the broadcasts
                try:
                    _unpack_bucket(buckets[i - 1], buffer, places)
                    advance(sizes[i - 1] - _HEAD)
                except Exception as error:
                    failure = error
    return None if failure is None else _make_partial_load_error("this rank", failure)


def _fill_bucket(
    reader: Reader | None, bucket: list[_Chunk], buffer: torch.Tensor, failure: Exception | None
) -> Exception | None:
    """Packs a bucket, or sets its first byte if that fails or an earlier bucket failed."""
    assert reader is not None
    if failure is None:
        buffer[:_HEAD] = 0
        try:
            _pack_bucket(reader, bucket, buffer)
        except Exception as error:
            failure = error
    if failure is not None:
        buffer[0] = 1
    return failure


_READ_FAILED = "could not read on"
_PARTLY_LOADED = "The model is partly loaded; load again before using it"


def _make_partial_load_error(who: str, failure: Exception | None) -> RuntimeError:
    why = "" if failure is None else f" ({type(failure).__name__}: {failure})"
    partly = RuntimeError(f"load_full_state_dict: {who} {_READ_FAILED}{why}. {_PARTLY_LOADED}")
    partly.__cause__ = failure
    return partly


def _find_tqdm(progress: bool | None) -> Any:
    """Returns tqdm, or None to show no bar. Raises ImportError if ``progress`` requires tqdm."""
    if progress is False:
        return None
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        if progress:
            raise
        return None
    return tqdm


@contextlib.contextmanager
def _show_progress(
    progress: bool | None, link: LoadingRanks, buckets: list[list[_Chunk]]
) -> Iterator[Callable[[int], Any]]:
    """Shows a progress bar in bytes on the source rank. Yields a function that advances it."""
    tqdm = _find_tqdm(progress) if link.is_source else None
    if tqdm is None:
        yield lambda count: None
        return
    total = sum(max(piece.end for piece in bucket) for bucket in buckets)
    shown = None if progress is None else False  # None: tqdm checks for a terminal
    with tqdm(total=total, unit="B", unit_scale=True, desc="loading", disable=shown) as bar:
        yield bar.update


# ---- after the stream


def _register_tensors(model: nn.Module, places: dict[str, _Destination]) -> None:
    """Registers the new tensors in place of those on the meta device."""
    made: dict[int, torch.Tensor] = {}
    for place in places.values():
        value: Any = place.value
        if not value.is_meta or id(value) in made:
            continue
        tensor: torch.Tensor = place.local
        if isinstance(value, DTensor):
            tensor = DTensor(tensor, value._spec, requires_grad=False)
        if isinstance(value, nn.Parameter):
            tensor = nn.Parameter(tensor, requires_grad=value.requires_grad)
        made[id(value)] = tensor
    if not made:
        return
    for module in model.modules():
        for registered in (module._parameters, module._buffers):
            slots: dict[str, Any] = registered
            for name, value in slots.items():
                if id(value) in made:
                    slots[name] = made[id(value)]
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                for param in group.fsdp_params:
                    param.reset_sharded_param()


def _load_other_entries(
    model: nn.Module,
    targets: dict[str, Any],
    places: dict[str, _Destination],
    objects: dict[str, Any],
) -> None:
    """Passes entries that are not parameters or buffers to ``load_state_dict``.

    These are extra states and tensors that modules make for their state dicts.
    """
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    rest = {name: value for name, value in objects.items() if name in targets}
    for name, place in places.items():
        if id(place.value) not in own and not place.value.is_meta:
            rest[name] = place.value
    if rest:
        names = {clean_tensor_name(name): name for name in model.state_dict(keep_vars=True)}
        model.load_state_dict({names[name]: value for name, value in rest.items()}, strict=False)
