"""Base of the scenarios on the simulated device: ``SimTools`` and the registry ``SCENARIOS``.

A scenario takes the ``SimTools`` of one implementation and returns a record of losses and digests.
"""

from __future__ import annotations

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import simulated
import torch
import torch.distributed as dist
import torch.nn as nn
from features import WIDTH, Record, Tools
from releases import has
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

WORLD = 4
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
"""Reduces in bfloat16 on all releases, then casts. Without ``reduce_dtype``, torch reduces in the
dtype of the sharded parameter from 2.15 on."""


@functools.cache
def make_mesh(shape: tuple[int, ...], names: tuple[str, ...] | None) -> DeviceMesh:
    return init_device_mesh("sim", shape, mesh_dim_names=names)


class SimTools(Tools):
    """``Tools`` of one implementation, with models, meshes and inputs on the simulated device.

    By default the process is rank 0 of ``WORLD`` ranks (:func:`init_loopback_group`).
    """

    def __init__(self, implementation: str, rank: int = 0, world_size: int = WORLD) -> None:
        super().__init__(rank, world_size, implementation)
        self.is_torch = implementation == "torch"

    def mesh(self, *names: str) -> DeviceMesh:
        return make_mesh((2, self.world_size // 2), names)

    def flat(self) -> DeviceMesh:
        return make_mesh((self.world_size,), None)

    def shard(self, model: nn.Sequential, **kwargs: Any) -> Any:
        kwargs.setdefault("mesh", self.flat())
        super().shard(model, **kwargs)
        name_memory(model)
        return model

    def input(self, step: int, width: int = WIDTH) -> torch.Tensor:
        return super().input(step, width).to("sim")


def name_memory(model: nn.Module) -> None:
    """Labels the parameters' memory, so that findings contain their names."""
    for name, parameter in model.named_parameters():
        local = getattr(parameter, "_local_tensor", parameter)
        if local.device.type == "sim":
            simulated.start().name_storage(local.untyped_storage()._cdata, f"parameter {name}")


def init_loopback_group() -> None:
    """Makes this process rank 0 of ``WORLD`` ranks.

    The backend ``loop`` runs no other process: a collective gets this rank's data from all ranks.
    """
    simulated.start()
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group("loop", store=dist.HashStore(), rank=0, world_size=WORLD)


SCENARIOS: dict[str, Callable[[SimTools], Record]] = {}
SINCE: defaultdict[str, str] = defaultdict(lambda: "2.11")
"""The first torch release that supports a scenario."""


def prefetch_neighbors(model: Any) -> None:
    """Makes each unit prefetch the next unit in forward and the previous unit in backward."""
    for previous, following in itertools.pairwise(model):
        previous.set_modules_to_forward_prefetch([following])
        following.set_modules_to_backward_prefetch([previous])


def set_reduce_hook(model: Any, stream: Any = None) -> None:
    """Halves the reduced gradients of all units, in an all-reduce hook on ``stream`` if given."""
    options = {} if stream is None else {"stream": stream}
    for unit in (*model, model):
        unit.set_all_reduce_hook(lambda reduced: reduced.mul_(0.5), **options)


def scenario(function: Callable[[SimTools], Record]) -> Callable[[SimTools], Record]:
    """Registers a scenario under its function's name."""
    SCENARIOS[function.__name__] = function
    return function


def since(release: str) -> Callable[[Callable[[SimTools], Record]], Callable[[SimTools], Record]]:
    """Marks a scenario that torch supports from ``release`` on."""

    def set_release(function: Callable[[SimTools], Record]) -> Callable[[SimTools], Record]:
        SINCE[function.__name__] = release
        return function

    return set_release


def is_supported(name: str) -> bool:
    """Returns whether the installed torch supports a scenario."""
    return has(SINCE[name])
