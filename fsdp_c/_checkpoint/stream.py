"""Broadcasts buckets from the source rank, or reads this rank's rows from a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .buckets import HEADER_BYTES, Chunk, copy_tensors, iterate_copies, pack_bucket, unpack_bucket
from .destinations import Destination
from .source import LoadingRanks, Reader

LOAD_FAILED = "failed while loading"
PARTLY_LOADED = "The model is partly loaded; load again before using it"


@torch.no_grad()
def read_own_rows(
    reader: Reader | None,
    tensors: dict[str, tuple[torch.dtype, torch.Size]],
    destinations: dict[str, Destination],
) -> Exception | None:
    """Reads this rank's rows from the file. Returns the failure, or None."""
    assert reader is not None
    try:
        for name in tensors:
            copy_tensors(list(iterate_copies(reader[name], 0, destinations[name])))
    except Exception as error:
        return _make_partial_load_error("this rank", error)
    return None


@torch.no_grad()
def stream_buckets(
    reader: Reader | None,
    destinations: dict[str, Destination],
    buckets: list[list[Chunk]],
    ranks: LoadingRanks,
    device: torch.device,
    advance: Callable[[int], Any],
) -> Exception | None:
    """Broadcasts and unpacks all buckets. Calls ``advance`` with the bytes of each bucket.

    Returns this rank's failure, or None. Raises if the source rank has failed.
    """
    if not buckets:
        return None
    sizes = [HEADER_BYTES + max(chunk.end for chunk in bucket) for bucket in buckets]
    buffers = [torch.empty(max(sizes), dtype=torch.uint8, device=device) for _ in buckets[:2]]
    wait_functions: list[Callable[[], Any]] = []
    failure: Exception | None = None
    for i in range(len(buckets) + 1):
        if i < len(buckets):
            buffer = buffers[i % 2][: sizes[i]]
            if ranks.is_source:
                failure = _fill_bucket(reader, buckets[i], buffer, failure)
            wait_functions.append(ranks.broadcast(buffer))
        if i > 0:
            wait_functions[i - 1]()
            buffer = buffers[(i - 1) % 2][: sizes[i - 1]]
            if buffer[0].item() != 0:
                wait_functions[-1]()  # all ranks have started this broadcast, too
                raise _make_partial_load_error(f"rank {ranks.src}", failure)
            if failure is None:  # after a failure, this rank only takes part in the broadcasts
                try:
                    unpack_bucket(buckets[i - 1], buffer, destinations)
                    advance(sizes[i - 1] - HEADER_BYTES)
                except Exception as error:
                    failure = error
    return None if failure is None else _make_partial_load_error("this rank", failure)


def _fill_bucket(
    reader: Reader | None, bucket: list[Chunk], buffer: torch.Tensor, failure: Exception | None
) -> Exception | None:
    """Packs a bucket. Sets its first byte if this bucket or an earlier bucket fails."""
    assert reader is not None
    if failure is None:
        buffer[:HEADER_BYTES] = 0
        try:
            pack_bucket(reader, bucket, buffer)
        except Exception as error:
            failure = error
    if failure is not None:
        buffer[0] = 1
    return failure


def _make_partial_load_error(subject: str, failure: Exception | None) -> RuntimeError:
    reason = "" if failure is None else f" ({type(failure).__name__}: {failure})"
    partial_error = RuntimeError(
        f"load_full_state_dict: {subject} {LOAD_FAILED}{reason}. {PARTLY_LOADED}"
    )
    partial_error.__cause__ = failure
    return partial_error
