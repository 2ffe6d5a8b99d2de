"""``zero_grad`` that also drops gradients that wait for their reduction.

A backward without gradient synchronization leaves its gradients inside the units, not in ``.grad``
of a parameter. The ``zero_grad`` of torch does not drop such gradients, so under torch's FSDP2 the
next reduction adds them. Under DDP's ``no_sync`` and in a plain model, ``zero_grad`` drops the
gradients of such a backward. Two changes have the same effect for fsdp_c's modules:

- :func:`add_zero_grad` gives a class ``FSDP<Name>`` a method ``zero_grad``. A module around or
  inside a sharded module keeps torch's method and torch's behavior.
- ``torch.optim.Optimizer.zero_grad`` is wrapped from the first sharded model on. The wrapper stays
  while fsdp_c is installed or a sharded model is alive. torch's function calls no hook, and an
  optimizer has no record of which of its parameters are sharded.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn as nn

from . import patches

_groups: set[weakref.ref[Any]] = set()  # the iteration of a WeakSet fails if a thread adds to it


def register_group(group: Any) -> None:
    """Makes ``zero_grad`` drop the gradients that the parameter group ``group`` defers."""
    _groups.add(weakref.ref(group, _groups.discard))


def add_zero_grad(cls: type[nn.Module]) -> None:
    """Adds ``zero_grad`` to a class ``FSDP<Name>``, with ``Scope.MODELS``."""

    @functools.wraps(cls.zero_grad)
    def zero_grad(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        super(cls, self).zero_grad(*args, **kwargs)  # type: ignore[misc]
        _drop_deferred(self.parameters())

    patches.set_class_attribute(cls, "zero_grad", zero_grad)


def _wrap_optimizer_method() -> patches.Undo:
    torch_zero_grad = torch.optim.Optimizer.zero_grad

    @functools.wraps(torch_zero_grad)
    def zero_grad(self: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> None:
        torch_zero_grad(self, *args, **kwargs)
        _drop_deferred(param for group in self.param_groups for param in group["params"])

    return patches.set_attribute(torch.optim.Optimizer, "zero_grad", zero_grad)


patches.apply_with_first_model("Optimizer.zero_grad", _wrap_optimizer_method)


def _drop_deferred(params: Iterable[torch.Tensor]) -> None:
    """Drops the deferred gradients of ``params``, which are sharded or unsharded parameters."""
    references = list(_groups)  # the GIL makes the copy atomic
    groups = [group for ref in references if (group := ref()) is not None and group._deferred]
    if not groups:
        return
    param_ids = {id(param) for param in params}
    for group in groups:
        for param in group.fsdp_params:
            unsharded_param = getattr(param, "_unsharded_param", None)
            if id(param.sharded_param) in param_ids or id(unsharded_param) in param_ids:
                param._drop_grad()
