"""The cold side of the communication context: its streams as torch objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext

import fsdp_c._C as _C

from .guard import shows


class _Settable:
    """What ``read`` gives, until somebody sets something else: a patched ``lazy_init`` does."""

    def __init__(self, read: Callable[[Any], Any]) -> None:
        self.read = read
        self.name = read.__name__
        self.__doc__ = read.__doc__

    def __get__(self, obj: Any, owner: type | None = None) -> Any:
        if obj is None:
            return self
        return vars(obj)[self.name] if self.name in vars(obj) else self.read(obj)

    def __set__(self, obj: Any, value: Any) -> None:
        vars(obj)[self.name] = value


@shows(FSDPCommContext)
class CommContext(_C.CommContext, FSDPCommContext):
    """Streams, events and buffers in flight of the groups under one root (``_C.CommContext``).

    torch's ``FSDPCommContext`` by type. Devices without streams have stand-ins that do nothing.
    """

    def __init__(self, device: torch.device) -> None:
        self.device_handle = _get_device_handle(device.type)
        self._inputs: list[tuple[torch.Tensor, Any]] = []

    # ---- inputs of reduce-scatters that torch's functions make ----

    def keep_input(self, buffer: torch.Tensor, reduced: Any) -> None:
        """Keeps the input of a reduce-scatter that ends with the event ``reduced``."""
        self._inputs.append((buffer, reduced))

    def release_inputs(self, keep: int = 0) -> None:
        """Lets the oldest of them go, once the current stream waits for their reduce-scatters."""
        while len(self._inputs) > keep:
            self.device_handle.current_stream().wait_event(self._inputs[0][1])
            del self._inputs[0]

    def _stream(self, which: int) -> Any:
        numbers = self._stream_numbers(which)
        if numbers is None:
            return self.device_handle.current_stream()
        kind = getattr(self.device_handle, "Stream", torch.Stream)
        number, index, device_type = numbers
        return kind(stream_id=number, device_index=index, device_type=device_type)

    @_Settable
    def all_gather_copy_in_stream(self) -> Any:
        """Where shards are packed."""
        return self._stream(0)

    @_Settable
    def all_gather_stream(self) -> Any:
        """Where all-gathers run."""
        return self._stream(1)

    @_Settable
    def reduce_scatter_stream(self) -> Any:
        """Where reduce-scatters run."""
        return self._stream(2)

    @_Settable
    def all_reduce_stream(self) -> Any:
        """Where all-reduces run."""
        return self._stream(3)

    # What torch keeps here the core has; these tell only whether there is anything.

    @_Settable
    def all_gather_state(self) -> None:
        """None: the buffer that waits for the next group is the core's."""
        return None

    @_Settable
    def reduce_scatter_states(self) -> list[Any]:
        """As many items as there are reductions in flight."""
        return [None] * self.reductions_in_flight

    @_Settable
    def _last_post_reduce_events(self) -> dict[Any, Any]:
        """Stream -> event that comes after the reductions in flight; empty without any."""
        if self.reductions_in_flight == 0:
            return {}
        streams = (self.reduce_scatter_stream, self.all_reduce_stream)
        return {stream: stream.record_event() for stream in streams}

    @property
    def gather_streams(self) -> tuple[Any, Any]:
        """The first two."""
        return self.all_gather_copy_in_stream, self.all_gather_stream

    def _gather_after(self, event: Any) -> None:
        """Gathers that are begun from now on wait for ``event`` (of the optimizer's step)."""
        if self._stream_numbers(0) is not None:  # the other gather stream comes behind its copies
            self.all_gather_copy_in_stream.wait_event(event)

    def get_all_gather_streams(
        self, async_op: bool, training_state: TrainingState
    ) -> tuple[Any, Any]:
        """Copy-in and gather streams: the context's where gathers may run ahead, else the
        current one."""
        if not async_op and training_state in (TrainingState.FORWARD, TrainingState.PRE_BACKWARD):
            return self.gather_streams
        current = self.device_handle.current_stream()
        return current, current
