"""Garbage collection in tests that record calls, lines, memory, or the order of frees.

A collection would run the finalizers of models of earlier tests.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
