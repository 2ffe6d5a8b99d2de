"""Measures the bandwidth of each kernel, beside a device memory copy and torch's own operation.

Bandwidth counts bytes read and written. The parameters are those of one layer of an 8 B Llama. On
CUDA the kernels come from a library built from the extension's source. Times come from CUDA events,
as the median of several rounds. A kernel that must reach ``GOAL`` of the memory copy, and does not,
fails the step. Without CUDA a small layer runs on the fake kernels, which only checks that this
script works.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import kernel_library as library
import torch
from kernel_library import Gradient, Segment, Slot
from outcome import ON_CUDA, SMALL, conclude

GOAL = 0.8
GOAL_BYTES = 100_000_000
"""Smaller transfers have no goal, because a device's L2 cache may hold them."""
BF16, FP32 = 15, 6
LAYER = (
    *((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096)),
    *((14336, 4096), (14336, 4096), (4096, 14336), (4096, 1), (4096, 1)),
)
DEVICE = torch.device("cuda" if ON_CUDA else "cpu")
REPEATS = 5
"""Launches between two events, so that host time does not limit the measurement."""


@dataclass
class Work:
    """One operation to measure. If ``has_goal``, and with at least GOAL_BYTES, it must reach
    GOAL of the memory copy."""

    name: str
    bytes: int
    run: Callable[[], Any]
    torch_run: Callable[[], Any] | None = None
    has_goal: bool = True


def is_below_goal(work: Work, of_memcpy: float) -> bool:
    return work.has_goal and work.bytes >= GOAL_BYTES and of_memcpy < GOAL


