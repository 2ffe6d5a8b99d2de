"""Runs a replacement of torch's ``FSDPParamGroup.__init__`` for the groups of fsdp_c.

Libraries wrap this constructor: they check its arguments, call torch's function, and then set
attributes of the group and of its parameters. For a group of fsdp_c, torch's function runs fsdp_c's
construction instead.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch.distributed.fsdp._fully_shard._fsdp_param_group as torch_group

from fsdp_c_autoload.redirect import Redirection, copy_function

from . import patches
from .originals import find_original

logger = logging.getLogger("torch.distributed.fsdp.fully_shard")

_original = find_original(
    vars(torch_group.FSDPParamGroup)["__init__"], torch_group.__name__, "FSDPParamGroup.__init__"
)
_pending: dict[int, Callable[[], None]] = {}  # by id of the group that a replacement constructs


def construct_group(group: Any, construct: Callable[[], None], torch_args: tuple[Any, ...]) -> None:
    """Runs ``construct``, which initializes ``group``, within the replacement if there is one.

    Args:
        torch_args: The arguments of torch's constructor. If the replacement passes other arguments
            to torch's function, they have no effect.

    Raises:
        RuntimeError: The replacement has not called torch's function.
    """
    replacement = vars(torch_group.FSDPParamGroup)["__init__"]
    if replacement is _original:
        construct()
        return
    if _original is None:
        _warn_of_earlier_replacement()
        construct()
        return
    _pending[id(group)] = construct
    try:
        replacement(group, *torch_args)
        if id(group) in _pending:
            raise RuntimeError(
                "FSDPParamGroup.__init__ was replaced by a function that does not call torch's "
                "constructor: a group of fsdp_c is constructed by that call"
            )
    finally:
        _pending.pop(id(group), None)


@functools.cache
def _warn_of_earlier_replacement() -> None:
    logger.warning(
        "fsdp_c: FSDPParamGroup.__init__ was replaced before fsdp_c was imported, by an object "
        "that does not wrap torch's function; fsdp_c does not call the replacement"
    )


def _redirect() -> patches.Undo:
    """Makes torch's constructor run the pending construction of a group of fsdp_c."""
    if _original is None:
        return lambda: True
    torch_constructor = copy_function(_original)

    def run(self: Any, *args: Any, **kwargs: Any) -> None:
        construct = _pending.pop(id(self), None)
        if construct is None:
            torch_constructor(self, *args, **kwargs)
        else:
            construct()

    redirection = Redirection(_original, run)

    def undo() -> bool:
        redirection.undo()
        return True

    return undo


patches.apply_with_first_model("FSDPParamGroup.__init__", _redirect)
