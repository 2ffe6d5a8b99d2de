"""``no_sync``: backward passes without reductions of gradients."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.nn as nn

from ._runtime.fsdp_units import list_groups, list_sharded_modules


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Context in which backward passes accumulate gradients without reducing them.

    The first backward after the context reduces the sum. Use the context for all microbatches but
    the last, as ``no_sync`` of DDP and FSDP1. The accumulated gradients are unsharded. They
    need the memory of all unsharded parameters in the reduce dtype.

    The context restores the previous settings of each unit (``set_requires_gradient_sync``,
    ``set_requires_all_reduce``), also after an exception. Contexts may be nested.

    Raises:
        ValueError: ``model`` has no sharded module.
    """
    previous = [(g, g.reduce_grads, g.all_reduce_grads) for g in list_groups(model, "no_sync")]
    try:
        for module in list_sharded_modules(model):
            module.set_requires_gradient_sync(False, recurse=False)
        yield
    finally:
        for group, reduce_grads, all_reduce_grads in previous:
            group.reduce_grads = reduce_grads
            group.all_reduce_grads = all_reduce_grads
