"""Checks that matplotlib is installed, on every rank, before one rank draws."""

from __future__ import annotations

from importlib.util import find_spec


def require_matplotlib() -> None:
    """Checks that matplotlib is installed.

    All ranks must call this function, although only one rank draws, so that all of them raise.

    Raises:
        ImportError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ImportError("a picture needs matplotlib: pip install matplotlib")
