"""User-defined communication: what set_custom_all_gather and its like are given."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from record import Recorder
from releases import GATHER, SCATTER
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter


class _Noted:
    """Allocates as FSDP would and notes what it was asked for."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        self.recorder.note(f"{type(self).__name__} allocate", (tuple(size), str(dtype)))
        return torch.empty(*size, dtype=dtype, device=device)


class NotedAllGather(_Noted, AllGather):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.recorder.note("custom all-gather", (output_tensor.numel(), async_op))
        return getattr(dist, GATHER)(output_tensor, input_tensor, group=group, async_op=async_op)


class NotedReduceScatter(_Noted, ReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.recorder.note("custom reduce-scatter", (input_tensor.numel(), str(op), async_op))
        return getattr(dist, SCATTER)(
            output_tensor, input_tensor, group=group, op=op, async_op=async_op
        )


class ReduceHook:
    """An all-reduce hook: notes the buffer and changes it in place."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder = recorder
        self.name = name

    def __call__(self, output: torch.Tensor) -> None:
        self.recorder.tensor(f"all-reduce hook {self.name}", output)
        output.mul_(0.5)
