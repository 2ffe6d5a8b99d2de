"""Scripts: unusual user code around FSDP2, run on two ranks over small models.

A module ``scripts_*.py`` defines functions marked ``@script()``. Each takes a ``Script`` and
returns its results. All scripts run in one launch per implementation (``behavior.py``). A script
marked ``wide`` also runs as ``name_wide``, over parameters that are large enough to form their own
chunks.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
import torch.nn as nn
from behavior import DIM, Api, Raised, scenario

MODULES = (
    "scripts_autograd",
    "scripts_gradients",
    "scripts_modules",
    "scripts_optimizers",
    "scripts_parallel",
    "scripts_runs",
    "scripts_state",
    "scripts_writes",
)
WIDE = 300
"""Width of the large models, whose weights have 360,000 bytes."""
MAX_RETURNED_BYTES = 4096
"""Maximum number of bytes of a tensor that is returned as it is. Larger ones become digests."""

Loss = Callable[[int], torch.Tensor]
Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass
class Script(Api):
    """One implementation, with the model, data and training loop that most scripts use."""

    width: int = DIM

    def blocks(self, count: int = 3, seed: int = 0) -> nn.Sequential:
        torch.manual_seed(seed)
        width = self.width
        return nn.Sequential(
            *(nn.Sequential(nn.Linear(width, width), nn.Tanh()) for _ in range(count))
        )

    def shard(self, model: Any, units: Iterable[nn.Module] | None = None, **kwargs: Any) -> Any:
        """Shards ``units`` (default: the children with parameters), then the model itself."""
        if units is None:
            children = list(model.children())
            units = [child for child in children if next(child.parameters(), None) is not None]
        for unit in units:
            self.fully_shard(unit, **kwargs)
        return self.fully_shard(model, **kwargs)

    def sharded(self, **kwargs: Any) -> Any:
        return self.shard(self.blocks(), **kwargs)

    def rows(self, step: int = 0, count: int = 4) -> torch.Tensor:
        """Returns ``count`` rows that differ between steps and ranks."""
        generator = torch.Generator().manual_seed(100 * self.rank + step)
        return torch.randn(count, self.width, generator=generator)

    def loss(self, model: nn.Module, step: int = 0) -> torch.Tensor:
        return model(self.rows(step)).square().mean()

    def train(
        self,
        model: nn.Module,
        loss: Loss | None = None,
        steps: int = 2,
        optimizer: Optimizer | None = None,
    ) -> list[Any]:
        """Trains ``steps`` steps. Returns each step's loss and gradients, then the weights, as
        local shards."""
        params = list(model.parameters())
        chosen_optimizer = (
            optimizer(params) if optimizer else torch.optim.SGD(params, lr=0.1, momentum=0.9)
        )
        results: list[Any] = []
        for step in range(steps):
            value = loss(step) if loss else self.loss(model, step)
            value.backward()
            results += [copy_of(value), gradients(model)]
            chosen_optimizer.step()
            chosen_optimizer.zero_grad()
        return [*results, weights(model)]


def copy_of(tensor: Any) -> Any:
    """Copies this rank's part of a tensor."""
    if tensor is None:
        return None
    part = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part.detach().clone()


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [copy_of(param) for param in model.parameters()]


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [copy_of(param.grad) for param in model.parameters()]


def returnable(value: Any) -> Any:
    """Converts results to local tensors, and large tensors to digests."""
    if isinstance(value, torch.Tensor):
        part = copy_of(value)
        if part.nbytes <= MAX_RETURNED_BYTES:
            return part
        data = part.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return [str(part.dtype), tuple(part.shape), hashlib.sha256(data).hexdigest()]
    if isinstance(value, dict):
        return {name: returnable(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [returnable(item) for item in value]
    return value


def attempted(run: Callable[[], Any]) -> Any:
    """Returns the result of ``run()``, or the type and first line of its exception."""
    try:
        return returnable(run())
    except Exception as error:
        lines = str(error).splitlines() or [""]
        return Raised(type(error).__name__, lines[0])


Function = Callable[[Script], Any]
CHEAP: list[str] = []
COSTLY: list[str] = []
"""Names of the registered scripts without and with the mark ``costly``."""


def script(wide: bool = False, costly: bool = False) -> Callable[[Function], Function]:
    """Registers a function to run on two ranks.

    ``wide``: also run it over large parameters. ``costly``: leave it out of `make test`, because
    its ranks need more than a seventh of a second.
    """

    def register(function: Function) -> Function:
        widths = {function.__name__: DIM}
        if wide:
            widths[f"{function.__name__}_wide"] = WIDE
        for name, width in widths.items():
            _register(function, name, width)
            (COSTLY if costly else CHEAP).append(name)
        return function

    return register


def _register(function: Function, name: str, width: int) -> None:
    @functools.wraps(function)
    def run(api: Api) -> Any:
        api_fields = {field.name: getattr(api, field.name) for field in fields(Api)}
        return attempted(lambda: function(Script(**api_fields, width=width)))

    run.__name__ = name
    scenario()(run)
