"""``install`` and ``uninstall``: make torch's ``fully_shard`` and ``replicate`` run fsdp_c.

A program that imports ``torch.distributed.fsdp`` runs unchanged. Three ways enable fsdp_c:
``FSDP_C=1`` in the environment (if fsdp_c is installed with pip), ``python -m fsdp_c script.py``,
and a call of :func:`install`. The three ways are equivalent; see ``fsdp_c_autoload.redirect``.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
from collections.abc import Callable, Hashable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed._composable_state import _get_module_state
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

from fsdp_c_autoload import redirect

from . import optim
from ._compat import patches
from ._runtime import torch_clipping
from ._runtime.env import is_env_enabled
from ._runtime.state import State
from .fully_shard import fully_shard
from .replicate import replicate
from .version import __version__

logger = logging.getLogger("torch.distributed.fsdp.fully_shard")

ENVIRONMENT_SWITCH = "FSDP_C"

_REPLACEMENTS: dict[str, Callable[..., Any]] = {"fully_shard": fully_shard, "replicate": replicate}
_has_logged = False
_has_printed = False


def install() -> None:
    """Makes ``torch.distributed.fsdp.fully_shard`` run fsdp_c's function.

    The function objects are the same, so code that imported them earlier also runs fsdp_c.
    ``replicate`` is redirected, too. ``register_fsdp_forward_method`` and ``share_comm_ctx`` stay
    torch's functions, which support fsdp_c's modules. Modules that were sharded before keep their
    implementation. A second call has no effect.

    torch's element-wise optimizers then step on local tensors (:mod:`fsdp_c.optim`). torch's
    gradient clipping uses local tensors, too (:mod:`fsdp_c._runtime.torch_clipping`).

    One INFO line of the logger ``torch.distributed.fsdp.fully_shard`` names the replaced functions.
    """
    patches.install(_CHANGES)
    _log_installation()


def uninstall() -> None:
    """Undoes :func:`install`, ``FSDP_C=1`` and ``python -m fsdp_c``.

    torch's ``fully_shard`` and ``replicate`` run torch's code again. Every class, function and hook
    list of torch that fsdp_c changed is restored, with two exceptions:

    - Changes that a live sharded model needs stay until the last such model is freed. Models that
      fsdp_c has sharded therefore continue to train, with the same results.
    - A later patch by other code on the same object stays, together with the function it wraps.

    Optimizers step on DTensors again, also those passed to :func:`fsdp_c.optim.accelerate`. The
    settings that ``python -m fsdp_c`` makes for its script (``FSDP_C``, ``sys.excepthook``) stay.
    """
    global _has_logged
    patches.uninstall()
    optim.restore_all()
    _has_logged = False


def _redirect_torch() -> Callable[[], bool]:
    redirect.redirect_all(get_replacement)  # has no effect after FSDP_C=1
    return _make_undo(redirect.restore_all)


def _redirect_clipping() -> Callable[[], bool]:
    torch_clipping.redirect()
    return _make_undo(torch_clipping.restore)


def _make_undo(restore: Callable[[], None]) -> Callable[[], bool]:
    def undo() -> bool:
        restore()
        return True

    return undo


_CHANGES: dict[Hashable, patches.Change] = {
    "fully_shard, replicate": _redirect_torch,
    "optimizer step pre hook: accelerate": optim.accelerate_all,
    "torch.nn.utils.clip_grad": _redirect_clipping,
}
"""The changes of ``Scope.INSTALL``."""


def is_active(model: nn.Module) -> bool:
    """Whether fsdp_c runs all sharded or replicated modules of ``model``, and at least one.

    ``False`` for a model that torch's FSDP2 runs, and for a model that is not sharded.
    """
    states = [_get_module_state(module) for module in model.modules()]
    fsdp_states = [state for state in states if isinstance(state, FSDPState)]
    return bool(fsdp_states) and all(isinstance(state, State) for state in fsdp_states)


def get_replacement(name: str) -> Callable[..., Any]:
    """Returns fsdp_c's function for torch's function ``name``.

    Also makes the other changes of :func:`install`, and logs the replacement once. If the
    environment enables fsdp_c (``FSDP_C=1``, ``python -m fsdp_c``), rank 0 also writes a line to
    standard error when the first module is sharded.
    """
    global _has_printed
    if not _has_printed and is_env_enabled(ENVIRONMENT_SWITCH):
        _has_printed = True
        if _get_rank() == 0:
            _print_line(
                f"fsdp_c {__version__} runs fully_shard and replicate (torch {torch.__version__})"
            )
    patches.install(_CHANGES)
    _log_installation()
    return _REPLACEMENTS[name]


def _print_line(line: str) -> None:
    """Writes to standard error. Does nothing if the stream is closed or has no reader."""
    if sys.stderr is not None:
        with contextlib.suppress(OSError, ValueError):
            print(line, file=sys.stderr, flush=True)


def _get_rank() -> int:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    rank = os.environ.get("RANK", "0")
    return int(rank) if rank.isdecimal() else 0


def _log_installation() -> None:
    global _has_logged
    if not _has_logged:
        _has_logged = True
        names = redirect.list_redirected()
        logger.info("fsdp_c %s replaces %s", __version__, ", ".join(names) or "nothing yet")


if redirect.is_redirecting():  # fsdp_c_autoload has redirected torch before this import
    patches.install(_CHANGES)
