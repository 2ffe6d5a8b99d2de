"""Bytes per second of gathers, reductions and kernels against size, beside a copy in memory.

Method. Two gloo ranks with one thread each, everything in float32, sizes of the unsharded data. All
take turns; the best of the rounds, since other processes only ever add to a time.

- Transport: ``all_gather`` and ``reduce_scatter`` of torch's process group; a unit of one parameter
  that is unsharded and resharded, or whose gradient is reduced, under stock and under ours, with
  packing and unpacking.
- Kernels of the CPU, through ctypes, on rank 0 while the other one waits: pack, unpack and pack
  gradients of eight parameters. ``memcpy`` copies as many bytes in one call. Bytes are counted
  once.

    python benchmarks/bandwidth.py [--most MIB] [--rounds N] [--json FILE]
"""

from __future__ import annotations

import argparse
import ctypes
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from ranks import start_ranks
from report import implementations, table, write_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/gpu/workers"))

from kernel_library import Backend, Column, Gradient, Segment, array

import fsdp_c._C as _C
from fsdp_c.compat import ALL_GATHER, REDUCE_SCATTER
from fsdp_c.ending import wait_for_threads

RANKS = 2
KIB = 1024
SIZES = tuple(64 * KIB * 4**power for power in range(6))  # to 64 MiB
PARTS = 8  # parameters
FLOAT32 = 6  # torch's number of the type
Call = Callable[[], object]
"""What it takes is timed, or a float that it returns: its own seconds."""
Calls = dict[str, Call]


class Unit(nn.Module):
    """One parameter of so many bytes; its gathers and reductions by hand."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size // 4 // 64, 64))


def sharded(name: str, size: int) -> tuple[Call, Call]:
    """A gather with its free, and a reduction, of a unit under an implementation."""
    unit: Any = implementations()[name](Unit(size))
    state = unit._get_fsdp_state()
    state._lazy_init()
    (group,) = state._fsdp_param_groups
    gradient = torch.ones(size // 4 // 64, 64)

    def gather() -> None:
        unit.unshard()
        unit.reshard()

    def reduce() -> float:
        unit.unshard()
        unit.weight.grad = gradient
        begin = time.perf_counter()
        group.post_backward()
        state._root_post_backward_final_callback()  # ours is in flight until then
        seconds = time.perf_counter() - begin
        assert unit.weight.grad is not None, name
        unit.weight.grad = None
        return seconds

    return gather, reduce


def transport(size: int) -> tuple[Calls, Calls]:
    """Gathers and reductions of ``size`` bytes."""
    whole, part = torch.ones(size // 4), torch.ones(size // 4 // RANKS)
    all_gather, reduce_scatter = getattr(dist, ALL_GATHER), getattr(dist, REDUCE_SCATTER)
    gathers: Calls = {"torch.distributed": lambda: all_gather(whole, part)}
    reductions: Calls = {"torch.distributed": lambda: reduce_scatter(part, whole)}
    for name in implementations():
        gathers[name], reductions[name] = sharded(name, size)
    return gathers, reductions


def kernels(size: int) -> Calls:
    """The CPU's kernels over ``PARTS`` parameters of ``size`` bytes together."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    name = ctypes.pythonapi.PyCapsule_GetName
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    capsule = _C._testing.kernels()
    backend = Backend(pointer(capsule, name(capsule)))
    source, target = torch.ones(size // 4), torch.zeros(size // 4)
    parts = list(zip(source.chunk(PARTS), target.chunk(PARTS), strict=True))
    numel = size // 4 // PARTS
    segments = [
        Segment(src=a.data_ptr(), dst=b.data_ptr(), count=numel, itemsize=4,
                src_dtype=FLOAT32, dst_dtype=FLOAT32)
        for a, b in parts
    ]  # fmt: skip
    half = numel * 4 // RANKS
    columns = [
        Column(dst=b.data_ptr(), offset=i * half, bytes=half, blocks=1)
        for i, (_, b) in enumerate(parts)
    ]
    gradients = [
        Gradient(src=a.data_ptr(), numel=numel, chunk=numel // RANKS, offset=i * numel // RANKS,
                 blocks=1, itemsize=4, src_dtype=FLOAT32)
        for i, (a, _) in enumerate(parts)
    ]  # fmt: skip
    packing, unpacking = array(Segment, segments), array(Column, columns)
    collecting = array(Gradient, gradients)
    rows, to, row = source.data_ptr(), target.data_ptr(), size // RANKS
    keep = (source, target)
    return {
        "memcpy": lambda keep=keep: ctypes.memmove(to, rows, size),
        "pack": lambda: backend.pack(packing),
        "unpack": lambda: backend.unpack(rows, row, RANKS, unpacking),
        "pack gradients": lambda: backend.pack_gradients(collecting, RANKS, to, row // 4, FLOAT32),
    }


def best_of(calls: Calls, rounds: int, before: Callable[[], object]) -> dict[str, float]:
    """Seconds of each call, the best of the rounds."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(rounds + 2):
        for name, call in calls.items():
            before()
            begin = time.perf_counter()
            own = call()
            seconds = own if isinstance(own, float) else time.perf_counter() - begin
            best[name] = min(best[name], seconds)
    return best


def measure(most: int, rounds: int) -> dict[str, dict[int, dict[str, float]]]:
    """GB/s by what is measured, size and name; in every rank."""
    found: dict[str, dict[int, dict[str, float]]] = {"gather": {}, "reduction": {}, "kernel": {}}
    for size in SIZES:
        if size > most:
            break
        parts = dict(zip(found, (*transport(size), kernels(size)), strict=True))
        for what, calls in parts.items():
            dist.barrier()
            alone = what == "kernel"
            if alone and dist.get_rank() != 0:
                continue
            seconds = best_of(calls, rounds, (lambda: None) if alone else dist.barrier)
            found[what][size] = {name: size / value / 1e9 for name, value in seconds.items()}
    return found


def size_name(size: int) -> str:
    return f"{size // KIB} KiB" if size < KIB * KIB else f"{size // KIB // KIB} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes per second against size.")
    parser.add_argument("--most", type=int, default=64, help="MiB of the largest")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--json", help="write the results to this file as well")
    options = parser.parse_args()
    if not start_ranks(RANKS):
        return
    found = measure(options.most * KIB * KIB, options.rounds)
    if dist.get_rank() == 0:
        for what, sizes in found.items():
            names = list(next(iter(sizes.values())))
            rows = [[size_name(size), *row.values()] for size, row in sizes.items()]
            print(f"{what}: GB/s\n{table(['', *names], rows)}\n", flush=True)
        write_json(options.json, "bandwidth", found)
    dist.barrier()
    dist.destroy_process_group()
    wait_for_threads()


if __name__ == "__main__":
    main()
