"""The number of C frames between a hook and the process group."""

from __future__ import annotations

import ctypes
import sys
from collections import Counter
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

import fsdp_c._C as _C
from fsdp_c import fully_shard

LIBC = ctypes.CDLL(None)
MAX_FRAMES = 10
PYTHON_GROUP_FRAMES = 2
"""Frames of pybind11 that call a method of a process group in Python. A C++ group has none."""
AUTOGRAD_FRAMES = 1
"""The C++ object that autograd calls in backward, and which calls the hook."""

pytestmark = [
    pytest.mark.skipif(not hasattr(LIBC, "backtrace"), reason="needs glibc's backtrace()"),
    pytest.mark.skipif(sys.platform != "linux", reason="counts the frames of gcc's build"),
    pytest.mark.skipif(_C._testing.assertions, reason="debug builds inline less"),
]


class Symbol(ctypes.Structure):
    """Dl_info of dladdr()."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("name", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def count_extension_frames() -> int:
    """Counts the extension's innermost consecutive frames in the C stack of the caller."""
    addresses = (ctypes.c_void_p * 256)()
    depth = LIBC.backtrace(addresses, len(addresses))
    symbol = Symbol()
    count = 0
    for address in addresses[:depth]:
        found = LIBC.dladdr(ctypes.c_void_p(address), ctypes.byref(symbol))
        if found and symbol.file is not None and symbol.file.decode() == _C.__file__:
            count += 1
        elif count > 0:
            break
    return count


class Group(dist.ProcessGroup):
    """A process group in Python that records the frames between each call and its hook."""

    def __init__(self, ranks: int, frames: list[tuple[str, int]]) -> None:
        super().__init__(0, ranks)
        self.ranks, self.frames = ranks, frames

    def getBackendName(self) -> str:
        return "python"

    def rank(self) -> int:
        return 0

    def all_gather_single(self, output: Any, shard: Any, options: Any = None) -> None:
        self.frames.append(("gather", count_extension_frames()))
        output.copy_(shard.clone().repeat(self.ranks))

    def reduce_scatter_single(self, output: Any, input_tensor: Any, options: Any = None) -> None:
        self.frames.append(("reduce", count_extension_frames()))
        output.copy_(input_tensor.view(self.ranks, -1).sum(0))

    _allgather_base = all_gather_single
    _reduce_scatter_base = reduce_scatter_single


def test_hook_reaches_process_group_in_ten_frames(fake_group: int) -> None:
    frames: list[tuple[str, int]] = []
    mesh = init_device_mesh("cpu", (fake_group,))
    model: Any = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
        (group,) = layer._get_fsdp_state()._fsdp_param_groups
        group.mesh_info.shard_process_group = Group(fake_group, frames)
    fully_shard(model, mesh=mesh)
    model(torch.ones(2, 8)).sum().backward()
    frames.clear()  # the first step negotiates the transport
    output = model(torch.ones(2, 8))
    forward = list(frames)
    output.sum().backward()
    assert [kind for kind, _ in forward] == ["gather"] * 3
    assert Counter(kind for kind, _ in frames) == {"gather": 6, "reduce": 3}
    for _, count in forward:
        assert 1 < count <= MAX_FRAMES + PYTHON_GROUP_FRAMES
    for _, count in frames[len(forward) :]:
        assert 1 < count <= MAX_FRAMES + PYTHON_GROUP_FRAMES + AUTOGRAD_FRAMES
