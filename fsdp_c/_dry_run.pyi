"""The core of fsdp_c without memory: it counts bytes and records events (``csrc/dry_run``)."""

from typing import Any, NamedTuple

class Event(NamedTuple):
    """One event of a dry run. csrc/dry_run/record.h lists the kinds, and the fields of each.

    Attributes:
        kind: The name of the kind.
        call: The index of the call that caused the event; -1 before the first call.
        unit: The index of the unit, or -1.
        stream: The number of the stream.
        object: The number of the storage, collective, stream event or state, as ``kind`` requires.
        bytes: The size of the memory or data.
        live: For ``alloc`` and ``free``: bytes in use for this purpose.
        label: The purpose, range, process group or parameter.
    """

    kind: str
    call: int
    unit: int
    stream: int
    object: int
    bytes: int
    live: int
    label: str | None

def run(
    units: list[dict[str, Any]],
    states: list[dict[str, Any]],
    calls: list[tuple[Any, ...]],
    *,
    streams: bool = False,
) -> tuple[list[Event], int]:
    """Runs the calls on a model without memory, as rank 0.

    Args:
        units: The parameter groups. Keys: ``state`` (index), ``world``, ``replicas``,
            ``post_forward_world``, ``reduce`` (dtype), ``bucket_bytes``, ``max_input_buffers`` (of
            reductions), ``reshard_after_forward``, ``reshard_after_backward``,
            ``unshard_in_backward``, ``reduce_grads``, ``all_reduce_grads``, ``overlap``,
            ``offload``, ``pinned``, ``params``. Keys of a parameter: ``name``, ``sizes``, ``dim``,
            ``dtype``, ``compute``, ``reduce``, ``requires_grad``.
        states: The ``fully_shard`` calls in module order. Keys: ``root`` (index), ``modules``
            (number), ``forward_prefetch``, ``backward_prefetch`` (indices).
        calls: Names and integers: ``pre_forward``, ``post_forward``, ``pre_backward`` and
            ``post_backward`` (state), ``backward``, ``end``, ``alloc`` (storage, bytes), ``free``
            (storage), ``gradient`` (unit, parameter, storage or -1, bytes).
        streams: Whether the device has streams.

    Returns:
        The events, and the largest number of bytes of device memory in use.

    Raises:
        ValueError: An item is invalid. The message names the item.
    """
