"""The progress bar of ``load_full_state_dict``."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from .buckets import Chunk
from .source import LoadingRanks


def find_tqdm(progress: bool | None) -> Any:
    """Returns tqdm, or None to show no bar.

    Raises ImportError if ``progress`` is True and tqdm is not installed.
    """
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
def show_progress(
    progress: bool | None, ranks: LoadingRanks, buckets: list[list[Chunk]]
) -> Iterator[Callable[[int], Any]]:
    """Shows a progress bar in bytes on the source rank. Yields a function that advances it."""
    tqdm = find_tqdm(progress) if ranks.is_source else None
    if tqdm is None:
        yield lambda count: None
        return
    total = sum(max(chunk.end for chunk in bucket) for bucket in buckets)
    is_disabled = None if progress is None else False  # None: tqdm checks for a terminal
    with tqdm(total=total, unit="B", unit_scale=True, desc="loading", disable=is_disabled) as bar:
        yield bar.update
