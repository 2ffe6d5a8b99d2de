"""``clip_grad_norm_``: clips the gradients of sharded parameters by their total norm."""

from __future__ import annotations

import math
import types
import warnings
from collections.abc import Iterable

import torch
import torch.nn as nn

import fsdp_c._C as _C

from ._runtime.grad_norm import (
    clip_with_torch_operators,
    compute_norm_on_cpu,
    get_group_names,
    make_nonfinite_error,
    make_scalar,
    scale_on_cpu,
)


def clip_grad_norm_(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scales the gradients so that their total norm is at most ``max_norm``, in place.

    Implements ``torch.nn.utils.clip_grad_norm_`` for sharded parameters of any mesh and placements,
    plain parameters, and mixtures. The function issues one collective per dtype and sharded mesh
    dimension, which is one for most models. All ranks must call the function.

    Args:
        parameters: Parameters, or a module with parameters. Parameters without gradient are
            skipped. A plain tensor's gradient counts once, because it is assumed to be equal on all
            ranks.
        max_norm: The largest total norm. Gradients are multiplied by
            ``min(max_norm / (total + 1e-6), 1)``.
        norm_type: An order of ``torch.linalg.vector_norm``, including ``inf``.
        error_if_nonfinite: Whether to raise if the total norm is nan or infinite.
        foreach: As in torch.

    Returns:
        The total norm before clipping, a plain 0-d tensor with the same value on all ranks. torch
        returns a DTensor, and this is its ``full_tensor()``.

    Raises:
        RuntimeError: The norm is nonfinite and ``error_if_nonfinite`` is set (no gradient has
            changed), or ``foreach=True`` on a device without foreach kernels.

    The total equals torch's bit by bit on two ranks for orders 1, 2, 3 and ``inf``. Otherwise it
    may differ in the last bits. On more ranks a backend's order of summation may depend on the
    length of the message, and torch reduces one number at a time. For other orders, the powers of
    a vector and of a scalar are rounded differently.
    """
    params = _list_params(parameters)
    norm_type, max_norm = float(norm_type), float(max_norm)
    tensors, kinds, kind_of = _C.clip_collect(params, True)
    # A dispatch mode traces the operators, or replaces their results.
    if norm_type == 2.0 and foreach is None and not torch._C._len_torch_dispatch_stack():
        total = compute_norm_on_cpu(tensors, kind_of, [get_group_names(*kind) for kind in kinds])
        if total is not None:
            if error_if_nonfinite and not math.isfinite(total):
                raise make_nonfinite_error(norm_type)
            scale_on_cpu(tensors, max_norm, total)
            return make_scalar(total)
    with torch.no_grad():
        return clip_with_torch_operators(
            params, tensors, kinds, kind_of, max_norm, norm_type, error_if_nonfinite, foreach
        )


def _list_params(
    parameters: nn.Module | torch.Tensor | Iterable[torch.Tensor],
) -> list[torch.Tensor]:
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    if isinstance(parameters, nn.Module):
        return list(parameters.parameters())
    params = list(parameters)
    if not params and isinstance(parameters, types.GeneratorType):
        warnings.warn(
            "`parameters` is an empty generator, no gradient clipping will occur.", stacklevel=3
        )
    return params
