"""A process group with one real rank on a device; the other ranks are simulated.

The collectives of FSDP2 are device work: ``all_gather_single``, ``reduce_scatter_single`` and
``allreduce`` pause for a random time before they write their output. As in NCCL, synchronous
collectives run on the current stream and return no Work, asynchronous ones run on a stream of the
group. The host never waits for them. Before the pause, outputs are filled with NaN. A reader that
does not wait therefore gets other bits. So does a collective whose input is overwritten too early.

The simulated ranks hold the same data as the real one. A reduce-scatter sums all rank shards of its
input, so that every shard affects the result.
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

BACKEND = "loop"
LONGEST_MEAN_PAUSE = 1_000_000
"""The longest mean of a pause in device clock cycles, about half a millisecond."""


class Delays:
    """Random pauses. A seed selects one mean per kind of work; seed 0 disables all pauses."""

    KINDS = ("gather", "scatter", "reduce", "compute", "optimizer")

    def __init__(self) -> None:
        self.native: Any = None
        """The module one_rank_group, if the process joined its group."""
        self._lock = threading.Lock()
        self.means = dict.fromkeys(self.KINDS, 0)
        self._random = random.Random(0)

    def seed(self, seed: int) -> None:
        self._random = random.Random(seed)
        choices = (0, 0, LONGEST_MEAN_PAUSE // 10, LONGEST_MEAN_PAUSE) if seed else (0,)
        self.set_means({kind: self._random.choice(choices) for kind in self.KINDS}, seed)

    def set_means(self, means: dict[str, int], seed: int = 1) -> None:
        """Sets the means, also of the collectives of one_rank_group.cpp."""
        self.means = means
        if self.native is not None:
            self.native.set_pauses([means[kind] for kind in self.KINDS[:3]], seed)

    def pause(self, kind: str, device: torch.device) -> None:
        """Pauses the current stream. Only CUDA devices have work that takes long."""
        if device.type == "cuda" and self.means[kind]:
            with self._lock:
                length = int(2 * self.means[kind] * self._random.random())
            torch.cuda._sleep(length)


DELAYS = Delays()


class Finished(Work):
    """Work of a collective that is complete, or that the current stream already orders."""

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Queued(Work):
    """Work of an asynchronous collective. The object holds the tensors until ``wait`` is called."""

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
    """The simulated group. ``poison`` is a class attribute and applies to all instances."""

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

    def all_gather_single(self, output: Any, source: Any, options: Any = None) -> Work | None:
        def gather() -> None:
            shards = output.view(self._size, -1)
            self._poison(shards[: self._rank])
            self._poison(shards[self._rank + 1 :])
            DELAYS.pause("gather", output.device)
            for shard in shards:
                if shard.data_ptr() != source.data_ptr():
                    shard.copy_(source.view(-1))

        return self._issue(gather, [output, source], options)

    def reduce_scatter_single(self, output: Any, source: Any, options: Any = None) -> Work | None:
        def scatter() -> None:
            self._poison(output)
            DELAYS.pause("scatter", output.device)
            total = source.view(self._size, -1).sum(0, dtype=torch.float32)
            if options is not None and options.reduceOp == dist.ReduceOp.AVG:
                total.div_(self._size)
            output.view(-1).copy_(total)

        return self._issue(scatter, [output, source], options)

    def allreduce(self, tensors: list[Any], options: Any = None) -> Work | None:
        averages = options is not None and options.reduceOp == dist.ReduceOp.AVG
        # An average of equal data is that data. The factor makes a missing all-reduce visible.
        factor = 1 + 2**-10 if averages else self._size + 1.0

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
            for shard in outputs[0]:
                shard.copy_(sources[0])

        return self._issue(gather, [*outputs[0], *sources], options) or Finished()

    def all_gather_single_coalesced(
        self, outputs: list[Any], sources: list[Any], options: Any = None
    ) -> Work:
        works = [self.all_gather_single(*pair, options) for pair in zip(outputs, sources)]
        return works[-1] or Finished()

    def reduce_scatter_single_coalesced(
        self, outputs: list[Any], sources: list[Any], options: Any = None
    ) -> Work:
        works = [self.reduce_scatter_single(*pair, options) for pair in zip(outputs, sources)]
        return works[-1] or Finished()

    def broadcast(self, tensors: list[Any], options: Any = None) -> Work:
        return Finished()

    def barrier(self, options: Any = None) -> Work:
        return Finished()

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    # ---- execution ----

    def _poison(self, tensor: torch.Tensor) -> None:
        if self.poison and tensor.numel():
            tensor.view(torch.uint8).fill_(0xFF)

    def _issue(
        self, body: Callable[[], None], tensors: list[torch.Tensor], options: Any
    ) -> Work | None:
        device = tensors[0].device
        with torch.no_grad():
            if device.type == "cpu" or not getattr(options, "asyncOp", False):
                body()
                return Finished() if device.type == "cpu" else None
            module: Any = torch.get_device_module(device.type)
            stream = self._streams.setdefault(device, module.Stream())
            stream.wait_stream(module.current_stream())
            with module.stream(stream):
                body()
            return Queued(module, stream, tensors)


def join(size: int, device: torch.device, native: bool = False) -> None:
    """Makes this process rank 0 of a default process group of ``size`` ranks.

    The group is a Python class, or with ``native`` the C++ backend of one_rank_group.cpp.
    """
    if native:
        _join_native(size, device)
        return
    if not hasattr(dist.Backend, BACKEND.upper()):
        devices = sorted({"cpu", device.type})
        dist.Backend.register_backend(
            BACKEND, lambda store, rank, size, timeout: LoopGroup(rank, size), devices=devices
        )
    dist.init_process_group(BACKEND, rank=0, world_size=size, store=dist.HashStore())


def _join_native(size: int, device: torch.device) -> None:
    import one_rank_group

    DELAYS.native = one_rank_group.load()
    name = "one_rank"
    devices = sorted({"cpu", device.type})
    dist.Backend.register_backend(name, one_rank_group.make_backend, devices=devices)
    dist.init_process_group(name, rank=0, world_size=size, store=dist.HashStore())


@contextlib.contextmanager
def without_pauses() -> Iterator[None]:
    """Disables poison within the context. Disables pauses until the next ``DELAYS.seed``."""
    LoopGroup.poison = False
    DELAYS.seed(0)
    try:
        yield
    finally:
        LoopGroup.poison = True
