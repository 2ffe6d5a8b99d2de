"""Wrapper tensor subclasses: they hold another tensor, own no memory and have no extensions."""

from __future__ import annotations

from typing import Any

import torch
import torch.utils._pytree as pytree


class Wrapping(torch.Tensor):
    """A tensor with the shape of the tensor that it holds. Results of operations are wrapped."""

    held: torch.Tensor

    @staticmethod
    def __new__(cls, held: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls,
            held.size(),
            strides=held.stride(),
            storage_offset=held.storage_offset(),
            dtype=held.dtype,
            device=held.device,
            requires_grad=held.requires_grad,
        )

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def unwrap(value: Any) -> Any:
            return value.held if isinstance(value, Wrapping) else value

        args, kwargs = pytree.tree_map(unwrap, (args, kwargs or {}))
        out = func(*args, **kwargs)
        if func.overloadpacket is torch.ops.aten._foreach_copy_:
            return None
        return pytree.tree_map(lambda v: cls(v) if isinstance(v, torch.Tensor) else v, out)


class Traceable(Wrapping):
    """A wrapping subclass with the methods that dynamo needs to trace it."""

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["held"], None

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, metadata: Any, size: Any, stride: Any) -> Any:
        return cls(inner["held"])
