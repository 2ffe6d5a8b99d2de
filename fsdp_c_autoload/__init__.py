"""The environment variable ``FSDP_C=1``: redirects torch's functions to fsdp_c.

torch calls :func:`autoload` at the end of ``import torch``, through the entry point group
``torch.backends``. If ``FSDP_C`` is unset, empty, ``0``, ``no``, ``off`` or ``false``, the call
does nothing and imports nothing. Otherwise the call redirects torch's functions.

The first call of a redirected function imports fsdp_c. A process that shards nothing therefore has
no import cost, and fsdp_c is not imported before torch is complete. Only torch and
``python -m fsdp_c`` use this file. fsdp_c imports ``fsdp_c_autoload.redirect``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

ENVIRONMENT_SWITCH = "FSDP_C"
OFF = ("", "0", "no", "off", "false")


def autoload() -> None:
    """Redirects torch's functions if ``FSDP_C`` is set. Called by torch."""
    if os.environ.get(ENVIRONMENT_SWITCH, "").lower() not in OFF:
        from fsdp_c_autoload.redirect import redirect_all

        redirect_all(_find)


def _find(name: str) -> Callable[..., Any]:
    """Returns fsdp_c's function of this name. Called by each call of torch's function."""
    from fsdp_c.install import get_replacement

    return get_replacement(name)
