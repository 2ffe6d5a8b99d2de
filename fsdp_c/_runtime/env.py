"""Environment variables that are switches."""

from __future__ import annotations

import os

OFF = ("", "0", "no", "off", "false")
"""Values for off, in lower case. ``fsdp_c_autoload``, which cannot import fsdp_c, has a copy."""


def is_env_enabled(name: str, unset: str = "") -> bool:
    """Whether the switch ``name`` is on. ``unset`` is the value of a variable that is not set."""
    return os.environ.get(name, unset).lower() not in OFF
