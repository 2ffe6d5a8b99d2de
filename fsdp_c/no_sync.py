"""``no_sync``: backward passes whose gradients stay on their ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch.nn as nn

from .units import sharded_modules, units_of


@contextlib.contextmanager
def no_sync(model: nn.Module) -> Iterator[None]:
    """Backward passes inside accumulate gradients without reducing them.

    The first backward after it reduces the sum. As DDP's and FSDP1's ``no_sync``: for all micro
    batches but the last. The gradients that wait are whole ones: their memory is that of the
    unsharded parameters.

    Whatever each unit was set to before (``set_requires_gradient_sync``,
    ``set_requires_all_reduce``) is set again at the end, after an exception too; so contexts nest.

    Raises:
        ValueError: ``fully_shard`` was applied to no part of ``model``.
    """
    before = [(g, g.reduce_grads, g.all_reduce_grads) for g in units_of(model, "no_sync")]
    try:
        for module in sharded_modules(model):
            module.set_requires_gradient_sync(False, recurse=False)
        yield
    finally:
        for group, reduce_grads, all_reduce_grads in before:
            group.reduce_grads = reduce_grads
            group.all_reduce_grads = all_reduce_grads
