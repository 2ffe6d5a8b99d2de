"""A user's all-reduce on a stream of its own is between what reduces before and after it.

This is B9 of tests/STOCK_BUGS.md. The core's side, that the row lives as long, is in
``tests/c/test_reduce.c``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from fsdp_c import ParamGroup


class Stream:
    """Notes who waits for whom."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


@pytest.mark.parametrize("own", ["user", None])
def test_the_hooks_stream_is_ordered_on_both_sides(own: str | None) -> None:
    log: list[str] = []
    current = Stream("reduce", log)
    side = Stream(own or "all-reduce", log)

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        log.append(f"on {stream.name}")
        yield

    group: Any = SimpleNamespace(
        _reduce_hook=lambda row: log.append("hook"),
        _all_reduce_hook_stream=side if own else None,
        comm_ctx=SimpleNamespace(all_reduce_stream=side),
        device=torch.device("cuda"),
        device_handle=SimpleNamespace(current_stream=lambda: current, stream=on),
    )
    ParamGroup._run_reduce_hook(group, torch.zeros(1))
    assert log == [
        f"{side.name} waits for reduce",
        f"on {side.name}",
        "hook",
        f"reduce waits for {side.name}",
    ]
