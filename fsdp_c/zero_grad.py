"""``zero_grad`` drops the gradients that wait for their reduction, too.

A backward without synchronisation leaves its gradients inside of the units: they are in no
parameter's ``.grad``, so that torch's ``zero_grad`` cannot see them, and with torch's FSDP2 they
come back with the next reduction. DDP's ``no_sync`` and a plain model lose them; so do ours.

torch has no hook there. Its two methods are wrapped when the first unit is made.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn

_groups: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(group: Any) -> None:
    """From now on ``zero_grad`` of an optimizer or a module reaches ``group``'s parameters."""
    _groups.add(group)
    _wrap()


@functools.cache
def _wrap() -> None:
    zero_optimizer, zero_module = torch.optim.Optimizer.zero_grad, nn.Module.zero_grad

    @functools.wraps(zero_optimizer)
    def optimizer_zero_grad(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        zero_optimizer(self, *args, **kwargs)
        waiting = _waiting()
        if waiting:
            _drop(waiting, (param for group in self.param_groups for param in group["params"]))

    @functools.wraps(zero_module)
    def module_zero_grad(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        zero_module(self, *args, **kwargs)
        waiting = _waiting()
        if waiting:
            _drop(waiting, self.parameters())

    torch.optim.Optimizer.zero_grad = optimizer_zero_grad  # type: ignore[method-assign]
    nn.Module.zero_grad = module_zero_grad  # type: ignore[method-assign]


def _waiting() -> list[Any]:
    """The groups in which a backward has left gradients."""
    return [group for group in _groups if group._deferred]


def _drop(groups: list[Any], params: Iterable[torch.Tensor]) -> None:
    """Makes the groups forget what they keep for ``params``, whichever face is registered now."""
    chosen = {id(param) for param in params}
    for group in groups:
        for param in group.fsdp_params:
            unsharded = getattr(param, "_unsharded_param", None)
            if id(param.sharded_param) in chosen or id(unsharded) in chosen:
                param._drop_grad()
