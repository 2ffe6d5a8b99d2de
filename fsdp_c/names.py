"""Clean parameter names without wrappers.

Error messages, wrapping policies, checkpoints and optimizer states use the names that parameters
have in the user's model. Wrappers (FSDP1, DDP, activation checkpointing, torch.compile) insert
modules, and this module removes their components from names.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch.nn as nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_WRAPPED_MODULE
from torch.distributed.fsdp._common_utils import FSDP_WRAPPED_MODULE
from torch.distributed.fsdp._flat_param import FlatParameter

__all__ = ["clean_tensor_name", "param_to_fqns"]

COMPILED_MODULE = "_orig_mod"
DDP_MODULE = "module"

_WRAPPERS = frozenset({FSDP_WRAPPED_MODULE, _CHECKPOINT_WRAPPED_MODULE, COMPILED_MODULE})
_MODULE_WRAPPERS = (nn.parallel.DistributedDataParallel, nn.DataParallel)


def clean_tensor_name(name: str, *, ddp: bool = False) -> str:
    """Returns the name of a parameter or buffer without the components that wrappers added.

    Removes the components of FSDP1, activation checkpointing and ``torch.compile``. The last
    component, which is the tensor's own name, is never removed.

    Args:
        name: A fully qualified name, with components separated by dots.
        ddp: Whether to remove a first component ``module``, too, for a model under
            ``DistributedDataParallel``. The default is False, because a model may have a child
            with that name. :func:`param_to_fqns` detects the wrapper.
    """
    *path, last = name.split(".")
    path = [component for component in path if component not in _WRAPPERS]
    if ddp and path and path[0] == DDP_MODULE:
        del path[0]
    return ".".join((*path, last))


def _walk_modules(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    """Yields every module in pre-order, with the prefix of its names without wrappers.

    A module with several parents is visited under each, but once per parent, as in torch.
    """
    yield prefix, module
    ddp_child = DDP_MODULE if isinstance(module, _MODULE_WRAPPERS) else None
    for name, child in module.named_children():
        if child is not None:  # an override of named_children() may yield None
            is_wrapped = name == ddp_child or name in _WRAPPERS
            yield from _walk_modules(child, prefix if is_wrapped else f"{prefix}{name}.")


def param_to_fqns(
    model: nn.Module, dedup_shared_params: bool = True
) -> dict[nn.Parameter, list[str]]:
    """Returns the clean names of every parameter of ``model``, in traversal order.

    The names are those of the unwrapped model's state dict.

    Args:
        model: A module, wrapped or not.
        dedup_shared_params: Whether a parameter that is registered several times gets only its
            first name. A module that one parent has registered twice counts once, as in torch. A
            flat parameter of FSDP1 always gets the names of all its parameters.
    """
    names: dict[nn.Parameter, list[str]] = {}
    for prefix, module in _walk_modules(model, ""):
        for own_name, param in _list_params(module):
            flat: Any = param if isinstance(param, FlatParameter) else None
            if param not in names:
                names[param] = []
            elif dedup_shared_params or flat is not None:
                continue
            param_names = (own_name,) if flat is None else flat._fqns
            names[param] += [prefix + name for name in param_names]
    return names


def _list_params(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Returns the module's own parameters, each with all its names."""
    try:
        return list(module.named_parameters(recurse=False, remove_duplicate=False))
    except (AssertionError, TypeError):  # an override without remove_duplicate
        return list(module.named_parameters(recurse=False))
