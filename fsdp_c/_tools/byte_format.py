"""Parses and formats numbers of bytes."""

from __future__ import annotations

import math
import re

_SIZES = {"": 1, "k": 1000, "m": 1000**2, "g": 1000**3, "t": 1000**4}
_SIZES |= {f"{key}i": 1024**power for power, key in enumerate("kmgt", 1)}


def parse_bytes(size: int | str) -> int:
    """Returns ``size`` in bytes, for example of ``80 * 2**30``, ``"80GiB"`` or ``"80 GB"``.

    Raises:
        ValueError: ``size`` is not a number of bytes.
    """
    if isinstance(size, int) and not isinstance(size, bool) and size >= 0:
        return size
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([kmgt]?i?)b?\s*", str(size).lower())
    if (
        match is None
        or match[2] not in _SIZES
        or math.isinf(count := float(match[1]) * _SIZES[match[2]])
    ):
        raise ValueError(f"expected a number of bytes such as '80GiB', not {size!r}")
    return int(count)


def format_bytes(count: float) -> str:
    """Formats a number of bytes with a binary unit, for example ``1.5 MiB``."""
    size = float(count)
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
