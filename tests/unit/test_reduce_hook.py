"""An all-reduce hook with its own stream is synchronized with the all-reduce stream on both sides.

In torch the memory of the hook's tensor can be reused too early: tests/TORCH_BUGS.md, B9.
tests/c/test_reduce.c tests that the core keeps this memory until the hook's stream is done.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from fsdp_c import ParamGroup, fully_shard


class FakeStream:
    """Appends to ``log`` which stream waits for which."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: FakeStream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")


def run_hook(has_stream: bool) -> list[str]:
    """Runs a hook while the all-reduce stream is current. Returns the log of stream operations."""
    log: list[str] = []
    current = FakeStream("all-reduce", log)
    hook_stream = FakeStream("user", log)

    @contextlib.contextmanager
    def use_stream(stream: FakeStream) -> Iterator[None]:
        log.append(f"on {stream.name}")
        yield

    group: Any = SimpleNamespace(
        _reduce_hook=lambda output: log.append("hook"),
        _all_reduce_hook_stream=hook_stream if has_stream else None,
        device=torch.device("cuda"),
        device_handle=SimpleNamespace(current_stream=lambda: current, stream=use_stream),
    )
    ParamGroup._run_reduce_hook(group, torch.zeros(1))
    return log


def test_all_reduce_hook_with_stream_runs_between_two_stream_waits() -> None:
    waits = "user waits for all-reduce", "all-reduce waits for user"
    assert run_hook(has_stream=True) == [waits[0], "on user", "hook", waits[1]]


def test_all_reduce_hook_without_stream_runs_on_current_stream_without_waits() -> None:
    assert run_hook(has_stream=False) == ["hook"]


def test_all_reduce_hook_on_cpu_runs_with_its_stream_as_current_stream(single_group: int) -> None:
    stream, used = torch.cpu.Stream(), []
    model = fully_shard(torch.nn.Linear(2, 2))
    model.set_all_reduce_hook(lambda output: used.append(torch.cpu.current_stream()), stream=stream)
    model(torch.ones(1, 2)).sum().backward()
    assert used == [stream]
    assert torch.cpu.current_stream() is not stream
