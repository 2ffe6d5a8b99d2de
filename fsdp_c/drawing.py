"""Whether pictures can be drawn: asked on every rank, before one of them draws."""

from __future__ import annotations

from importlib.util import find_spec


def require_matplotlib() -> None:
    """Raises on all ranks alike, where only one would miss it: the others would go on without it.

    Raises:
        ImportError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ImportError("a picture needs matplotlib: pip install matplotlib")
