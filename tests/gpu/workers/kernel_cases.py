"""Random launches of the kernels: what lies where, and what is called.

Conversions are aligned to their elements, moves start at any byte. Sources hold random finite
numbers of all magnitudes (which NaN a conversion gives is nobody's promise).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from kernel_library import Backend, Column, Gradient, Segment

FLOATS = {5: 2, 6: 4, 7: 8, 15: 2}
"""Sizes of float16, float32, float64 and bfloat16, by torch's numbers."""

MOVED = {**FLOATS, 0: 1, 11: 1, 10: 16}
"""What can also be moved: bytes, bools, complex128."""

LOWEST_EXPONENT_BIT = {5: (np.uint16, 10), 6: (np.uint32, 23), 7: (np.uint64, 52)}
LOWEST_EXPONENT_BIT[15] = (np.uint16, 7)

Run = tuple[int, int]
"""An offset and a number of bytes."""


@dataclass
class Case:
    """A launch between two pieces of memory."""

    name: str
    source: Any
    """The bytes of the source, as an array."""
    size: int
    """Bytes of the destination."""
    launch: Callable[[Backend, int, int], None]
    """Called with the addresses of the two."""
    read: list[Run] = field(default_factory=list)
    written: list[Run] = field(default_factory=list)


class Layout:
    """Places things one after another, with gaps; gives their offsets."""

    def __init__(self, random: Any, gap: int = 20) -> None:
        self.random = random
        self.gap = gap
        self.size = 0
        self.runs: list[Run] = []

    def place(self, size: int, unit: int) -> int:
        at = self.size + int(self.random.integers(0, self.gap + 1))
        at = -(-at // unit) * unit
        self.size = at + size
        self.runs.append((at, size))
        return at


def _fill(random: Any, size: int, numbers: list[tuple[int, int, int]]) -> Any:
    """Random bytes; finite floats of a type where ``numbers`` says (offset, count, dtype)."""
    source = random.integers(0, 256, max(size, 1), dtype=np.uint8)
    for offset, count, dtype in numbers:
        if dtype in LOWEST_EXPONENT_BIT:
            word, bit = LOWEST_EXPONENT_BIT[dtype]
            part = source[offset : offset + count * FLOATS[dtype]].view(word)
            part &= word(~np.uint64(1 << bit) & np.uint64(np.iinfo(word).max))
    return source


def _count(random: Any) -> int:
    """How many things a launch has: at times more than fit into one batch."""
    return int(random.integers(0, 200 if random.random() < 0.12 else 12))


def _elements(random: Any, times: int = 1) -> int:
    """Empty, few, about a vector, a tile, several tiles; fewer where they come many times."""
    most = random.choice([1, 9, 40, 600, 9000, 40000], p=[0.1, 0.2, 0.3, 0.25, 0.1, 0.05])
    return int(random.integers(0, min(most, 80_000 // times) + 1))


def _blocks(random: Any) -> int:
    """Of a parameter: one where it is cut on its first dim."""
    return int(random.choice([1, 2, 5, 37], p=[0.6, 0.2, 0.15, 0.05]))


def pack(random: Any) -> Case:
    sources, targets = Layout(random), Layout(random)
    places, numbers = [], []
    for _ in range(_count(random)):
        moves, count = random.random() < 0.5, _elements(random)
        dtype = int(random.choice(list(MOVED if moves else FLOATS)))
        to = dtype if moves else int(random.choice(list(FLOATS)))
        size, to_size = MOVED[dtype], MOVED[to]
        # A source of numbers is aligned for the mask; the move of one need not be.
        unit = size if dtype in FLOATS else 1
        at = sources.place(count * size, unit)
        numbers.append((at, count, dtype))
        there = targets.place(count * to_size, 1 if dtype == to else to_size)
        place = {"src": at, "dst": there, "count": count, "itemsize": size}
        places.append(place | {"src_dtype": dtype, "dst_dtype": to})

    def launch(backend: Backend, source: int, target: int) -> None:
        backend.pack(
            [
                Segment(**one | {"src": source + one["src"], "dst": target + one["dst"]})
                for one in places
            ]
        )

    source = _fill(random, sources.size, numbers)
    return Case("pack", source, targets.size, launch, sources.runs, targets.runs)


def unpack(random: Any) -> Case:
    world = int(random.choice([1, 2, 3, 8, 64], p=[0.2, 0.2, 0.2, 0.3, 0.1]))
    columns, targets = Layout(random, gap=3), Layout(random)
    places = []
    for _ in range(_count(random)):
        blocks = _blocks(random)
        size = _elements(random, blocks * world)
        there = targets.place(blocks * size * world, 1)
        at = columns.place(blocks * size, 1)
        places.append({"dst": there, "offset": at, "bytes": size, "blocks": blocks})
    shift, row = int(random.integers(0, 17)), columns.size
    read = [(shift + r * row + at, size) for r in range(world) for at, size in columns.runs]

    def launch(backend: Backend, source: int, target: int) -> None:
        table = [Column(**one | {"dst": target + one["dst"]}) for one in places]
        backend.unpack(source + shift, row, world, table)

    source = _fill(random, shift + world * row, [])
    return Case("unpack", source, targets.size, launch, read, targets.runs)


def pack_gradients(random: Any) -> Case:
    world = int(random.choice([1, 2, 3, 8, 64], p=[0.2, 0.2, 0.2, 0.3, 0.1]))
    to = int(random.choice(list(FLOATS)))
    sources, places, numbers, row = Layout(random), [], [], 0
    for _ in range(_count(random)):
        dtype = to if random.random() < 0.4 else int(random.choice(list(FLOATS)))
        width, blocks = int(random.integers(1, 50)), _blocks(random)
        rows = int(_elements(random, width * blocks)) + 1
        numel, chunk = rows * width, -(-rows // world) * width
        at = sources.place(blocks * numel * FLOATS[dtype], FLOATS[dtype])
        numbers.append((at, blocks * numel, dtype))
        place = {"src": at, "numel": numel, "chunk": chunk, "offset": row, "blocks": blocks}
        places.append(place | {"itemsize": FLOATS[dtype], "src_dtype": dtype})
        row += blocks * chunk
    shift = FLOATS[to] * int(random.integers(0, 9))
    size = world * row * FLOATS[to]

    def launch(backend: Backend, source: int, target: int) -> None:
        table = [Gradient(**one | {"src": source + one["src"]}) for one in places]
        backend.pack_gradients(table, world, target + shift, row, to)

    source = _fill(random, sources.size, numbers)
    runs = [(shift, size)]
    return Case("pack_gradients", source, shift + size, launch, sources.runs, runs)


KINDS = (pack, unpack, pack_gradients)
