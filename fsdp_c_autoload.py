"""The switch ``FSDP_C=1``: torch calls :func:`autoload` at the end of ``import torch``.

(By the entry point group ``torch.backends``.) With ``FSDP_C`` unset, empty, ``0``, ``no``, ``off``
or ``false`` nothing happens and nothing is imported. Otherwise torch's functions are redirected to
fsdp_c, which is imported by the first call of one: a process that never shards anything pays for
no import, and none comes too early. That import leads up, as a plug-in's must; nothing of fsdp_c
imports this in return, but for ``python -m fsdp_c``.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

ENVIRONMENT_SWITCH = "FSDP_C"
OFF = ("", "0", "no", "off", "false")


def autoload() -> None:
    """What torch calls at the end of ``import torch``."""
    if os.environ.get(ENVIRONMENT_SWITCH, "").lower() not in OFF:
        from fsdp_c_redirect import redirect_all

        redirect_all(_find)


def _find(name: str) -> Callable[..., Any]:
    """fsdp_c's function of that name, when torch's is called."""
    from fsdp_c.install import announced

    return announced(name)
