"""``install`` and ``uninstall``: torch's own ``fully_shard`` and friends lead to fsdp_c.

A job imports ``torch.distributed.fsdp`` and need not know of fsdp_c. There are three ways to
switch it over: ``FSDP_C=1`` in its environment (where fsdp_c is installed with pip), ``python -m
fsdp_c script.py``, or a call of :func:`install`. All three do the same; see ``fsdp_c_redirect``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import fsdp_c_redirect

from . import optim
from .fully_shard import fully_shard
from .replicate import replicate
from .version import __version__

logger = logging.getLogger("torch.distributed.fsdp.fully_shard")

_OURS: dict[str, Callable[..., Any]] = {"fully_shard": fully_shard, "replicate": replicate}
_has_announced = False


def install() -> None:
    """Makes ``torch.distributed.fsdp.fully_shard`` run fsdp_c's, for whoever holds it.

    The function objects stay the same, so code that imported them earlier is switched over too;
    ``replicate`` follows. (``register_fsdp_forward_method`` and ``share_comm_ctx`` are torch's own,
    and do for our modules what they do for torch's.) Modules that were sharded before keep their
    implementation. A second call does nothing.

    torch's element-wise optimizers step on shards from then on (:mod:`fsdp_c.optim`).

    One INFO line on the logger ``torch.distributed.fsdp.fully_shard`` names what was replaced.
    """
    fsdp_c_redirect.redirect_all(announced)
    optim.accelerate_all()
    _announce()


def uninstall() -> None:
    """Undoes :func:`install`, ``FSDP_C=1`` and ``python -m fsdp_c``: all is as torch made it.

    Modules that fsdp_c has sharded stay as they are and go on working.
    """
    global _has_announced
    fsdp_c_redirect.restore_all()
    optim.restore_all()
    _has_announced = False


def announced(name: str) -> Callable[..., Any]:
    """Our function in the place of torch's of that name; says, once, that it is."""
    optim.accelerate_all()
    _announce()
    return _OURS[name]


def _announce() -> None:
    global _has_announced
    if not _has_announced:
        _has_announced = True
        names = fsdp_c_redirect.redirected()
        logger.info("fsdp_c %s replaces %s", __version__, ", ".join(names) or "nothing yet")
