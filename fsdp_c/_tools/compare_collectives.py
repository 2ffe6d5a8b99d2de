"""Counts collectives of one step, for the observer of ``compare``.

Imports only torch and the standard library, because the processes that run torch alone load this
file without fsdp_c. fsdp_c issues the same c10d operations as torch, so one counter serves both.
"""

from __future__ import annotations

import atexit
import math
from typing import Any

import torch


class CollectiveCounter:
    """Counts the c10d operations of one step, and their bytes, with torch's profiler."""

    def __init__(self) -> None:
        self.profiler: Any = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
        )
        self.profiler.start()
        # A profiler that is still running at exit crashes the interpreter.
        atexit.register(self.profiler.stop)

    def finish(self) -> dict[str, int]:
        """Returns the number of operations, and the sum of the bytes of their largest tensors."""
        atexit.unregister(self.profiler.stop)
        self.profiler.stop()
        events = self.profiler.profiler.kineto_results.events()
        backend_dtypes = {
            tuple(event.shapes()[0]): event.dtypes()[0]
            for event in events
            if ":" in event.name() and "::" not in event.name() and event.shapes()
        }
        collectives = [event for event in events if event.name().startswith("c10d::")]
        return {
            "count": len(collectives),
            "bytes": sum(count_bytes(e, backend_dtypes) for e in collectives),
        }


ELEMENT_BYTES = {
    "double": 8,
    "long int": 8,
    "c10::complex<float>": 8,
    "c10::complex<double>": 16,
    "float": 4,
    "int": 4,
    "c10::Half": 2,
    "c10::BFloat16": 2,
    "short int": 2,
}
"""Bytes per element by the profiler's names of dtypes. Other dtypes have one byte."""


def count_bytes(event: Any, backend_dtypes: dict[tuple[int, ...], str]) -> int:
    """Returns the bytes of an operation's largest tensor. A barrier has none.

    The profiler records no dtype for lists of tensors: their dtype is that of the backend's event,
    or else float32. In torch 2.11 it records no shapes for lists, so they have no bytes.
    """
    if event.name() == "c10d::barrier":
        return 0
    largest = 0
    get_shapes = getattr(event, "structured_input_shapes", event.shapes)
    for shapes, dtype in zip(get_shapes(), event.dtypes()):
        is_list = bool(shapes) and isinstance(shapes[0], list)
        for shape in shapes if is_list else [shapes]:
            if shape or is_list:
                dtype_name = backend_dtypes.get(tuple(shape), "float") if is_list else dtype
                largest = max(largest, math.prod(shape) * ELEMENT_BYTES.get(dtype_name, 1))
    return largest
