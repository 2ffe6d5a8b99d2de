"""``Unit``: modules that ``fully_shard`` is called on together, and its arguments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn as nn

Kwargs = dict[str, Any]


@dataclass(frozen=True, eq=False)
class Unit:
    """Modules that ``fully_shard`` is called on together, and its arguments.

    ``names`` are the modules' names from the root; the root's name is empty.
    ``unshard_in_backward`` is False if backward does not need the parameters, as for an embedding.
    """

    modules: tuple[nn.Module, ...]
    names: tuple[str, ...]
    kwargs: Kwargs
    unshard_in_backward: bool = True

    def __str__(self) -> str:
        return ", ".join(f"'{name}'" if name else "the root" for name in self.names)
