"""``generate_with``: context for generation that gathers the weights once, not per token."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

from ._runtime.fsdp_units import list_groups, list_sharded_modules
from ._runtime.transaction import restore_attribute_at_end

Model = TypeVar("Model", bound=nn.Module)


@contextlib.contextmanager
def generate_with(model: Model, *methods: str, keep_full: bool = True) -> Iterator[Model]:
    """Prepares ``model`` for generation: ``with generate_with(model): model.generate(...)``.

    All weights are gathered once at the start, and freed at the end. No communication occurs in
    between. Therefore ranks may generate different numbers of tokens, and methods may use
    parameters of the root without a call of ``forward``. Gradients are disabled.

    Args:
        model: The root of the model, an FSDP module. A module that has not run before becomes a
            root. Therefore run a larger model once before you pass a part of it.
        methods: With ``keep_full=False``, the methods that gather parameters as ``forward`` does.
            Default: ``generate``.
        keep_full: ``False`` gathers each unit for each of its forwards, as in training. Use this
            for models that do not fit into memory unsharded. All ranks must then generate equally
            many tokens. The ``methods`` are registered with ``register_fsdp_forward_method``, so
            that the root's parameters are gathered when they run.

    Raises:
        ValueError: ``model`` has no sharded module, or does not have one of ``methods``.

    Settings are restored at the end, also after an exception. All units are then sharded, also
    those that were unsharded before. Blocks on the same units must not be nested.
    """
    groups = list_groups(model, "generate_with")
    for name in methods:
        if not callable(getattr(model, name, None)):
            raise ValueError(f"{type(model).__name__} does not have a method {name}")
    with contextlib.ExitStack() as undo:
        if keep_full:
            _initialize_roots(model)
            _gather_all(model, groups, undo)
        else:
            for name in methods or ("generate",):
                _register_method(model, name, undo)
        undo.enter_context(torch.no_grad())
        yield model


def _initialize_roots(model: nn.Module) -> None:
    """Runs lazy init of the roots, which changes ``reshard_after_forward``, before the gather."""
    covered_modules: set[nn.Module] = set()
    for module in list_sharded_modules(model):
        if module not in covered_modules:
            state: Any = module._get_fsdp_state()
            if state._is_root is None and len(state._modules) == 1:
                state._lazy_init()
            covered_modules.update(module.modules())


def _gather_all(model: nn.Module, groups: list[Any], undo: contextlib.ExitStack) -> None:
    modules = list_sharded_modules(model)
    for module in modules:
        undo.callback(module.reshard)
    for group in groups:
        if isinstance(group.mesh_info, FSDPMeshInfo):  # replicated parameters are never resharded
            undo.callback(setattr, group, "post_forward_mesh_info", group.post_forward_mesh_info)
            group.post_forward_mesh_info = None
    handles = [module.unshard(async_op=True) for module in modules]
    for handle in handles:
        if handle is not None:
            handle.wait()


def _register_method(model: nn.Module, name: str, undo: contextlib.ExitStack) -> None:
    if not isinstance(model, FSDPModule) or not callable(getattr(model, name, None)):
        return
    restore_attribute_at_end(model, name, undo)
    register_fsdp_forward_method(model, name)
