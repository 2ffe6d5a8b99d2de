"""Scripts that train under modes and tools of autograd and of torch."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn
from scripts import Script, copy_of, gradients, script, weights
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    set_checkpoint_early_stop,
)

Context = Callable[[], contextlib.AbstractContextManager[Any]]


def train_with_forwards_in(api: Script, context: Context) -> list[Any]:
    """Trains with each forward, but no backward, inside ``context()``."""
    model = api.sharded()

    def loss(step: int) -> torch.Tensor:
        with context():
            return api.loss(model, step)

    return api.train(model, loss)


def train_in(api: Script, context: Context) -> list[Any]:
    model = api.sharded()
    with context():
        return api.train(model)


# ---- saved tensors ----


@script()
def detect_anomaly(api: Script) -> Any:
    return train_in(api, torch.autograd.detect_anomaly)


@script()
def save_on_cpu(api: Script) -> Any:
    return train_with_forwards_in(api, torch.autograd.graph.save_on_cpu)


@script()
def saved_tensors_hooks_that_copy(api: Script) -> Any:
    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor]:
        return (tensor.clone(),)

    def unpack(packed: tuple[torch.Tensor]) -> torch.Tensor:
        return packed[0]

    return train_with_forwards_in(
        api, lambda: torch.autograd.graph.saved_tensors_hooks(pack, unpack)
    )


@script(wide=True)
def saved_tensors_hooks_without_change(api: Script) -> Any:
    def same(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    return train_with_forwards_in(api, lambda: torch.autograd.graph.saved_tensors_hooks(same, same))


# ---- modes ----


class PassThroughFunctionMode(TorchFunctionMode):
    """Calls each function unchanged."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return function(*args, **(kwargs or {}))


class PassThroughDispatchMode(TorchDispatchMode):
    """Calls each operator unchanged."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return function(*args, **(kwargs or {}))


@script()
def torch_function_mode(api: Script) -> Any:
    return train_in(api, PassThroughFunctionMode)


@script()
def torch_dispatch_mode(api: Script) -> Any:
    return train_in(api, PassThroughDispatchMode)


@script()
def default_device_context(api: Script) -> Any:
    return train_in(api, lambda: torch.device("cpu"))


@script(costly=True)
def forward_ad_dual_level(api: Script) -> Any:
    """Computes forward-mode derivatives through torch.autograd.forward_ad."""
    model = api.sharded()
    rows = api.rows()
    with torch.autograd.forward_ad.dual_level():
        output = model(torch.autograd.forward_ad.make_dual(rows, torch.ones_like(rows)))
        primal, tangent = torch.autograd.forward_ad.unpack_dual(output)
        return [copy_of(primal), copy_of(tangent)]


@script(costly=True)
def func_jvp(api: Script) -> Any:
    """Computes forward-mode derivatives through torch.func."""
    rows = api.rows()
    return list(torch.func.jvp(api.sharded(), (rows,), (torch.ones_like(rows),)))


# ---- torch.func.functional_call ----


@script()
def functional_call_with_own_parameters(api: Script) -> Any:
    model = api.sharded()
    own = dict(model.named_parameters())

    def loss(step: int) -> torch.Tensor:
        return torch.func.functional_call(model, own, (api.rows(step),)).square().mean()

    return api.train(model, loss)


@script()
def functional_call_with_scaled_parameters(api: Script) -> Any:
    model = api.sharded()

    def loss(step: int) -> torch.Tensor:
        scaled = {name: param * 0.5 for name, param in model.named_parameters()}
        return torch.func.functional_call(model, scaled, (api.rows(step),)).square().mean()

    return api.train(model, loss)


# ---- autograd.grad and backward with inputs ----


@script()
def backward_with_inputs_argument(api: Script) -> Any:
    model = api.sharded()
    rows = api.rows().requires_grad_()
    model(rows).sum().backward(inputs=[rows])
    return [copy_of(rows.grad), gradients(model), api.train(model)]


@script()
def autograd_grad_of_sharded_parameters(api: Script) -> Any:
    """autograd.grad returns None: forward used the unsharded parameters instead."""
    model = api.sharded()
    results: list[Any] = []
    for create_graph in (False, False, True):
        loss = api.loss(model)
        params = list(model.parameters())
        grads = torch.autograd.grad(loss, params, create_graph=create_graph, allow_unused=True)
        results.append([copy_of(gradient) for gradient in grads])
    return [*results, api.train(model)]


# ---- checkpoints ----


@script()
def checkpoint_without_early_stop(api: Script) -> Any:
    model = api.sharded()

    def loss(step: int) -> torch.Tensor:
        hidden = api.rows(step)
        with set_checkpoint_early_stop(False):
            for block in model:
                hidden = checkpoint(block, hidden, use_reentrant=False)
        return hidden.square().mean()

    return api.train(model, loss)


def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operation == torch.ops.aten.addmm.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@script()
def selective_checkpoint(api: Script) -> Any:
    model = api.sharded()

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy)

    def loss(step: int) -> torch.Tensor:
        hidden = api.rows(step)
        for block in model:
            hidden = checkpoint(block, hidden, use_reentrant=False, context_fn=contexts)
        return hidden.square().mean()

    return api.train(model, loss)


class Twice(nn.Module):
    """One layer, called twice and checkpointed in both calls."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.layer, hidden, use_reentrant=True)
        return checkpoint(self.layer, hidden.tanh(), use_reentrant=True)


@script()
def layer_checkpointed_twice(api: Script) -> Any:
    torch.manual_seed(0)
    model = api.shard(nn.Sequential(Twice(api.width), Twice(api.width)))
    return api.train(model, lambda step: model(api.rows(step).requires_grad_()).square().mean())


# ---- torch.compile ----


@contextlib.contextmanager
def fresh_compiler() -> Iterator[None]:
    """Resets torch.compile before and after the block."""
    torch.compiler.reset()
    try:
        yield
    finally:
        torch.compiler.reset()


def train_compiled_after_sharding(api: Script, backend: str) -> list[Any]:
    model = api.sharded()
    with fresh_compiler():
        for block in model:
            block.compile(backend=backend)
        return api.train(model)


@script(costly=True)
def blocks_compiled_after_sharding(api: Script) -> Any:
    return train_compiled_after_sharding(api, "eager")


@script(costly=True)
def blocks_compiled_with_aot_eager(api: Script) -> Any:
    return train_compiled_after_sharding(api, "aot_eager")


@script(costly=True)
def compiled_optimizer_step(api: Script) -> Any:
    model = api.sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results: list[Any] = []
    with fresh_compiler():
        step = torch.compile(lambda: optimizer.step(), backend="eager")
        for index in range(2):
            loss = api.loss(model, index)
            loss.backward()
            step()
            optimizer.zero_grad()
            results += [copy_of(loss), weights(model)]
    return results
