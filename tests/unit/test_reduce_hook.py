"""A user's all-reduce on a stream of its own is between what reduces before and after it.

This is B9 of tests/TORCH_BUGS.md. The core's side, that the row lives as long, is in
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


def run_hook(own: bool) -> list[str]:
    """What is ordered around a hook, while the core's all-reduce stream is the current one."""
    log: list[str] = []
    current = Stream("all-reduce", log)
    side = Stream("user", log)

    @contextlib.contextmanager
    def on(stream: Stream) -> Iterator[None]:
        log.append(f"on {stream.name}")
        yield

    group: Any = SimpleNamespace(
        _reduce_hook=lambda row: log.append("hook"),
        _all_reduce_hook_stream=side if own else None,
        device=torch.device("cuda"),
        device_handle=SimpleNamespace(current_stream=lambda: current, stream=on),
    )
    ParamGroup._run_reduce_hook(group, torch.zeros(1))
    return log


def test_the_hooks_own_stream_is_ordered_on_both_sides() -> None:
    waits = "user waits for all-reduce", "all-reduce waits for user"
    assert run_hook(own=True) == [waits[0], "on user", "hook", waits[1]]


def test_without_one_it_runs_where_the_core_is() -> None:
    assert run_hook(own=False) == ["hook"]