def shapes() -> list[tuple[int, int]]:
    return [(rows // 16, max(c // 64, 1)) for rows, c in LAYER] if SMALL else list(LAYER)


def random_tensor(numel: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(numel, dtype=torch.bfloat16, device=DEVICE).to(dtype)


def milliseconds(run: Callable[[], Any]) -> float:
    """Returns the time of one call in milliseconds, as the median of several rounds."""
    for _ in range(3):
        run()
    return statistics.median(_round(run) for _ in range(1 if SMALL else 11)) / REPEATS


def _round(run: Callable[[], Any]) -> float:
    if not ON_CUDA:
        begin = time.perf_counter()
        for _ in range(REPEATS):
            run()
        return (time.perf_counter() - begin) * 1000
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)
    first.record()
    for _ in range(REPEATS):
        run()
    last.record()
    torch.cuda.synchronize()
    return float(first.elapsed_time(last))


def stream() -> int:
    return torch.cuda.current_stream().cuda_stream if ON_CUDA else 0


def pack(world: int, source: torch.dtype) -> Work:
    shards = [random_tensor(rows * columns // world, source) for rows, columns in shapes()]
    total = sum(shard.numel() for shard in shards)
    row = torch.empty(total, dtype=torch.bfloat16, device=DEVICE)
    parts = list(row.split([shard.numel() for shard in shards]))
    code, size = (FP32, 4) if source == torch.float32 else (BF16, 2)
    segments = library.array(
        Segment,
        [
            Segment(
                src=shard.data_ptr(),
                dst=part.data_ptr(),
                count=shard.numel(),
                itemsize=size,
                src_dtype=code,
                dst_dtype=BF16,
            )
            for shard, part in zip(shards, parts)
        ],
    )
    return Work(
        f"pack {str(source)[6:]} to bfloat16, {world} ranks",
        total * (size + 2),
        lambda: library.cuda().pack(segments, stream()),
        lambda: torch._foreach_copy_(parts, shards),
    )


def unpack(world: int, shift: int = 0) -> Work:
    """Measures unpack; ``shift`` is the offset in bytes of the buffer from 16-byte alignment."""
    sizes = [rows * columns // world for rows, columns in shapes()]
    total = sum(sizes)
    memory = random_tensor(total * world + 8, torch.bfloat16)
    gathered = memory[shift // 2 : shift // 2 + total * world].view(world, total)
    outputs = [torch.empty(world, size, dtype=torch.bfloat16, device=DEVICE) for size in sizes]
    descriptors, offset = [], 0
    for size, entry in zip(sizes, outputs):
        descriptors.append(Slot(dst=entry.data_ptr(), offset=offset * 2, bytes=size * 2, blocks=1))
        offset += size
    slots = library.array(Slot, descriptors)
    return Work(
        f"unpack bfloat16, {world} ranks" + (f", {shift} bytes off" if shift else ""),
        total * world * 4,
        lambda: library.cuda().unpack(gathered.data_ptr(), total * 2, world, slots, stream()),
        lambda: torch.split_with_sizes_copy(gathered, sizes, dim=1, out=outputs),
    )


def pack_gradients(world: int, target: torch.dtype) -> Work:
    grads = [random_tensor(rows * c, torch.bfloat16).view(rows, c) for rows, c in shapes()]
    total = sum(grad.numel() for grad in grads) // world
    buffer = torch.empty(world, total, dtype=target, device=DEVICE)
    code, size = (FP32, 4) if target == torch.float32 else (BF16, 2)
    descriptors, offset = [], 0
    for grad in grads:
        chunk = grad.numel() // world
        layout = {"numel": grad.numel(), "chunk": chunk, "offset": offset, "blocks": 1}
        descriptors.append(Gradient(src=grad.data_ptr(), itemsize=2, src_dtype=BF16, **layout))
        offset += chunk
    table = library.array(Gradient, descriptors)
    return Work(
        f"pack gradients bfloat16 to {str(target)[6:]}, {world} ranks",
        total * world * (2 + size),
        lambda: library.cuda().pack_gradients(
            table, world, buffer.data_ptr(), total, code, stream()
        ),
        lambda: torch._chunk_cat(grads, 0, world, out=buffer),
    )


def unpack_second_dim(world: int) -> Work:
    """Measures unpack of a matrix sharded on dim 1, which has one block per row."""
    rows, columns = shapes()[0]
    part = columns // world
    gathered = random_tensor(rows * columns, torch.bfloat16).view(world, rows, part)
    output = torch.empty(rows, columns, dtype=torch.bfloat16, device=DEVICE)
    slot = Slot(dst=output.data_ptr(), offset=0, bytes=part * 2, blocks=rows)
    table, size = library.array(Slot, [slot]), rows * part * 2
    return Work(
        f"unpack Shard(1), {world} ranks",
        rows * columns * 4,
        lambda: library.cuda().unpack(gathered.data_ptr(), size, world, table, stream()),
        lambda: torch.cat(list(gathered), dim=1, out=output),
        has_goal=False,
    )


WORKS: tuple[Callable[[], Work], ...] = (
    *(functools.partial(pack, world, torch.float32) for world in (8, 64)),
    functools.partial(pack, 8, torch.bfloat16),
    *(functools.partial(unpack, world) for world in (8, 64)),
    functools.partial(unpack, 8, shift=2),
    *(functools.partial(pack_gradients, world, torch.float32) for world in (8, 64)),
    functools.partial(pack_gradients, 8, torch.bfloat16),
    functools.partial(unpack_second_dim, 8),
)


def memory_copy_bandwidth() -> float:
    """Returns the bandwidth of a device memory copy in TB/s, read and written."""
    numel = 1 << 16 if SMALL else 1 << 30
    source = random_tensor(numel // 2, torch.bfloat16)
    target = torch.empty_like(source)
    return 2 * numel / milliseconds(lambda: target.copy_(source)) / 1e9


def main() -> None:
    torch.manual_seed(0)
    memcpy = memory_copy_bandwidth()
    figures: dict[str, dict[str, float | None]] = {}
    below_goal = []
    for make in WORKS:
        work = make()
        measured = work.bytes / milliseconds(work.run) / 1e9
        torch_measured = work.bytes / milliseconds(work.torch_run) / 1e9 if work.torch_run else None
        figures[work.name] = {
            "tb_per_s": measured,
            "of_memcpy": measured / memcpy,
            "torch_of_memcpy": torch_measured / memcpy if torch_measured else None,
        }
        if is_below_goal(work, measured / memcpy):
            below_goal.append(f"{work.name} {measured / memcpy:.2f}")
        print(
            f"{work.name:<50}{measured:8.3f} TB/s  {measured / memcpy:5.2f} of memcpy", flush=True
        )
    lowest = min(entry["of_memcpy"] or 0 for entry in figures.values())
    line = f"memcpy {memcpy:.2f} TB/s; {len(figures)} kernels, lowest {lowest:.2f} of it"
    line += f"; below {GOAL}: {', '.join(below_goal)}" if below_goal and ON_CUDA else ""
    line += "" if ON_CUDA else " (fake kernels: not a measurement)"
    conclude(not (below_goal and ON_CUDA), line, memcpy_tb_per_s=memcpy, kernels=figures)


if __name__ == "__main__":
    main()
