"""``load_full_state_dict``: loads full weights into a sharded model, from one rank or a file.

The source rank packs tensors into buckets and broadcasts each bucket. Every rank copies the rows of
its shards. Two buckets are allocated: a rank broadcasts one while it unpacks the other.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, SupportsIndex

import torch
import torch.nn as nn
from torch.nn.modules.module import _IncompatibleKeys

from ._checkpoint.buckets import plan_buckets_on_all_ranks
from ._checkpoint.destinations import (
    collect_targets_on_all_ranks,
    load_other_entries,
    make_destinations_on_all_ranks,
    register_tensors,
)
from ._checkpoint.matching import match_names
from ._checkpoint.progress import find_tqdm, show_progress
from ._checkpoint.source import LoadingRanks, Source, open_source
from ._checkpoint.stream import LOAD_FAILED, PARTLY_LOADED, read_own_rows, stream_buckets


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

    Every rank must call the function. Without ``shared_file``, only rank ``src`` reads ``source``.
    Parameters and buffers on the meta device are allocated on the device of their mesh if the
    source has their names. Others, such as buffers that are not persistent, stay on the meta
    device. Values are cast to the dtype of the target.

    Args:
        source: The full state dict on rank ``src``; other ranks may pass ``None``. Or the path of a
            safetensors file, of an index of several files, or of a folder with either. In a folder
            with several indexes or files, that of the name ``model`` is read.
        strict: Whether names must match exactly, as in ``nn.Module.load_state_dict``. One name of
            a tied parameter is sufficient.
        src: The rank in the default group that reads.
        group: The ranks that load together. ``None``: all.
        rename: Maps a name in the source to the name in the model, or to ``None`` to skip it.
            Components of wrappers are removed from the names of the source and of the model, also
            without ``rename``.
        bucket_bytes: The bytes of one broadcast, equal on all ranks. Each rank uses twice as much
            memory. ``None``: 4 MiB if the group sends from host memory, else 32 MiB.
        shared_file: Whether every rank reads its own rows from the file, without communication.
        progress: Whether rank ``src`` shows a progress bar (needs tqdm). ``None``: only if the rank
            has a terminal. With ``shared_file`` no bar is shown.

    Returns:
        The names that are missing in the source, and the names that the model does not have.

    Raises:
        RuntimeError: Names, shapes or sizes of buckets do not match (on all ranks, before any
            change), or another rank failed. If the source fails after the start, the model is
            partly loaded. The message states this.
        ValueError: The file is invalid, two names in the source become one, ``bucket_bytes`` is
            not positive, or this rank is not in ``group``.
        TypeError: ``source`` is neither a mapping nor a path. Or it has a name that is not a
            string, a DTensor, or a sparse or meta tensor for the model. Or it has an object for the
            model that cannot be pickled. Or ``bucket_bytes`` is not an integer.

    Ranks may have different models, such as pipeline stages, with ``strict=False``. Each rank loads
    its own names. An extra state is only sent if the model of rank ``src`` has its name.

    Parameters and buffers do not pass through the modules: overrides of ``_load_from_state_dict``
    and load pre-hooks, such as those that rename keys, do not run. Use ``rename`` instead.

    The other ranks raise a RuntimeError for each of these failures, except for ``bucket_bytes`` and
    ``group``, which each rank checks for itself.
    """
    if bucket_bytes is not None:
        bucket_bytes = _check_bucket_bytes(bucket_bytes)
    ranks = LoadingRanks(src, group)
    targets = collect_targets_on_all_ranks(model, ranks)
    reader, header = open_source(
        source, rename, shared_file, targets, ranks, lambda: find_tqdm(progress)
    )
    keys = match_names(model, targets, header, strict, ranks)
    tensors_to_load = {
        name: dtype_and_shape for name, dtype_and_shape in header.tensors.items() if name in targets
    }
    destinations = make_destinations_on_all_ranks(
        model, {name: targets[name] for name in tensors_to_load}, ranks
    )
    if shared_file:
        failure = read_own_rows(reader, tensors_to_load, destinations)
    else:
        device = ranks.choose_device(entry.local.device for entry in destinations.values())
        bucket_limit = bucket_bytes or (4 if device.type == "cpu" else 32) * 2**20
        buckets = plan_buckets_on_all_ranks(header.tensors, destinations, bucket_limit, ranks)
        with show_progress(progress, ranks, buckets) as advance:
            failure = stream_buckets(reader, destinations, buckets, ranks, device, advance)
    if failure is None:
        try:
            register_tensors(model, destinations)
            load_other_entries(model, targets, destinations, header.objects)
        except Exception as error:
            failure = error
    ranks.raise_if_any_failed(failure, f"{LOAD_FAILED}. {PARTLY_LOADED}")
    return keys


def _check_bucket_bytes(size: Any) -> int:
    if not isinstance(size, SupportsIndex):
        raise TypeError(f"bucket_bytes should be an integer, not {size!r} ({type(size).__name__})")
    if operator.index(size) <= 0:
        raise ValueError(f"bucket_bytes should be positive, not {size}")
    return operator.index(size)
