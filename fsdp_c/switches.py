"""Switches in the environment."""

from __future__ import annotations

import os

OFF = ("", "0", "no", "off", "false")
"""In capitals, too. ``fsdp_c_autoload.py`` imports nothing of fsdp_c, and has them again."""


def is_on(name: str, unset: str = "") -> bool:
    """Whether a switch is on; ``unset``: what it is where the environment has none."""
    return os.environ.get(name, unset).lower() not in OFF
