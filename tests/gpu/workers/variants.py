"""Short trainings without host synchronization: one for each part of FSDP2 that orders streams.

``VARIANTS`` maps a name to a function of a :class:`Tools`, which holds one implementation's
functions and a device. Results stay on the device; ``digest`` reads them after the training.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.fsdp as fsdp
import torch.nn as nn
from loop_group import DELAYS
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard
from torch.utils.checkpoint import checkpoint

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
WORLD = 8

Sync = Callable[[Any, bool], None]


class Paused(torch.autograd.Function):
    """The identity, with a pause in forward and in backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        DELAYS.pause("compute", x.device)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        DELAYS.pause("compute", gradient.device)
        return gradient


class Block(nn.Module):
    """A residual layer. One of its parameters has a single element."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.gain = nn.Parameter(torch.ones(1))
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Paused.apply(x + self.gain * self.down(torch.relu(self.up(self.norm(x)))))


class Recomputed(nn.Module):
    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=False)


@functools.cache
def _mesh(device_type: str, shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


@dataclass
class Tools:
    """One implementation's functions, a device, and the size of the models."""

    implementation: str
    device: torch.device
    width: int = 512
    layers: int = 4
    rows: int = 64
    steps: int = 3

    def __post_init__(self) -> None:
        is_fsdp_c = self.implementation == "fsdp_c"
        torch_replicate = "torch.distributed._composable.replicate_with_fsdp"
        self.fully_shard = (importlib.import_module("fsdp_c") if is_fsdp_c else fsdp).fully_shard
        replicate_module = importlib.import_module("fsdp_c" if is_fsdp_c else torch_replicate)
        self.replicate = replicate_module.replicate
        self._inputs: dict[tuple[int, int], list[torch.Tensor]] = {}

    @property
    def flat(self) -> DeviceMesh:
        return _mesh(self.device.type, (WORLD,), ("shard",))

    @property
    def hybrid(self) -> DeviceMesh:
        return _mesh(self.device.type, (2, WORLD // 2), ("replicate", "shard"))

    def module(self) -> Any:
        return torch.get_device_module(self.device.type)

    def blocks(self, width: int = 0, seed: int = 0) -> nn.Sequential:
        torch.manual_seed(seed)
        width = width or self.width
        layers = [Block(width) for _ in range(self.layers)]
        return nn.Sequential(*layers, nn.Linear(width, width)).to(self.device)

    def shard(self, model: nn.Sequential, **kwargs: Any) -> Any:
        kwargs.setdefault("mesh", self.flat)
        for block in model:
            self.fully_shard(block, **kwargs)
        return self.fully_shard(model, **kwargs)

    def inputs(self, count: int, width: int = 0) -> list[torch.Tensor]:
        """Returns the same ``count`` inputs at each call. The device copies are cached."""
        width = width or self.width
        if (count, width) not in self._inputs:
            generator = torch.Generator().manual_seed(1)
            inputs_on_host = torch.randn((count, self.rows, width), generator=generator)
            self._inputs[count, width] = list(inputs_on_host.to(self.device))
        return self._inputs[count, width]

    def train(
        self, model: Any, *, micro: int = 1, sync: Sync | None = None, width: int = 0
    ) -> list[Any]:
        """Trains ``steps`` steps of ``micro`` backwards. Calls ``sync(model, is_last)`` before
        each backward. Returns losses, gradients and final weights."""
        inputs = iter(self.inputs(self.steps * micro, width))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, foreach=True)
        results: list[Any] = []
        for _ in range(self.steps):
            for index in range(micro):
                if sync is not None:
                    sync(model, index == micro - 1)
                results.append(self.backward(model, next(inputs)))
            results += copies(p.grad for p in model.parameters())
            DELAYS.pause("optimizer", self.device)
            optimizer.step()
            optimizer.zero_grad()
        return results + copies(model.parameters())

    def backward(self, model: Any, x: torch.Tensor) -> torch.Tensor:
        loss = model(x).float().pow(2).mean()
        loss.backward()
        return loss.detach()


def copies(tensors: Any) -> list[Any]:
    """Copies the local tensors on the current stream."""
    locals_ = [
        tensor._local_tensor if isinstance(tensor, DTensor) else tensor for tensor in tensors
    ]
    return [None if tensor is None else tensor.detach().clone() for tensor in locals_]


def digest(results: Sequence[Any]) -> str:
    """Hashes all bytes. Waits for the device. Raises ValueError if a tensor is not finite:
    poisoned memory contains NaN."""
    sha = hashlib.sha256()
    for tensor in results:
        if tensor is not None and not tensor.isfinite().all():
            raise ValueError("a tensor is not finite")
        sha.update(b"none" if tensor is None else _bytes(tensor))
    return sha.hexdigest()[:16]


def _bytes(tensor: torch.Tensor) -> bytes:
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return data.numpy().tobytes() if data.numel() else b""


Variant = Callable[[Tools], list[Any]]
VARIANTS: dict[str, Variant] = {}
NEEDS: dict[str, Any] = {}
"""Maps a variant to whether the installed torch supports it. Unlisted variants always run."""


def variant(function: Variant) -> Variant:
    VARIANTS[function.__name__] = function
    return function


def needs(supported: bool) -> Callable[[Variant], Variant]:
    def set_support(function: Variant) -> Variant:
        NEEDS[function.__name__] = supported
        return function

    return set_support


def names(device: torch.device) -> list[str]:
    """Returns the variants that the installed torch and the device support.

    Variants with offload, or that are named after a stream, need a device with streams.
    """
    supported = [name for name in VARIANTS if NEEDS.get(name, True)]
    has_streams = device.type != "cpu"
    return [name for name in supported if has_streams or not name.startswith(("offload", "on_a"))]


def units(model: Any) -> list[Any]:
    return [*model, model]


def _sync_on_last(model: Any, is_last: bool) -> None:
    model.set_requires_gradient_sync(is_last)


def _all_reduce_on_last(model: Any, is_last: bool) -> None:
    model.set_requires_all_reduce(is_last)


def _reshard_on_last(model: Any, is_last: bool) -> None:
    model.set_reshard_after_backward(is_last)


def _place_on_dim_1(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim > 1 else None


@variant
def plain(tools: Tools) -> list[Any]:
    return tools.train(tools.shard(tools.blocks()))


@variant
def mixed(tools: Tools) -> list[Any]:
    return tools.train(tools.shard(tools.blocks(), mp_policy=MIXED))


@variant
def bfloat16_reduction(tools: Tools) -> list[Any]:
    return tools.train(tools.shard(tools.blocks(), mp_policy=BFLOAT16))


@variant
def uneven(tools: Tools) -> list[Any]:
    width = tools.width + 3
    return tools.train(tools.shard(tools.blocks(width), mp_policy=MIXED), width=width)


@variant
def second_dim(tools: Tools) -> list[Any]:
    return tools.train(
        tools.shard(tools.blocks(), shard_placement_fn=_place_on_dim_1, mp_policy=MIXED)
    )


@variant
def without_reshard_after_forward(tools: Tools) -> list[Any]:
    return tools.train(tools.shard(tools.blocks(), reshard_after_forward=False))


@variant
def smaller_group(tools: Tools) -> list[Any]:
    return tools.train(tools.shard(tools.blocks(), reshard_after_forward=2, mp_policy=MIXED))


@variant
def prefetched(tools: Tools) -> list[Any]:
    model = tools.shard(tools.blocks())
    for block, next_block in itertools.pairwise(model):
        block.set_modules_to_forward_prefetch([next_block])
        next_block.set_modules_to_backward_prefetch([block])
    return tools.train(model)


@variant
def manual_unshard(tools: Tools) -> list[Any]:
    model = tools.shard(tools.blocks())
    results = []
    for _ in range(2):
        handles = [unit.unshard(async_op=True) for unit in units(model)]
        handles[0].wait()
        results += tools.train(model)
    return results


@variant
def asynchronous_gathers(tools: Tools) -> list[Any]:
    model = tools.shard(tools.blocks())
    model._set_unshard_async_op(True)
    return tools.train(model)


@variant
def accumulated(tools: Tools) -> list[Any]:
    return tools.train(tools.shard(tools.blocks(), mp_policy=MIXED), micro=3, sync=_sync_on_last)


@variant
def without_reshard_after_backward(tools: Tools) -> list[Any]:
    return tools.train(tools.shard(tools.blocks()), micro=2, sync=_reshard_on_last)


@variant
def hsdp(tools: Tools) -> list[Any]:
    return tools.train(tools.shard(tools.blocks(), mesh=tools.hybrid))


@variant
def hsdp_mixed(tools: Tools) -> list[Any]:
    return tools.train(tools.shard(tools.blocks(), mesh=tools.hybrid, mp_policy=BFLOAT16))


@variant
def hsdp_partial(tools: Tools) -> list[Any]:
    model = tools.shard(tools.blocks(), mesh=tools.hybrid, mp_policy=MIXED)
    return tools.train(model, micro=3, sync=_all_reduce_on_last)


@variant
def hsdp_with_a_reduce_hook(tools: Tools) -> list[Any]:
    model = tools.shard(tools.blocks(), mesh=tools.hybrid)
    for unit in units(model):
        unit.set_all_reduce_hook(lambda row: row.mul_(0.5))
    return tools.train(model)


@variant
def on_a_reduce_hook_stream(tools: Tools) -> list[Any]:
    model = tools.shard(tools.blocks(), mp_policy=MIXED)
    stream = tools.module().Stream()
    for unit in units(model):
        unit.set_all_reduce_hook(lambda row: row.mul_(0.5), stream=stream)
    return tools.train(model)


@variant
def on_a_side_stream(tools: Tools) -> list[Any]:
    model = tools.shard(tools.blocks())
    module = tools.module()
    stream = module.Stream()
    stream.wait_stream(module.current_stream())
    with module.stream(stream):
        results = tools.train(model)
    module.current_stream().wait_stream(stream)
    return results


@variant
def replicated(tools: Tools) -> list[Any]:
    model = tools.replicate(tools.blocks(), mesh=tools.flat)
    return tools.train(model, micro=2, sync=_sync_on_last)


@variant
def replicated_units(tools: Tools) -> list[Any]:
    model = tools.blocks()
    for block in model:
        tools.replicate(block, mesh=tools.flat, mp_policy=MIXED)
    return tools.train(tools.replicate(model, mesh=tools.flat, mp_policy=MIXED))


@variant
def offload(tools: Tools) -> list[Any]:
    return tools.train(tools.shard(tools.blocks(), offload_policy=CPUOffloadPolicy()))


@variant
def offload_unpinned(tools: Tools) -> list[Any]:
    policy = CPUOffloadPolicy(pin_memory=False)
    return tools.train(tools.shard(tools.blocks(), offload_policy=policy, mp_policy=MIXED))


@needs(hasattr(fsdp.FSDPModule, "set_reduce_scatter_max_input_buffers"))
@variant
def own_group_for_reduce_scatters(tools: Tools) -> list[Any]:
    model = tools.shard(tools.blocks())
    model.set_separate_reduce_scatter_group(True)
    model.set_reduce_scatter_max_input_buffers(3)
    return tools.train(model)


@variant
def checkpointed(tools: Tools) -> list[Any]:
    model = nn.Sequential(*(Recomputed(block) for block in tools.blocks()))
    return tools.train(tools.shard(model))


@variant
def two_roots(tools: Tools) -> list[Any]:
    return _two_roots(tools, shared=False)


@needs(hasattr(fsdp, "share_comm_ctx"))
@variant
def two_roots_that_share_streams(tools: Tools) -> list[Any]:
    return _two_roots(tools, shared=True)


def _two_roots(tools: Tools, shared: bool) -> list[Any]:
    first, second = (tools.shard(tools.blocks(seed=seed)) for seed in range(2))
    if shared:
        for model in (first, second):
            model._get_fsdp_state()._lazy_init()
        fsdp.share_comm_ctx([*units(first), *units(second)])  # type: ignore[attr-defined]
    results: list[Any] = []
    for x in tools.inputs(tools.steps):
        results.append(tools.backward(lambda y: second(first(y)), x))
        results += copies(p.grad for p in (*first.parameters(), *second.parameters()))
    return results


@variant
def evaluated(tools: Tools) -> list[Any]:
    model = tools.shard(tools.blocks())
    results = tools.train(model)
    with torch.no_grad():
        results += copies([model(tools.inputs(1)[0])])
    return results + tools.train(model)


@variant
def on_an_optimizer_stream(tools: Tools) -> list[Any]:
    return optimizer_event(tools, stale=False)


def optimizer_event(tools: Tools, stale: bool) -> list[Any]:
    """Trains with the optimizer on its own stream and an event for the next gathers to wait for.

    With ``stale``, the event was recorded before the optimizer step. This seeded bug must change
    the results.
    """
    model = tools.shard(tools.blocks())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, foreach=True)
    module = tools.module()
    stream = module.Stream()
    results: list[Any] = []
    for x in tools.inputs(tools.steps):
        results.append(tools.backward(model, x))
        stream.wait_stream(module.current_stream())
        before = stream.record_event()
        with module.stream(stream):
            DELAYS.pause("optimizer", tools.device)
            optimizer.step()
        after = stream.record_event()
        model.set_post_optim_event(before if stale else after)
        for p in model.parameters():  # zero_grad() would free memory that the optimizer reads
            results.append(p.grad)
            p.grad = None
    module.current_stream().wait_stream(stream)
    return copies(results) + copies(model.parameters())
