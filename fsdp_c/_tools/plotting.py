"""Checks that matplotlib is installed, on every rank, before one rank draws."""

from __future__ import annotations

from importlib.util import find_spec


def require_matplotlib() -> None:
    """Checks that matplotlib is installed.

    Call it on all ranks, although one rank draws: otherwise the other ranks would continue.

    Raises:
        ImportError: matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise ImportError("a picture needs matplotlib: pip install matplotlib")
