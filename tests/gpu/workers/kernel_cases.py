"""Generates random kernel launches: the layout of their memory, and the call.

Conversions are aligned to their element size. Copies write to any byte, and read floats at
multiples of their size. Sources hold random finite numbers of all magnitudes, because the NaN
payload after a conversion is unspecified.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from kernel_library import Backend, Gradient, Segment, Slot

FLOATS = {5: 2, 6: 4, 7: 8, 15: 2}
"""Sizes of float16, float32, float64 and bfloat16, by ScalarType number."""

MOVED = {**FLOATS, 0: 1, 11: 1, 10: 16}
"""Sizes of the types that can be copied: floats, uint8, bool and complex128."""

LOWEST_EXPONENT_BIT = {5: (np.uint16, 10), 6: (np.uint32, 23), 7: (np.uint64, 52)}
LOWEST_EXPONENT_BIT[15] = (np.uint16, 7)

Run = tuple[int, int]
"""Offset and number of bytes."""


@dataclass
class Case:
    """One launch that reads a source buffer and writes a destination buffer."""

    name: str
    source: Any
    """The source buffer as an array of bytes."""
    size: int
    """Size of the destination buffer in bytes."""
    launch: Callable[[Backend, int, int], None]
    """Launches on a backend, with the addresses of source and destination."""
    read: list[Run] = field(default_factory=list)
    written: list[Run] = field(default_factory=list)


class Layout:
    """Assigns offsets to items in order, with random gaps between them."""

    def __init__(self, random: Any, gap: int = 20) -> None:
        self.random = random
        self.gap = gap
        self.size = 0
        self.runs: list[Run] = []

    def place(self, size: int, unit: int) -> int:
        offset = self.size + int(self.random.integers(0, self.gap + 1))
        return self._append(-(-offset // unit) * unit, size)

    def place_at(self, size: int, remainder: int) -> int:
        """Assigns an offset that is ``remainder`` modulo 16, after a gap of at least one byte."""
        begin = self.size + 1
        return self._append(begin + (remainder - begin) % 16, size)

    def _append(self, offset: int, size: int) -> int:
        self.size = offset + size
        self.runs.append((offset, size))
        return offset


def _fill(random: Any, size: int, numbers: list[tuple[int, int, int]]) -> Any:
    """Returns random bytes. Each (offset, count, dtype) in ``numbers`` becomes finite floats."""
    source = random.integers(0, 256, max(size, 1), dtype=np.uint8)
    for offset, count, dtype in numbers:
        if dtype in LOWEST_EXPONENT_BIT:
            word, bit = LOWEST_EXPONENT_BIT[dtype]
            part = source[offset : offset + count * FLOATS[dtype]].view(word)
            part &= word(~np.uint64(1 << bit) & np.uint64(np.iinfo(word).max))
    return source


def _count(random: Any) -> int:
    """Returns a number of items: at most a few, a few small batches, or two large batches.

    A small batch has at most 78 items, and a large one 629 (batch.cuh).
    """
    return int(random.integers(0, random.choice([12, 200, 1400], p=[0.86, 0.12, 0.02])))


def _elements(random: Any, times: int = 1) -> int:
    """Returns a number of elements: none, a few, about a vector, one tile or several tiles. The
    limit shrinks with ``times``, the number of repetitions."""
    limit = random.choice([1, 9, 40, 600, 9000, 40000], p=[0.1, 0.2, 0.3, 0.25, 0.1, 0.05])
    return int(random.integers(0, min(limit, 80_000 // times) + 1))


def _blocks(random: Any) -> int:
    """Returns a parameter's number of blocks. A parameter sharded on dim 0 has one."""
    return int(random.choice([1, 2, 5, 37], p=[0.6, 0.2, 0.15, 0.05]))


