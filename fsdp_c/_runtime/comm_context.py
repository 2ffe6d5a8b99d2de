"""``CommContext``: the streams of a communication context as torch objects."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.device_mesh import _get_device_handle
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext

import fsdp_c._C as _C

from .._compat.guard import follow_patches


class _SettableProperty:
    """A property with the value of ``read``, until code such as a patched ``lazy_init`` sets it."""

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


@follow_patches(FSDPCommContext)
class CommContext(_C.CommContext, FSDPCommContext):
    """Streams, events and pending buffers of the groups under one root (``_C.CommContext``).

    The class is a subclass of torch's ``FSDPCommContext``. On devices without streams, the streams
    are placeholders without effect.
    """

    def __init__(self, device: torch.device) -> None:
        self.device_handle = _get_device_handle(device.type)
        self._inputs: list[tuple[torch.Tensor, Any]] = []

    # ---- inputs of reduce-scatters by torch's functions ----

    def keep_input(self, buffer: torch.Tensor, end_event: Any) -> None:
        """Keeps the input of a reduce-scatter that ends with ``end_event``."""
        self._inputs.append((buffer, end_event))

    def release_inputs(self, keep: int = 0) -> None:
        """Releases all but the newest ``keep`` inputs.

        The current stream first waits for the reduce-scatters of the released inputs.
        """
        while len(self._inputs) > keep:
            self.device_handle.current_stream().wait_event(self._inputs[0][1])
            del self._inputs[0]

    def _get_stream(self, role: int) -> Any:
        numbers = self._stream_numbers(role)
        if numbers is None:
            return self.device_handle.current_stream()
        stream_class = getattr(self.device_handle, "Stream", torch.Stream)
        number, index, device_type = numbers
        return stream_class(stream_id=number, device_index=index, device_type=device_type)

    @_SettableProperty
    def all_gather_copy_in_stream(self) -> Any:
        """The stream that packs shards."""
        return self._get_stream(0)

    @_SettableProperty
    def all_gather_stream(self) -> Any:
        """The stream of all-gathers."""
        return self._get_stream(1)

    @_SettableProperty
    def reduce_scatter_stream(self) -> Any:
        """The stream of reduce-scatters."""
        return self._get_stream(2)

    @_SettableProperty
    def all_reduce_stream(self) -> Any:
        """The stream of all-reduces."""
        return self._get_stream(3)

    # The core owns the buffers and events of torch's attributes below.

    @_SettableProperty
    def all_gather_state(self) -> None:
        """Always None: the core owns the all-gather buffer that the next group frees."""
        return None

    @_SettableProperty
    def reduce_scatter_states(self) -> list[Any]:
        """A list with one item for each pending reduction."""
        return [None] * self.reductions_in_flight

    @_SettableProperty
    def _last_post_reduce_events(self) -> dict[Any, Any]:
        """Maps streams to events recorded after the pending reductions; empty without any."""
        if self.reductions_in_flight == 0:
            return {}
        streams = (self.reduce_scatter_stream, self.all_reduce_stream)
        return {stream: stream.record_event() for stream in streams}

    @property
    def gather_streams(self) -> tuple[Any, Any]:
        """The copy-in stream and the all-gather stream."""
        return self.all_gather_copy_in_stream, self.all_gather_stream

    def _gather_after(self, event: Any) -> None:
        """Makes later gathers wait for ``event``, recorded after the optimizer's step."""
        if self._stream_numbers(0) is not None:  # the all-gather stream waits for the copy-in
            self.all_gather_copy_in_stream.wait_event(event)

    def get_all_gather_streams(
        self, async_op: bool, training_state: TrainingState
    ) -> tuple[Any, Any]:
        """Returns the copy-in and gather streams of a gather by torch's functions.

        Returns the context's streams if the gather may overlap, else the current stream twice.
        """
        if not async_op and training_state in (TrainingState.FORWARD, TrainingState.PRE_BACKWARD):
            return self.gather_streams
        current_stream = self.device_handle.current_stream()
        return current_stream, current_stream
