"""``load_full_state_dict``: full weights into a sharded model, streamed from one rank or a file.

The source rank packs tensors into buckets, each bucket is one broadcast, every rank copies the rows
that it has. Two buckets are alive at a time: while one travels, the other is unpacked.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_device_from_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
from torch.nn.modules.module import _IncompatibleKeys

from .names import clean_tensor_name
from .safetensors import open_safetensors

Source = Mapping[str, Any] | str | os.PathLike[str] | None

_ALIGNMENT = 16
_HEAD = 16
"""Bytes before the data of a bucket; the first one says that the source rank is well."""


def load_full_state_dict(
    model: nn.Module,
    source: Source,
    *,
    strict: bool = True,
    src: int = 0,
    group: dist.ProcessGroup | None = None,
    rename: Callable[[str], str | None] | None = None,
    bucket_bytes: int | None = None,
    shared_file: bool = False,
    progress: bool | None = None,
) -> _IncompatibleKeys:
    """Loads full tensors into the parameters and buffers of ``model``, sharded or not.

    Every rank calls it; only rank ``src`` looks at ``source``. On meta devices parameters and
    buffers are made (on the device of their mesh) with the loaded values.

    Args:
        source: The full state dict on rank ``src`` (anything, for example ``None``, elsewhere); or
            the path of a safetensors file, of an index of several, or of a folder with either.
        strict: Whether names have to match exactly, as in ``nn.Module.load_state_dict``. A tied
            parameter needs one of its names only.
        src: Rank in the default group that reads.
        group: The ranks that load together; ``None``: all.
        rename: From a name in the source to the name in the model; ``None``: leave it out. Without
            it (and after it) prefixes of wrappers are removed from the names on both sides.
        bucket_bytes: How much travels at a time; each rank needs twice as much memory. ``None``: 4
            MiB where the group sends from host memory, 32 MiB elsewhere.
        shared_file: Every rank reads its own rows from the file; nothing is sent.
        progress: Whether rank ``src`` shows a progress bar (needs tqdm); ``None``: on a terminal.

    Returns:
        Names that are missing in the source, and names that the model does not have.

    Raises:
        RuntimeError: names or shapes do not match (on all ranks, before anything is changed); or
            another rank failed. A failure of the source in the middle leaves the model partly
            loaded, and says so.
        ValueError: the file is broken, two names in the source become one, or ``bucket_bytes`` is
            not positive.
        TypeError: ``source`` is neither a mapping nor a path, or has a DTensor.
    """
    if bucket_bytes is not None and bucket_bytes <= 0:
        raise ValueError(f"bucket_bytes should be positive, not {bucket_bytes}")
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    targets = _targets(model)
    link = _Link(src, group)
    reader, header = _opened(source, rename, shared_file, link)
    keys = _matched(model, targets, header, strict, link)
    wanted = {name: facts for name, facts in header.tensors.items() if name in targets}
    places = _places(model, {name: targets[name] for name in wanted})
    if shared_file:
        _read_all(reader, wanted, places)
    else:
        devices = (place.local.device for place in places.values())
        device = link.device_for(next(devices, torch.device("cpu")))
        limit = bucket_bytes or (4 if device.type == "cpu" else 32) * 2**20
        buckets = _buckets(wanted, places, limit)
        with _bar(progress, link, buckets) as advance:
            _stream(reader, places, buckets, link, device, advance)
    _materialize(model, places)
    _load_the_rest(model, targets, places, header.objects)
    return keys


# ---- what the model has


def _targets(model: nn.Module) -> dict[str, Any]:
    """The entries of the model's state dict, parameters and buffers themselves, by clean name."""
    found: dict[str, Any] = {}
    for name, value in model.state_dict(keep_vars=True).items():
        found[clean_tensor_name(name)] = value
    return found


@dataclass
class _Place:
    """Where a full tensor goes: ``local`` are ``sizes`` elements from ``starts`` on, by dimension.

    ``starts`` None: which elements ``local`` has is not one block of the full tensor.
    """

    value: torch.Tensor
    local: torch.Tensor
    starts: tuple[int, ...] | None


