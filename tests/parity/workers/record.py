"""Records what a rank observes while it runs a setting, and compares two records.

A record is a list of entries in the order of events. Tensors are stored as dtype, shape and raw
bytes, so that equal means equal in bits, NaNs included. Collectives are entries of the same list,
so that their order relative to losses and gradients is compared too.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from setting import DEVICE
from torch.distributed.tensor import DTensor

DISPATCH_KEYS = {"cpu": "CPU", "sim": "PrivateUse1"}

COLLECTIVES = (
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "allgather_into_tensor_coalesced_",
    "allreduce_",
    "allreduce_coalesced_",
    "alltoall_base_",
    "broadcast_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
)
"""The c10d operators that are recorded."""


@dataclass(frozen=True)
class Bits:
    """A tensor's dtype, shape and bytes. ``kind`` describes its class and, for DTensors, layout."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes = field(repr=False)
    kind: str = "Tensor"

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Bits:
        """Returns the bits of a plain tensor or of a DTensor's local shard."""
        kind = type(tensor).__name__
        with torch.no_grad():
            if isinstance(tensor, DTensor):
                mesh = tensor.device_mesh
                kind = (
                    f"{kind} {tuple(tensor.shape)} {tensor.placements} on "
                    f"{tuple(mesh.shape)} {mesh.mesh_dim_names or ''}"
                )
                tensor = tensor._local_tensor  # operations on a DTensor would be slow
            tensor = tensor.detach()
            if hasattr(tensor, "held"):  # the subclasses of harness/extensions.py and wrapping.py
                kind = f"{kind} of {type(tensor).__name__}"
                tensor = tensor.held
            flat = tensor.cpu().contiguous().view(-1).view(torch.uint8)
        return cls(str(tensor.dtype), tuple(tensor.shape), flat.numpy().tobytes(), kind)

    def tensor(self) -> torch.Tensor:
        """Returns the value as a tensor."""
        dtype = getattr(torch, self.dtype.removeprefix("torch."))
        if not self.data:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(bytearray(self.data), dtype=dtype).view(self.shape)


Entry = tuple[str, Any]


class Recorder:
    """Collects the entries of one setting on one rank."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def record(self, label: str, value: Any) -> None:
        self.entries.append((label, value))

    def tensor(self, label: str, tensor: torch.Tensor | None) -> None:
        self.entries.append((label, None if tensor is None else Bits.of(tensor)))


class CollectiveRecorder(threading.local):
    """Per-thread recorder of collectives. ``recorder`` is None while nothing is recorded."""

    recorder: Recorder | None = None

    def record(self, name: str, tensors: list[Any], group: dist.ProcessGroup) -> None:
        """Records a collective: name, dtype and element count of its tensors, and its ranks.

        Collectives of single-rank groups are not recorded: they move no data, and implementations
        may omit them.
        """
        if self.recorder is not None and group.size() > 1:
            ranks = dist.get_process_group_ranks(_registered_group(group))
            descriptions = [_describe(arg) for arg in tensors if _contains_tensors(arg)]
            self.recorder.record(f"collective {name.strip('_')}", (*descriptions, ranks))


def _registered_group(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """Returns the group that torch.distributed has registered. fsdp_c may run collectives over an
    unregistered group with the same name."""
    if group in c10d._world.pg_group_ranks:
        return group
    return c10d._resolve_process_group(group.group_name)


@contextmanager
def recorded_collectives() -> Iterator[CollectiveRecorder]:
    """Registers a recording kernel that runs before the kernels of the c10d operators.

    A dispatch mode would also receive all other operators, and implementations may disable fast
    paths under a mode. The kernel is registered at the BackendSelect key, through which all calls
    go, including those below autograd. The kernel redispatches, because redispatch releases the
    GIL. ``call_boxed`` would hold the GIL while it waits for peers, but gloo's threads need the GIL
    to free tensors.
    """
    collective_recorder = CollectiveRecorder()
    library = torch.library.Library("c10d", "IMPL")
    for name in COLLECTIVES:
        _wrap(library, name, collective_recorder)
    try:
        yield collective_recorder
    finally:
        library._destroy()


def _wrap(
    library: torch.library.Library, name: str, collective_recorder: CollectiveRecorder
) -> None:
    operator = getattr(torch.ops.c10d, name).default
    group_index = [argument.name for argument in operator._schema.arguments].index("process_group")
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, DISPATCH_KEYS[DEVICE]))

    def kernel(*args: Any) -> Any:
        collective_recorder.record(
            name, list(args[:group_index]), dist.ProcessGroup.unbox(args[group_index])
        )
        return operator.redispatch(keys, *args)

    library.impl(name, kernel, "BackendSelect")


def _contains_tensors(arg: Any) -> bool:
    return isinstance(arg, (torch.Tensor, list, tuple))


def _describe(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return (str(arg.dtype), arg.numel())
    return [_describe(entry) for entry in arg]


def error_entry(error: BaseException) -> Entry:
    """Converts an exception to an entry: its type and message, without memory addresses.

    The C++ stack that torch appends under TORCH_SHOW_CPP_STACKTRACES is removed, because it
    contains the operator's callers.
    """
    message = re.sub(r"0x[0-9a-f]+", "0x", str(error).partition("\nException raised from")[0])
    return ("error", f"{type(error).__name__}: {message}")


def tensor_entries(entries: list[Entry]) -> list[Entry]:
    """Returns the entries that hold tensors: the results that are visible to users."""
    return [entry for entry in entries if isinstance(entry[1], Bits)]


def differences(
    torch_entries: list[Entry], fsdp_c_entries: list[Entry], limit: int = 8
) -> list[str]:
    """Lists the first ``limit`` differences between two records, and different lengths."""
    lines: list[str] = []
    for index, (left, right) in enumerate(zip(torch_entries, fsdp_c_entries, strict=False)):
        if left != right:
            lines.append(f"entry {index}: {_difference(left, right)}")
        if left[0] != right[0]:
            # The event sequences diverge here, so that all later entries differ too.
            lines += [
                f"  before it: {_format(entry)}"
                for entry in torch_entries[max(0, index - 3) : index]
            ]
            break
        if len(lines) >= limit:
            lines.append("(and more)")
            break
    if len(torch_entries) != len(fsdp_c_entries):
        lines.append(f"number of entries: torch {len(torch_entries)}, fsdp_c {len(fsdp_c_entries)}")
    return lines


def _difference(left: Entry, right: Entry) -> str:
    (label, a), (other_label, b) = left, right
    if label != other_label or not (isinstance(a, Bits) and isinstance(b, Bits)):
        return f"torch {_format(left)}, fsdp_c {_format(right)}"
    if (a.dtype, a.shape, a.kind) != (b.dtype, b.shape, b.kind):
        return f"{label}: torch {a}, fsdp_c {b}"
    x, y = a.tensor(), b.tensor()
    deviation = (x.double() - y.double()).abs()
    return f"{label}: {int((x != y).sum())} of {x.numel()} differ, by up to {deviation.max():.3g}"


def _format(entry: Entry) -> str:
    label, value = entry
    return f"{label} {value}"
