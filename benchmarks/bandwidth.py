"""Bytes per second of gathers, reductions and CPU kernels against size.

Method. Two gloo ranks with one thread each, all data in float32. Sizes are those of the unsharded
data. The implementations take turns. The minimum over the rounds counts, because other
processes can only lengthen a call.

- Transport: ``all_gather`` and ``reduce_scatter`` of torch's process group, and a unit of one
  parameter under torch's FSDP2 ("torch") and fsdp_c. A gather unshards and reshards the
  unit. A reduction reduces its gradient. Both include packing and unpacking.
- CPU kernels, called through ctypes on rank 0 while the other rank waits: pack, unpack and pack
  gradients of eight parameters. ``memcpy`` copies as many bytes in one call. Each byte counts once,
  not twice for read and write.

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
from ranks import WARM_UP, start_ranks
from report import format_table, get_implementations, parse_positive, write_json

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/gpu/workers"))

from kernel_library import Backend, Gradient, Segment, Slot, array

import fsdp_c._C as _C
from fsdp_c._compat.shutdown import wait_for_threads
from fsdp_c._compat.torch_releases import ALL_GATHER, REDUCE_SCATTER

RANKS = 2
KIB = 1024
SIZES = tuple(64 * KIB * 4**power for power in range(6))  # to 64 MiB
PARAMETERS = 8
FLOAT32 = 6  # torch's ScalarType::Float
Call = Callable[[], object]
"""A call to measure. A float result is the duration of the call in seconds."""
Calls = dict[str, Call]


class Unit(nn.Module):
    """A module with one parameter of ``size`` bytes, whose FSDP methods are called directly."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size // 4 // 64, 64))