def _places(model: nn.Module, targets: dict[str, Any]) -> dict[str, _Place]:
    places: dict[str, _Place] = {}
    made: dict[int, torch.Tensor] = {}
    for name, value in targets.items():
        local = value._local_tensor if isinstance(value, DTensor) else value
        if local.is_meta:
            if id(value) not in made:
                made[id(value)] = torch.empty_like(local, device=_device_of(value, model))
            local = made[id(value)]
        places[name] = _Place(value, local.detach(), _starts(value))
    return places


def _device_of(value: torch.Tensor, model: nn.Module) -> torch.device:
    """Where a meta tensor is to be made."""
    meshes = (p.device_mesh for p in (value, *model.parameters()) if isinstance(p, DTensor))
    mesh = next(meshes, None)
    return torch.device("cpu") if mesh is None else _get_device_from_mesh(mesh)


def _starts(value: torch.Tensor) -> tuple[int, ...] | None:
    """The first index of this rank's block in each dimension."""
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


# ---- what the source has


@dataclass
class _Header:
    """What the source offers: dtype and shape of tensors, other values, names left over."""

    tensors: dict[str, tuple[torch.dtype, torch.Size]]
    objects: dict[str, Any]
    error: str | None = None


class _Link:
    """The ranks that load together."""

    def __init__(self, src: int, group: dist.ProcessGroup | None) -> None:
        self.src = src
        self.group = group
        self.size = dist.get_world_size(group) if dist.is_initialized() else 1
        self.is_source = self.size == 1 or dist.get_rank() == src
        kinds = {"cpu"}
        if dist.is_initialized():
            used = group if group is not None else dist.group.WORLD
            kinds = {device.type for device in used._device_types}  # type: ignore[union-attr]
        self.kinds = kinds

    def device_for(self, wanted: torch.device) -> torch.device:
        """``wanted`` if the group can send from it, otherwise one that it can."""
        if wanted.type in self.kinds:
            return wanted
        return torch.device("cpu" if "cpu" in self.kinds else min(self.kinds))

    def broadcast(self, buffer: torch.Tensor) -> Callable[[], Any]:
        """Begins to send or receive; what it gives waits until that is done."""
        if self.size == 1:
            return lambda: None
        work: Any = dist.broadcast(buffer, src=self.src, group=self.group, async_op=True)
        return work.wait

    def share(self, header: _Header) -> _Header:
        """The source rank's header."""
        if self.size == 1:
            return header
        box = [header]
        dist.broadcast_object_list(box, src=self.src, group=self.group)
        return box[0]

    def agree(self, problem: str | None) -> None:
        """Raises on every rank where one has a problem."""
        bad = torch.tensor([problem is not None], dtype=torch.int32)
        if self.size > 1:
            bad = bad.to(self.device_for(bad.device))
            dist.all_reduce(bad, dist.ReduceOp.MAX, self.group)
        if problem is not None:
            raise RuntimeError(problem)
        if bad.item():
            raise RuntimeError("load_full_state_dict: another rank refused; nothing was loaded")


class _Reader:
    """The source's tensors under the model's names."""

    def __init__(self, source: Any, rename: Callable[[str], str | None] | None) -> None:
        if isinstance(source, (str, os.PathLike)):
            source = open_safetensors(source)
        if not isinstance(source, Mapping):
            raise TypeError(
                "load_full_state_dict expects a state dict or a path on the source rank, not "
                f"{type(source).__name__}"
            )
        self._source = source
        self._keys: dict[str, str] = {}
        for key in source:
            name = rename(key) if rename is not None else key
            if name is None:
                continue
            name = clean_tensor_name(name)
            if name in self._keys:
                raise ValueError(f"both '{self._keys[name]}' and '{key}' would be '{name}'")
            self._keys[name] = key

    def header(self) -> _Header:
        tensors: dict[str, tuple[torch.dtype, torch.Size]] = {}
        objects: dict[str, Any] = {}
        facts = getattr(self._source, "facts", None)
        for name, key in self._keys.items():
            value = None if facts is not None else self._source[key]
            if facts is not None:
                tensors[name] = facts(key)
            elif isinstance(value, DTensor):
                raise TypeError(f"'{key}' is a DTensor; load_full_state_dict takes full tensors")
            elif isinstance(value, torch.Tensor):
                tensors[name] = (value.dtype, value.shape)
            else:
                objects[name] = value
        return _Header(tensors, objects)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._source[self._keys[name]].detach()


