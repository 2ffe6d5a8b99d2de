"""Adds methods of newer torch releases to the classes ``FSDP<Name>`` of sharded modules.

These are the methods that the installed torch's ``FSDPModule`` lacks, and the methods of
``torch215_methods.py``. Modules that torch's own ``fully_shard`` sharded may share the class: the
methods that torch lacks raise ``RuntimeError`` for them.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.fsdp import FSDPModule

from .._compat import patches
from .._compat.torch_releases import raise_unsupported
from .fsdp_units import list_sharded_modules
from .torch215_methods import METHODS, require_fsdp_c_state


def _list_groups(module: Any, method: str, recurse: bool, release: str = "2.13") -> list[Any]:
    """Returns the parameter groups. Raises ``RuntimeError`` if torch sharded one of the modules."""
    modules = list_sharded_modules(module) if recurse else [module]
    states = [require_fsdp_c_state(sharded, method, release) for sharded in modules]
    return [group for state in states for group in state._fsdp_param_groups]


def _reset_iter_state(self: Any) -> None:
    """Resets the iteration after an exception in forward or backward. For roots only."""
    require_fsdp_c_state(self, "reset_iter_state", "2.13")._reset_iter_state()


def _set_reduce_scatter_unused_params(
    self: Any, reduce_scatter_unused_params: bool, *, recurse: bool = True
) -> None:
    """Sets whether parameters without gradient are reduced as zeros."""
    for group in _list_groups(self, "set_reduce_scatter_unused_params", recurse):
        group.reduce_scatter_unused_params = reduce_scatter_unused_params


def _set_reduce_scatter_max_input_buffers(
    self: Any, max_input_buffers: int, *, recurse: bool = True
) -> None:
    """Sets how many reduce-scatter inputs may be allocated at the same time.

    Raises:
        TypeError: ``max_input_buffers`` is not an int.
        ValueError: ``max_input_buffers`` is less than 1.
    """
    if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
        raise TypeError(f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}")
    if max_input_buffers < 1:
        raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
    for group in _list_groups(self, "set_reduce_scatter_max_input_buffers", recurse):
        group.reduce_scatter_max_input_buffers = max_input_buffers


def _set_separate_reduce_scatter_group(
    self: Any, enable: bool = True, *, recurse: bool = True
) -> None:
    """Raises ``NotImplementedError``: this torch has no separate reduce-scatter group."""
    raise_unsupported("set_separate_reduce_scatter_group", "2.13")


def _set_symm_mem_for_comm(self: Any, backend: str = "NCCL") -> None:
    """Calls ``set_symm_mem`` of each group, which raises on this torch."""
    for group in _list_groups(self, "set_symm_mem_for_comm", recurse=False, release="2.12"):
        group.set_symm_mem(backend)


_NEWER_METHODS = {
    "reset_iter_state": _reset_iter_state,
    "set_reduce_scatter_unused_params": _set_reduce_scatter_unused_params,
    "set_reduce_scatter_max_input_buffers": _set_reduce_scatter_max_input_buffers,
    "set_separate_reduce_scatter_group": _set_separate_reduce_scatter_group,
    "set_symm_mem_for_comm": _set_symm_mem_for_comm,
}


def add_missing_methods(cls: type) -> None:
    """Adds the methods to a module's new class, ``FSDP<Name>``."""
    for name, method in {**_NEWER_METHODS, **METHODS}.items():
        if name not in vars(cls) and (name in METHODS or not hasattr(FSDPModule, name)):
            patches.set_class_attribute(cls, name, method)