def make_unit_calls(name: str, size: int) -> tuple[Call, Call]:
    """Returns a call that gathers and reshards the unit, and one that reduces its gradient."""
    unit: Any = get_implementations()[name](Unit(size))
    state = unit._get_fsdp_state()
    state._lazy_init()
    groups = getattr(state, "_fsdp_param_groups", None)
    group = state._fsdp_param_group if groups is None else groups[0]  # torch 2.11 has one group
    gradient = torch.ones(size // 4 // 64, 64)

    def gather() -> None:
        unit.unshard()
        unit.reshard()

    def reduce() -> float:
        unit.unshard()
        unit.weight.grad = gradient
        if hasattr(state._state_ctx, "manual_backward_finalization_active"):
            # torch sets it at the beginning of a backward, since 2.15
            state._state_ctx.manual_backward_finalization_active = False
        begin = time.perf_counter()
        group.post_backward()
        state._root_post_backward_final_callback()  # fsdp_c waits for the reduction here
        seconds = time.perf_counter() - begin
        assert unit.weight.grad is not None, name
        unit.weight.grad = None
        return seconds

    return gather, reduce


def make_transport_calls(size: int) -> tuple[Calls, Calls]:
    """Returns the calls for gathers and for reductions of ``size`` bytes, by implementation."""
    full, shard = torch.ones(size // 4), torch.ones(size // 4 // RANKS)
    all_gather, reduce_scatter = getattr(dist, ALL_GATHER), getattr(dist, REDUCE_SCATTER)
    gathers: Calls = {"torch.distributed": lambda: all_gather(full, shard)}
    reductions: Calls = {"torch.distributed": lambda: reduce_scatter(shard, full)}
    for name in get_implementations():
        gathers[name], reductions[name] = make_unit_calls(name, size)
    return gathers, reductions


def make_kernel_calls(size: int) -> Calls:
    """Returns calls of the CPU kernels for ``PARAMETERS`` parameters of ``size`` bytes in total."""
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    get_name = ctypes.pythonapi.PyCapsule_GetName
    get_name.restype, get_name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    capsule = _C._testing.kernels()
    backend = Backend(get_pointer(capsule, get_name(capsule)))
    source, target = torch.ones(size // 4), torch.zeros(size // 4)
    parts = list(zip(source.chunk(PARAMETERS), target.chunk(PARAMETERS), strict=True))
    numel = size // 4 // PARAMETERS
    segments = [
        Segment(src=a.data_ptr(), dst=b.data_ptr(), count=numel, itemsize=4,
                src_dtype=FLOAT32, dst_dtype=FLOAT32)
        for a, b in parts
    ]  # fmt: skip
    bytes_per_rank = numel * 4 // RANKS
    slots = [
        Slot(dst=b.data_ptr(), offset=i * bytes_per_rank, bytes=bytes_per_rank, blocks=1)
        for i, (_, b) in enumerate(parts)
    ]
    gradients = [
        Gradient(src=a.data_ptr(), numel=numel, chunk=numel // RANKS, offset=i * numel // RANKS,
                 blocks=1, itemsize=4, src_dtype=FLOAT32)
        for i, (a, _) in enumerate(parts)
    ]  # fmt: skip
    segments_array, slots_array = array(Segment, segments), array(Slot, slots)
    gradients_array = array(Gradient, gradients)
    src, dst, rank_bytes = source.data_ptr(), target.data_ptr(), size // RANKS
    keep_alive = (source, target)
    return {
        "memcpy": lambda keep_alive=keep_alive: ctypes.memmove(dst, src, size),
        "pack": lambda: backend.pack(segments_array),
        "unpack": lambda: backend.unpack(src, rank_bytes, RANKS, slots_array),
        "pack gradients": lambda: backend.pack_gradients(
            gradients_array, RANKS, dst, rank_bytes // 4, FLOAT32
        ),
    }


def measure_best(calls: Calls, rounds: int, prepare: Callable[[], object]) -> dict[str, float]:
    """Returns the shortest duration of each call in seconds. ``prepare()`` precedes each call."""
    best = dict.fromkeys(calls, float("inf"))
    for _ in range(WARM_UP + rounds):  # rounds of warm-up cannot lower the minimum
        for name, call in calls.items():
            prepare()
            begin = time.perf_counter()
            result = call()
            seconds = result if isinstance(result, float) else time.perf_counter() - begin
            best[name] = min(best[name], seconds)
    return best


def measure(max_size: int, rounds: int) -> dict[str, dict[int, dict[str, float]]]:
    """Returns GB/s by operation, size and name. Every rank must call it."""
    rates: dict[str, dict[int, dict[str, float]]] = {"gather": {}, "reduction": {}, "kernel": {}}
    for size in SIZES:
        if size > max_size:
            break
        calls_by_operation = dict(
            zip(rates, (*make_transport_calls(size), make_kernel_calls(size)), strict=True)
        )
        for operation, calls in calls_by_operation.items():
            dist.barrier()
            is_local = operation == "kernel"
            if is_local and dist.get_rank() != 0:
                continue
            seconds = measure_best(calls, rounds, (lambda: None) if is_local else dist.barrier)
            rates[operation][size] = {name: size / value / 1e9 for name, value in seconds.items()}
    return rates


def format_size(size: int) -> str:
    return f"{size // KIB} KiB" if size < KIB * KIB else f"{size // KIB // KIB} MiB"


def main() -> None:
    parser = argparse.ArgumentParser(description="Bytes per second against size.")
    parser.add_argument("--most", type=parse_positive, default=64, help="largest size in MiB")
    parser.add_argument("--rounds", type=parse_positive, default=30)
    parser.add_argument("--json", help="write the results to this file as well")
    options = parser.parse_args()
    if not start_ranks(RANKS):
        return
    rates = measure(options.most * KIB * KIB, options.rounds)
    if dist.get_rank() == 0:
        for operation, sizes in rates.items():
            names = list(next(iter(sizes.values())))
            rows = [[format_size(size), *row.values()] for size, row in sizes.items()]
            print(f"{operation}: GB/s\n{format_table(['', *names], rows)}\n", flush=True)
        write_json(options.json, "bandwidth", rates)
    dist.barrier()
    dist.destroy_process_group()
    wait_for_threads()


if __name__ == "__main__":
    main()
