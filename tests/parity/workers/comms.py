"""Custom communication objects that record their arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from record import Recorder
from releases import ALL_GATHER_FUNCTION, REDUCE_SCATTER_FUNCTION
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter


class _RecordingAllocator:
    """Allocates as FSDP2 does and records size and dtype."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder = recorder

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        self.recorder.record(f"{type(self).__name__} allocate", (tuple(size), str(dtype)))
        return torch.empty(*size, dtype=dtype, device=device)


class RecordingAllGather(_RecordingAllocator, AllGather):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.recorder.record("custom all-gather", (output_tensor.numel(), async_op))
        return getattr(dist, ALL_GATHER_FUNCTION)(
            output_tensor, input_tensor, group=group, async_op=async_op
        )


class RecordingReduceScatter(_RecordingAllocator, ReduceScatter):
    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> dist.Work | None:
        self.recorder.record("custom reduce-scatter", (input_tensor.numel(), str(op), async_op))
        return getattr(dist, REDUCE_SCATTER_FUNCTION)(
            output_tensor, input_tensor, group=group, op=op, async_op=async_op
        )


class ReduceHook:
    """An all-reduce hook that records the buffer and scales it in place."""

    def __init__(self, recorder: Recorder, name: str) -> None:
        self.recorder = recorder
        self.name = name

    def __call__(self, output: torch.Tensor) -> None:
        self.recorder.tensor(f"all-reduce hook {self.name}", output)
        output.mul_(0.5)