def _opened(
    source: Source, rename: Callable[[str], str | None] | None, shared_file: bool, link: _Link
) -> tuple[_Reader | None, _Header]:
    """The reader where this rank reads, and what is offered; a failure is everyone's."""
    reader: _Reader | None = None
    header = _Header({}, {})
    failure: Exception | None = None
    if link.is_source or shared_file:
        try:
            if shared_file and not isinstance(source, (str, os.PathLike)):
                raise TypeError("shared_file=True needs the path of a file")
            reader = _Reader(source, rename)
            header = reader.header()
        except Exception as error:
            failure = error
            header.error = f"{type(error).__name__}: {error}"
    if not shared_file:
        header = link.share(header)
    if failure is not None and not (shared_file and link.size > 1):
        raise failure
    problem = f"load_full_state_dict cannot read the source: {header.error}"
    if shared_file:
        link.agree(problem if header.error else None)
    elif header.error:
        raise RuntimeError(f"{problem} (on rank {link.src})")
    return reader, header


def _matched(
    model: nn.Module, targets: dict[str, Any], header: _Header, strict: bool, link: _Link
) -> _IncompatibleKeys:
    """Names that only one side has; raises as ``load_state_dict`` does."""
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
    text = None
    if problems:
        lines = "\n\t".join(problems)
        text = f"Error(s) in loading state_dict for {type(model).__name__}:\n\t{lines}"
    link.agree(text)
    return _IncompatibleKeys(missing, unexpected)


# ---- the stream


@dataclass(frozen=True)
class _Piece:
    """Rows ``[first, last)`` of a tensor, at byte ``offset`` of a bucket; a 0-d tensor is one."""

    name: str
    dtype: torch.dtype
    sizes: tuple[int, ...]
    first: int
    offset: int

    @property
    def end(self) -> int:
        return self.offset + math.prod(self.sizes) * self.dtype.itemsize


