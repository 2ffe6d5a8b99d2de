"""A dispatch mode that records operators, collectives among them."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class RecordedOperators(TorchDispatchMode):
    """Records the operators that are called inside.

    Unlike CommDebugMode, this mode supports several forwards and ``autograd.grad``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        """Operators in the order of their calls, such as ``aten.add.Tensor``."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))

    def collectives(self) -> list[str]:
        """Returns the names of the collectives, such as ``_allgather_base_``."""
        parts = (name.split(".") for name in self.names)
        return [operator for namespace, operator, *_ in parts if "c10d" in namespace]
