"""``generate_with``: token after token without gathering the weights each time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

from .units import sharded_modules, units_of

Model = TypeVar("Model", bound=nn.Module)


@contextlib.contextmanager
def generate_with(model: Model, *methods: str, keep_full: bool = True) -> Iterator[Model]:
    """Prepares ``model`` for generation: ``with generate_with(model): model.generate(...)``.

    All weights are gathered once, before the first token, and freed at the end. In between there is
    no communication: ranks may generate different numbers of tokens, and methods may use
    parameters of the root without going through ``forward``. Gradients are off.

    Args:
        model: The whole model (its outermost FSDP module).
        methods: With ``keep_full=False``: methods to be treated like ``forward`` meanwhile;
            ``generate`` if none is named.
        keep_full: ``False``: units are gathered for each of their forwards, as in training, for
            models that do not fit as a whole. All ranks have to generate as many tokens then.
            ``methods`` that the model has are registered (``register_fsdp_forward_method``), so
            that they find the root's parameters gathered.

    Raises:
        ValueError: ``fully_shard`` was applied to no part of ``model``; or a method that it does
            not have was named.

    Settings and sharding are those from before at the end, after an exception too.
    """
    groups = units_of(model, "generate_with")
    for name in methods:
        if not callable(getattr(model, name, None)):
            raise ValueError(f"{type(model).__name__} does not have a method {name}")
    with contextlib.ExitStack() as undo:
        if keep_full:
            _initialize(model)
            _gather(model, groups, undo)
        else:
            for name in methods or ("generate",):
                _register(model, name, undo)
        undo.enter_context(torch.no_grad())
        yield model


def _initialize(model: nn.Module) -> None:
    """Lazy init of the roots: it would change reshard_after_forward later."""
    below: set[nn.Module] = set()
    for module in sharded_modules(model):
        if module not in below:
            state: Any = module._get_fsdp_state()
            if state._is_root is None and len(state._modules) == 1:
                state._lazy_init()
            below.update(module.modules())


def _gather(model: nn.Module, groups: list[Any], undo: contextlib.ExitStack) -> None:
    modules = sharded_modules(model)
    for module in modules:
        undo.callback(module.reshard)
    for group in groups:
        if isinstance(group.mesh_info, FSDPMeshInfo):  # replicated parameters stay whole anyway
            undo.callback(setattr, group, "post_forward_mesh_info", group.post_forward_mesh_info)
            group.post_forward_mesh_info = None
    handles = [module.unshard(async_op=True) for module in modules]
    for handle in handles:
        if handle is not None:
            handle.wait()


def _register(model: nn.Module, name: str, undo: contextlib.ExitStack) -> None:
    if not isinstance(model, FSDPModule) or not callable(getattr(model, name, None)):
        return
    before = model.__dict__.get(name)
    register_fsdp_forward_method(model, name)
    if before is not None:
        undo.callback(setattr, model, name, before)
    else:
        undo.callback(delattr, model, name)
