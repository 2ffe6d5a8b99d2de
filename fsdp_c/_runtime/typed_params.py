"""Parameters with types of the optional package ``spmd_types``, supported since torch 2.15.

torch's code translates the types of a parameter to a DTensor when it is sharded. The unsharded
parameter is a plain tensor with the types. The package checks the types of operations in a torch
function mode, which must not check FSDP2's own operations.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param as torch_param
import torch.nn as nn
from torch.distributed.tensor import DTensor

IS_AVAILABLE: bool = getattr(dist, "_is_spmd_types_available", lambda: False)()
"""Whether torch supports the package and the package can be imported."""

pause_type_check: Any = contextlib.nullcontext
"""Returns a context manager that pauses the check of types in this thread."""

if IS_AVAILABLE:
    _torch_names: Any = torch_param
    _spmd, _get_partition_spec = _torch_names.spmd, _torch_names.get_partition_spec
    pause_type_check = _spmd.no_typecheck

_TYPE_ATTRIBUTES = ("_local_type", "_partition_spec")


def is_typed(param: nn.Parameter) -> bool:
    """Whether ``param`` has types that ``fully_shard`` translates to a DTensor."""
    return IS_AVAILABLE and bool(_spmd.get_local_type(param)) and not isinstance(param, DTensor)


def is_type_checking() -> bool:
    """Whether operations of this thread are checked."""
    return IS_AVAILABLE and _spmd.is_type_checking()


def make_dtensor(fsdp_param: Any, param: nn.Parameter, mesh_info: Any) -> nn.Parameter:
    """Returns a DTensor over the memory of a typed parameter, on the mesh of ``fully_shard``.

    Sets the attributes of ``fsdp_param`` by which torch restores the types.

    Raises:
        ValueError: The types do not fit the mesh, or ``fully_shard`` was called without
            ``dp_mesh_dims``; raised by torch.
    """
    result = fsdp_param._resolve_spmd_types_for_storage(
        param, _get_partition_spec(param), _spmd.get_local_type(param), mesh_info
    )
    if param._has_grad_dtype_override:  # type: ignore[attr-defined]
        result.grad_dtype = param.grad_dtype
    return result


def drop_types(attributes: dict[str, Any]) -> dict[str, Any]:
    """Returns attributes of a typed parameter without its types, which torch restores."""
    return {name: value for name, value in attributes.items() if name not in _TYPE_ATTRIBUTES}
