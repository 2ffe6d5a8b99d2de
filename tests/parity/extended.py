"""A tensor subclass with all-gather extensions, for features.py."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

aten = torch.ops.aten

_KEEP = {
    aten._to_copy.default,
    aten.add_.Tensor,
    aten.as_strided.default,
    aten.clone.default,
    aten.copy_.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.mul_.Tensor,
    aten.new_zeros.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.view.default,
}
"""Operators whose results are of the class, too."""


class Extended(torch.Tensor):
    """A wrapper around a float tensor; what is gathered is its negative."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Extended:
        return torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined,no-any-return]
            cls,
            inner.size(),
            strides=inner.stride(),
            dtype=inner.dtype,
            device=inner.device,
            requires_grad=inner.requires_grad,
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self._inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["_inner"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, meta: Any, size: Any, stride: Any) -> Extended:
        return Extended(inner["_inner"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any, kwargs: Any = None) -> Any:
        def unwrap(value: Any) -> Any:
            return value._inner if isinstance(value, Extended) else value

        result = func(*pytree.tree_map(unwrap, args), **pytree.tree_map(unwrap, kwargs or {}))
        if func is aten.copy_.default:
            return args[0]
        if func in _KEEP:
            return pytree.tree_map_only(torch.Tensor, Extended, result)
        return result

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], None]:
        return (-self._inner,), None

    def fsdp_post_all_gather(
        self, outputs: Any, metadata: Any, param_dtype: Any, *, out: torch.Tensor | None = None
    ) -> Any:
        (negative,) = outputs
        if out is None:
            whole = -negative
            return whole, (whole,)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(-negative)
        return None