def _buckets(
    wanted: dict[str, tuple[torch.dtype, torch.Size]], places: dict[str, _Place], limit: int
) -> list[list[_Piece]]:
    """Pieces in the order of the source, in buckets of at most ``limit`` bytes.

    A row that is longer, or a tensor that cannot be taken row by row, has a bucket of its own.
    """
    buckets: list[list[_Piece]] = []
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
                if used > 0:  # go on in a new bucket
                    buckets.append([])
                    used = 0
                    continue
                count = max(count, 1)
            sizes = (count, *shape[1:]) if shape else ()
            piece = _Piece(name, dtype, sizes, first, used)
            buckets[-1].append(piece)
            used = -(-piece.end // _ALIGNMENT) * _ALIGNMENT
            first += count
    return buckets


def _view(typed: dict[torch.dtype, torch.Tensor], buffer: torch.Tensor, piece: _Piece) -> Any:
    """The piece in its bucket."""
    if piece.dtype not in typed:
        length = buffer.numel() // piece.dtype.itemsize * piece.dtype.itemsize
        typed[piece.dtype] = buffer[:length].view(piece.dtype)
    strides = [math.prod(piece.sizes[i + 1 :]) for i in range(len(piece.sizes))]
    start = (_HEAD + piece.offset) // piece.dtype.itemsize
    return typed[piece.dtype].as_strided(piece.sizes, strides, start)


def _pack(reader: _Reader, bucket: list[_Piece], buffer: torch.Tensor) -> None:
    typed: dict[torch.dtype, torch.Tensor] = {}
    views, sources = [], []
    for piece in bucket:
        tensor = reader[piece.name]
        if piece.sizes and piece.sizes[0] < tensor.shape[0]:
            tensor = tensor.narrow(0, piece.first, piece.sizes[0])
        views.append(_view(typed, buffer, piece))
        sources.append(tensor)
    if views:
        torch._foreach_copy_(views, sources)


def _unpack(bucket: Sequence[_Piece], buffer: torch.Tensor, places: dict[str, _Place]) -> None:
    typed: dict[torch.dtype, torch.Tensor] = {}
    copies = [
        copy
        for piece in bucket
        for copy in _copies(_view(typed, buffer, piece), piece.first, places[piece.name])
    ]
    _copy(copies)


def _copy(copies: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if copies:
        to, values = zip(*copies)
        torch._foreach_copy_(to, values)


def _copies(
    rows: torch.Tensor, first: int, place: _Place
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """What of ``rows`` (of the full tensor, from ``first`` on) this rank has, and where."""
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
def _read_all(
    reader: _Reader | None,
    wanted: dict[str, tuple[torch.dtype, torch.Size]],
    places: dict[str, _Place],
) -> None:
    """Every rank for itself."""
    assert reader is not None
    for name in wanted:
        _copy(list(_copies(reader[name], 0, places[name])))


@torch.no_grad()
def _stream(
    reader: _Reader | None,
    places: dict[str, _Place],
    buckets: list[list[_Piece]],
    link: _Link,
    device: torch.device,
    advance: Callable[[int], Any],
) -> None:
    if not buckets:
        return
    sizes = [_HEAD + max(piece.end for piece in bucket) for bucket in buckets]
    buffers = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in buckets[:2]]
    works: list[Callable[[], Any]] = []
    failure: Exception | None = None
    for i in range(len(buckets) + 1):
        if i < len(buckets):
            buffer = buffers[i % 2][: sizes[i]]
            if link.is_source:
                failure = _fill(reader, buckets[i], buffer, failure)
            works.append(link.broadcast(buffer))
        if i > 0:
            works[i - 1]()
            buffer = buffers[(i - 1) % 2][: sizes[i - 1]]
            if buffer[0].item() != 0:
                works[-1]()  # every rank has begun this one, too
                raise RuntimeError(_partly(link.src, failure)) from failure
            _unpack(buckets[i - 1], buffer, places)
            advance(sizes[i - 1] - _HEAD)


def _fill(
    reader: _Reader | None, bucket: list[_Piece], buffer: torch.Tensor, failure: Exception | None
) -> Exception | None:
    """Packs a bucket; where that fails or has failed, the bucket tells the other ranks so."""
    assert reader is not None
    if failure is None:
        buffer[:_HEAD] = 0
        try:
            _pack(reader, bucket, buffer)
        except Exception as error:
            failure = error
    if failure is not None:
        buffer[0] = 1
    return failure


def _partly(src: int, failure: Exception | None) -> str:
    why = "" if failure is None else f" ({type(failure).__name__}: {failure})"
    return (
        f"load_full_state_dict: rank {src} could not read on{why}. The model is partly loaded; "
        "load again before using it"
    )


@contextlib.contextmanager
def _bar(
    progress: bool | None, link: _Link, buckets: list[list[_Piece]]
) -> Iterator[Callable[[int], Any]]:
    """A progress bar in bytes on the source rank; gives what advances it."""
    tqdm: Any = None
    if link.is_source and progress is not False:
        try:
            from tqdm import tqdm  # type: ignore[import-untyped,no-redef]
        except ImportError:
            if progress:
                raise
    if tqdm is None:
        yield lambda count: None
        return
    total = sum(max(piece.end for piece in bucket) for bucket in buckets)
    shown = None if progress is None else False  # None: tqdm looks for a terminal
    with tqdm(total=total, unit="B", unit_scale=True, desc="loading", disable=shown) as bar:
        yield bar.update


# ---- after the stream


def _materialize(model: nn.Module, places: dict[str, _Place]) -> None:
    """Registers what was made in place of tensors on the meta device."""
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


def _load_the_rest(
    model: nn.Module, targets: dict[str, Any], places: dict[str, _Place], objects: dict[str, Any]
) -> None:
    """Hands on what is not a parameter or buffer: extra state, and what modules made up for their
    state dicts."""
    own = {id(tensor) for tensor in (*model.parameters(), *model.buffers())}
    rest = {name: value for name, value in objects.items() if name in targets}
    for name, place in places.items():
        if id(place.value) not in own and not place.value.is_meta:
            rest[name] = place.value
    if rest:
        names = {clean_tensor_name(name): name for name in model.state_dict(keep_vars=True)}
        model.load_state_dict({names[name]: value for name, value in rest.items()}, strict=False)
