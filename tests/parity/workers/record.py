"""What a rank writes down while it runs a setting, and how two such records are compared.

A record is a list of entries in the order of events. Tensors are kept as dtype, shape and raw
bytes, so that equal means equal in bits (NaNs included); collectives are entries of the same list,
so that their place among the losses and gradients is compared too.
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
    """A tensor's value: dtype, shape and bytes; ``kind`` says what held it."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes = field(repr=False)
    kind: str = "Tensor"

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Bits:
        """The bits of a plain tensor, or of a DTensor's local shard (kind: its global layout)."""
        kind = type(tensor).__name__
        with torch.no_grad():
            if isinstance(tensor, DTensor):
                mesh = tensor.device_mesh
                kind = (
                    f"{kind} {tuple(tensor.shape)} {tensor.placements} on "
                    f"{tuple(mesh.shape)} {mesh.mesh_dim_names or ''}"
                )
                tensor = tensor._local_tensor  # at once: each operation on a DTensor takes longer
            tensor = tensor.detach()
            if hasattr(tensor, "held"):
                kind = f"{kind} of {type(tensor).__name__}"
                tensor = tensor.held
            flat = tensor.cpu().contiguous().view(-1).view(torch.uint8)
        return cls(str(tensor.dtype), tuple(tensor.shape), flat.numpy().tobytes(), kind)

    def tensor(self) -> torch.Tensor:
        """The value as a tensor of its dtype and shape."""
        dtype = getattr(torch, self.dtype.removeprefix("torch."))
        if not self.data:
            return torch.empty(self.shape, dtype=dtype)
        return torch.frombuffer(bytearray(self.data), dtype=dtype).view(self.shape)


Entry = tuple[str, Any]


class Recorder:
    """Collects the entries of one setting on one rank."""

    def __init__(self) -> None:
        self.entries: list[Entry] = []

    def note(self, label: str, value: Any) -> None:
        self.entries.append((label, value))

    def tensor(self, label: str, tensor: torch.Tensor | None) -> None:
        self.entries.append((label, None if tensor is None else Bits.of(tensor)))


class Tap(threading.local):
    """Where this thread's collectives are noted: ``recorder``, or nowhere."""

    recorder: Recorder | None = None

    def note(self, name: str, tensors: list[Any], group: dist.ProcessGroup) -> None:
        """Note a collective: its name, dtype and element count of its tensors, its ranks.

        One of a group of one rank is not noted: nothing travels, and whether it is issued at all is
        the implementation's own affair.
        """
        if self.recorder is not None and group.size() > 1:
            ranks = dist.get_process_group_ranks(_known(group))
            facts = [_facts(arg) for arg in tensors if _has_tensors(arg)]
            self.recorder.note(f"collective {name.strip('_')}", (*facts, ranks))


def _known(group: dist.ProcessGroup) -> dist.ProcessGroup:
    """The group as torch.distributed knows it: ours may exchange rows over one of the same name."""
    if group in c10d._world.pg_group_ranks:
        return group
    return c10d._resolve_process_group(group.group_name)


@contextmanager
def recorded_collectives() -> Iterator[Tap]:
    """Put a recording kernel before the kernels of the c10d operators.

    A dispatch mode would see them as well, but would also see every other operator, and a fast
    path may rightly step aside under a mode. The kernel sits at the BackendSelect key, which every
    call passes, those made below autograd included. It goes on by redispatching, which releases
    the GIL (``call_boxed`` of a kernel taken from the dispatcher would hold it while waiting for
    peers; gloo's threads need it to free tensors).
    """
    tap = Tap()
    library = torch.library.Library("c10d", "IMPL")
    for name in COLLECTIVES:
        _wrap(library, name, tap)
    try:
        yield tap
    finally:
        library._destroy()


def _wrap(library: torch.library.Library, name: str, tap: Tap) -> None:
    operator = getattr(torch.ops.c10d, name).default
    group_at = [argument.name for argument in operator._schema.arguments].index("process_group")
    keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, DISPATCH_KEYS[DEVICE]))

    def kernel(*args: Any) -> Any:
        tap.note(name, list(args[:group_at]), dist.ProcessGroup.unbox(args[group_at]))
        return operator.redispatch(keys, *args)

    library.impl(name, kernel, "BackendSelect")


def _has_tensors(arg: Any) -> bool:
    return isinstance(arg, (torch.Tensor, list, tuple))


def _facts(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return (str(arg.dtype), arg.numel())
    return [_facts(entry) for entry in arg]


def error_entry(error: BaseException) -> Entry:
    """An exception as an entry: type and message, memory addresses blanked.

    Without the C++ stack that torch appends where TORCH_SHOW_CPP_STACKTRACES is set: it names
    whoever called the operator.
    """
    message = re.sub(r"0x[0-9a-f]+", "0x", str(error).partition("\nException raised from")[0])
    return ("error", f"{type(error).__name__}: {message}")


def trained(entries: list[Entry]) -> list[Entry]:
    """What a record says about tensors that the user sees."""
    return [entry for entry in entries if isinstance(entry[1], Bits)]


def differences(stock: list[Entry], ours: list[Entry], limit: int = 8) -> list[str]:
    """What differs between two records, at most ``limit`` lines; empty when they are equal."""
    found: list[str] = []
    for index, (left, right) in enumerate(zip(stock, ours, strict=False)):
        if left != right:
            found.append(f"entry {index}: {_difference(left, right)}")
        if left[0] != right[0]:
            # The sequences of events have parted: what follows only repeats that.
            found += [f"  before it: {_show(entry)}" for entry in stock[max(0, index - 3) : index]]
            break
        if len(found) >= limit:
            found.append("(and more)")
            break
    if len(stock) != len(ours):
        found.append(f"number of entries: stock {len(stock)}, ours {len(ours)}")
    return found


def _difference(left: Entry, right: Entry) -> str:
    (label, a), (other, b) = left, right
    if label != other or not (isinstance(a, Bits) and isinstance(b, Bits)):
        return f"stock {_show(left)}, ours {_show(right)}"
    if (a.dtype, a.shape, a.kind) != (b.dtype, b.shape, b.kind):
        return f"{label}: stock {a}, ours {b}"
    x, y = a.tensor(), b.tensor()
    gap = (x.double() - y.double()).abs()
    return f"{label}: {int((x != y).sum())} of {x.numel()} differ, by up to {gap.max():.3g}"


def _show(entry: Entry) -> str:
    label, value = entry
    return f"{label} {value}"
