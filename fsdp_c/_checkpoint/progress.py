"""The progress bar of ``load_full_state_dict``."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from .buckets import Chunk
from .source import LoadingRanks


def find_tqdm(progress: bool | None) -> Any:
    """Returns tqdm, or None for no bar. If ``progress`` is None, a bar needs a terminal.

    Raises ImportError if ``progress`` is True and tqdm is not installed.
    """
    if progress is False or (progress is None and not _has_terminal()):
        return None
    try:
        from tqdm import tqdm  # type: ignore[import-untyped]
    except ImportError:
        if progress:
            raise
        return None
    return tqdm


def _has_terminal() -> bool:
    try:
        return sys.stderr.isatty()
    except (AttributeError, ValueError):  # standard error is None or closed
        return False


@contextlib.contextmanager
def show_progress(
    progress: bool | None, ranks: LoadingRanks, buckets: list[list[Chunk]]
) -> Iterator[Callable[[int], Any]]:
    """Shows a progress bar in bytes on the source rank. Yields a function that advances it.

    Exceptions of the bar are suppressed: the other ranks wait for the broadcasts of this rank.
    """
    tqdm = find_tqdm(progress) if ranks.is_source else None
    total = sum(max(chunk.end for chunk in bucket) for bucket in buckets)
    bar: Any = None
    if tqdm is not None:
        with contextlib.suppress(Exception):
            bar = tqdm(total=total, unit="B", unit_scale=True, desc="loading", disable=False)
    if bar is None:
        yield lambda count: None
        return

    def advance(count: int) -> None:
        with contextlib.suppress(Exception):
            bar.update(count)

    try:
        yield advance
    finally:
        with contextlib.suppress(Exception):
            bar.close()