def pack(random: Any) -> Case:
    sources, targets = Layout(random), Layout(random)
    items, numbers = [], []
    for _ in range(_count(random)):
        moves, count = random.random() < 0.5, _elements(random)
        dtype = int(random.choice(list(MOVED if moves else FLOATS)))
        to = dtype if moves else int(random.choice(list(FLOATS)))
        size, to_size = MOVED[dtype], MOVED[to]
        # _fill needs aligned floats. Other types may start at any byte.
        unit = size if dtype in FLOATS else 1
        offset = sources.place(count * size, unit)
        numbers.append((offset, count, dtype))
        destination = targets.place(count * to_size, 1 if dtype == to else to_size)
        item = {"src": offset, "dst": destination, "count": count, "itemsize": size}
        items.append(item | {"src_dtype": dtype, "dst_dtype": to})

    def launch(backend: Backend, source: int, target: int) -> None:
        backend.pack(
            [
                Segment(**item | {"src": source + item["src"], "dst": target + item["dst"]})
                for item in items
            ]
        )

    source = _fill(random, sources.size, numbers)
    return Case("pack", source, targets.size, launch, sources.runs, targets.runs)


def pack_misaligned(random: Any) -> Case:
    """Moves bytes once for each pair of addresses modulo 16."""
    sources, targets = Layout(random), Layout(random)
    items = []
    for pair in map(int, random.permutation(256)):
        count = int(random.integers(1, random.choice([64, 1200, 40000], p=[0.3, 0.68, 0.02])))
        offset = sources.place_at(count, pair // 16)
        items.append((offset, targets.place_at(count, pair % 16), count))

    def launch(backend: Backend, source: int, target: int) -> None:
        backend.pack(
            [
                Segment(src=source + offset, dst=target + to, count=count, itemsize=1)
                for offset, to, count in items
            ]
        )

    source = _fill(random, sources.size, [])
    return Case("pack_misaligned", source, targets.size, launch, sources.runs, targets.runs)


def unpack(random: Any) -> Case:
    world = int(random.choice([1, 2, 3, 8, 64], p=[0.2, 0.2, 0.2, 0.3, 0.1]))
    gathered, targets = Layout(random, gap=3), Layout(random)
    items = []
    for _ in range(_count(random)):
        blocks = _blocks(random)
        size = _elements(random, blocks * world)
        destination = targets.place(blocks * size * world, 1)
        offset = gathered.place(blocks * size, 1)
        items.append({"dst": destination, "offset": offset, "bytes": size, "blocks": blocks})
    shift, rank_bytes = int(random.integers(0, 17)), gathered.size
    read = [
        (shift + r * rank_bytes + offset, size)
        for r in range(world)
        for offset, size in gathered.runs
    ]

    def launch(backend: Backend, source: int, target: int) -> None:
        table = [Slot(**item | {"dst": target + item["dst"]}) for item in items]
        backend.unpack(source + shift, rank_bytes, world, table)

    source = _fill(random, shift + world * rank_bytes, [])
    return Case("unpack", source, targets.size, launch, read, targets.runs)


def pack_gradients(random: Any) -> Case:
    world = int(random.choice([1, 2, 3, 8, 64], p=[0.2, 0.2, 0.2, 0.3, 0.1]))
    to = int(random.choice(list(FLOATS)))
    sources, items, numbers, rank_numel = Layout(random), [], [], 0
    for _ in range(_count(random)):
        dtype = to if random.random() < 0.4 else int(random.choice(list(FLOATS)))
        width, blocks = int(random.integers(1, 50)), _blocks(random)
        rows = int(_elements(random, width * blocks)) + 1
        numel, chunk = rows * width, -(-rows // world) * width
        offset = sources.place(blocks * numel * FLOATS[dtype], FLOATS[dtype])
        numbers.append((offset, blocks * numel, dtype))
        item = {
            "src": offset,
            "numel": numel,
            "chunk": chunk,
            "offset": rank_numel,
            "blocks": blocks,
        }
        items.append(item | {"itemsize": FLOATS[dtype], "src_dtype": dtype})
        rank_numel += blocks * chunk
    shift = FLOATS[to] * int(random.integers(0, 9))
    size = world * rank_numel * FLOATS[to]

    def launch(backend: Backend, source: int, target: int) -> None:
        table = [Gradient(**item | {"src": source + item["src"]}) for item in items]
        backend.pack_gradients(table, world, target + shift, rank_numel, to)

    source = _fill(random, sources.size, numbers)
    runs = [(shift, size)]
    return Case("pack_gradients", source, shift + size, launch, sources.runs, runs)


KINDS = (pack, unpack, pack_gradients, pack_misaligned)
