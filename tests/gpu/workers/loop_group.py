"""A process group of one real rank, on a device: the others are played.

Every collective is work on the device, on the current stream (or, where it is asynchronous, on a
stream of the group's own, as NCCL's are), after a pause of random length. The host never waits for
it. What a collective writes is poisoned with NaNs before the pause: who reads it without having
waited has other bits, and so has a collective whose input somebody overwrites too early.

The other ranks hold what this one holds. A reduction adds up all rows of its input, so that each
of them counts.
"""

from __future__ import annotations

import contextlib
import random
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

BACKEND = "played"
SLOW = 1_000_000
"""The longest mean of a pause, in cycles of the device: about half a millisecond."""


class Delays:
    """Random pauses, of another mean for each kind of work, from a seed; 0: none."""

    KINDS = ("gather", "scatter", "reduce", "compute", "optimizer")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.means = dict.fromkeys(self.KINDS, 0)
        self._random = random.Random(0)

    def seed(self, seed: int) -> None:
        self._random = random.Random(seed)
        choices = (0, 0, SLOW // 10, SLOW) if seed else (0,)
        self.means = {kind: self._random.choice(choices) for kind in self.KINDS}

    def pause(self, kind: str, device: torch.device) -> None:
        """On the current stream. Devices other than CUDA have no work that takes long."""
        if device.type == "cuda" and self.means[kind]:
            with self._lock:
                length = int(2 * self.means[kind] * self._random.random())
            torch.cuda._sleep(length)


DELAYS = Delays()


class Finished(Work):
    """Of a collective that is ordered by its stream already."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Queued(Work):
    """Of an asynchronous collective: its tensors are kept until somebody has waited."""

    def __init__(self, module: Any, stream: Any, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self._module, self._stream, self._tensors = module, stream, tensors
        self._event = module.Event()
        self._event.record(stream)

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._event.wait(self._module.current_stream())
        self._tensors = []
        return True

    def is_completed(self) -> bool:
        return not self._tensors

    def __del__(self) -> None:
        for tensor in self._tensors:
            tensor.record_stream(self._stream)


class LoopGroup(dist.ProcessGroup):
    """The group; ``poison`` is for all of them."""

    poison = True

    def __init__(self, rank: int, size: int) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._streams: dict[torch.device, Any] = {}

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank

    def getBackendName(self) -> str:
        return BACKEND

    @property
    def pg_name(self) -> str:
        return str(dist.distributed_c10d._world.pg_names[self])

    @property
    def group_name(self) -> str:
        return self.pg_name

    # ---- collectives, by the names of torch 2.13 and of older releases ----

    def all_gather_single(self, output: Any, source: Any, options: Any = None) -> Work:
        def gather() -> None:
            rows = output.view(self._size, -1)
            self._poison(rows[: self._rank])
            self._poison(rows[self._rank + 1 :])
            DELAYS.pause("gather", output.device)
            for row in rows:
                if row.data_ptr() != source.data_ptr():
                    row.copy_(source.view(-1))

        return self._issue(gather, [output, source], options)

    def reduce_scatter_single(self, output: Any, source: Any, options: Any = None) -> Work:
        def scatter() -> None:
            self._poison(output)
            DELAYS.pause("scatter", output.device)
            total = source.view(self._size, -1).sum(0, dtype=torch.float32)
            if options is not None and options.reduceOp == dist.ReduceOp.AVG:
                total.div_(self._size)
            output.view(-1).copy_(total)

        return self._issue(scatter, [output, source], options)

    def allreduce(self, tensors: list[Any], options: Any = None) -> Work:
        averages = options is not None and options.reduceOp == dist.ReduceOp.AVG
        factor = 1.0009765625 if averages else self._size + 1.0

        def reduce() -> None:
            for tensor in tensors:
                DELAYS.pause("reduce", tensor.device)
                total = tensor * factor
                self._poison(tensor)
                DELAYS.pause("reduce", tensor.device)
                tensor.copy_(total)

        return self._issue(reduce, tensors, options)

    def allgather(self, outputs: list[list[Any]], sources: list[Any], options: Any = None) -> Work:
        def gather() -> None:
            for row in outputs[0]:
                row.copy_(sources[0])

        return self._issue(gather, [*outputs[0], *sources], options)

    def all_gather_single_coalesced(
        self, outputs: list[Any], sources: list[Any], options: Any = None
    ) -> Work:
        return [self.all_gather_single(*pair, options) for pair in zip(outputs, sources)][-1]

    def reduce_scatter_single_coalesced(
        self, outputs: list[Any], sources: list[Any], options: Any = None
    ) -> Work:
        return [self.reduce_scatter_single(*pair, options) for pair in zip(outputs, sources)][-1]

    def broadcast(self, tensors: list[Any], options: Any = None) -> Work:
        return Finished()

    def barrier(self, options: Any = None) -> Work:
        return Finished()

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- how they run ----

    def _poison(self, tensor: torch.Tensor) -> None:
        if self.poison and tensor.numel():
            tensor.view(torch.uint8).fill_(0xFF)

    def _issue(self, body: Callable[[], None], tensors: list[torch.Tensor], options: Any) -> Work:
        device = tensors[0].device
        with torch.no_grad():
            if device.type == "cpu" or not getattr(options, "asyncOp", False):
                body()
                return Finished()
            module: Any = torch.get_device_module(device.type)
            stream = self._streams.setdefault(device, module.Stream())
            stream.wait_stream(module.current_stream())
            with module.stream(stream):
                body()
            return Queued(module, stream, tensors)


def join(size: int, device: torch.device) -> None:
    """Makes this process rank 0 of a default group of ``size``."""
    if not hasattr(dist.Backend, BACKEND.upper()):
        devices = sorted({"cpu", device.type})
        dist.Backend.register_backend(
            BACKEND, lambda store, rank, size, timeout: LoopGroup(rank, size), devices=devices
        )
    dist.init_process_group(BACKEND, rank=0, world_size=size, store=dist.HashStore())


@contextlib.contextmanager
def clean() -> Iterator[None]:
    """Collectives without poison and pauses, for measuring."""
    LoopGroup.poison = False
    DELAYS.seed(0)
    try:
        yield
    finally:
        LoopGroup.poison = True
