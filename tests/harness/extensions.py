"""Tensor subclasses that implement FSDP2's all-gather extensions (``fsdp_pre_all_gather``).

``OneArgument`` and ``FiveArguments`` hold a plain tensor. Their second all-gather input is a column
of row sums, so that tests cover several inputs per parameter. The gathered tensor is the first
input times the scale that the metadata carries. The two classes differ in the number of arguments
of ``fsdp_pre_all_gather``. ``Negated`` gathers the negated tensor as its only input.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.utils import _pytree as pytree

SCALE = 0.5


class Extended(torch.Tensor):
    """A wrapper subclass: each operation runs on ``held``, and its result is wrapped again.

    The results of ``copy_`` and ``add_`` are not wrapped.
    """

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Extended:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.shape,
            held.stride(),
            held.storage_offset(),
            dtype=held.dtype,
            device=held.device,
        )

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @classmethod
    def __tensor_unflatten__(cls, tensors: Any, context: Any, size: Any, stride: Any) -> Extended:
        return cls(tensors["held"])

    def __repr__(self, **kwargs: Any) -> str:
        return f"{type(self).__name__}({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(Extended, lambda t: t.held, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.add_.Tensor):
            return out
        return pytree.tree_map_only(torch.Tensor, cls, out)


class WithSums(Extended):
    """Gathers the tensor and its row sums. Subclasses define ``fsdp_pre_all_gather``."""

    def _all_gather_inputs(self) -> tuple[tuple[torch.Tensor, ...], Any]:
        sums = self.held.sum(dim=1, keepdim=True)
        return (self.held, sums), SCALE

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        values, sums = all_gather_outputs
        if sums.shape != (values.shape[0], 1):
            raise ValueError(f"{sums.shape} does not fit {values.shape}")
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(values * metadata)
            return None
        gathered = (values * metadata).to(param_dtype)
        return gathered, (gathered,)


class OneArgument(WithSums):
    def fsdp_pre_all_gather(self, mesh: Any) -> tuple[tuple[torch.Tensor, ...], Any]:
        return self._all_gather_inputs()


class FiveArguments(WithSums):
    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        if len(outer_size) != 2 or outer_stride[1] != 1 or not isinstance(module, nn.Linear):
            raise ValueError(f"unexpected {outer_size} {outer_stride} {type(module)}")
        return self._all_gather_inputs()


class Negated(Extended):
    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: Any, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[torch.Tensor, ...], None]:
        return (-self.held,), None

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: None,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        (negative,) = all_gather_outputs
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(-negative)
            return None
        gathered = -negative
        return gathered, (gathered,)


def extend(model: nn.Module, kind: str) -> None:
    """Replaces the weight of every nn.Linear by a parameter of subclass ``kind``."""
    subclass = {"one argument": OneArgument, "five arguments": FiveArguments}[kind]
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.weight = nn.Parameter(subclass(module.weight.detach()))
