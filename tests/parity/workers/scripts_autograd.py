"""Scripts about modes and tools of autograd and of torch that a step runs under."""

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


def forwards_within(run: Script, context: Context) -> list[Any]:
    """Trains, with each forward, and no backward, within the context."""
    model = run.sharded()

    def loss(step: int) -> torch.Tensor:
        with context():
            return run.loss(model, step)

    return run.train(model, loss)


def training_within(run: Script, context: Context) -> list[Any]:
    model = run.sharded()
    with context():
        return run.train(model)


# ---- saved tensors ----


@script()
def anomalies_are_looked_for(run: Script) -> Any:
    return training_within(run, torch.autograd.detect_anomaly)


@script()
def saved_tensors_on_the_cpu(run: Script) -> Any:
    return forwards_within(run, torch.autograd.graph.save_on_cpu)


@script()
def saved_tensors_are_copies(run: Script) -> Any:
    def pack(tensor: torch.Tensor) -> tuple[torch.Tensor]:
        return (tensor.clone(),)

    def unpack(packed: tuple[torch.Tensor]) -> torch.Tensor:
        return packed[0]

    return forwards_within(run, lambda: torch.autograd.graph.saved_tensors_hooks(pack, unpack))


@script(wide=True)
def saved_tensors_pass_through_hooks(run: Script) -> Any:
    def same(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    return forwards_within(run, lambda: torch.autograd.graph.saved_tensors_hooks(same, same))


# ---- modes ----


class Functions(TorchFunctionMode):
    """Passes on what is called."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return function(*args, **(kwargs or {}))


class Operations(TorchDispatchMode):
    """Passes on what is dispatched."""

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None):
        return function(*args, **(kwargs or {}))


@script()
def within_a_function_mode(run: Script) -> Any:
    return training_within(run, Functions)


@script()
def within_a_dispatch_mode(run: Script) -> Any:
    return training_within(run, Operations)


@script()
def within_a_default_device(run: Script) -> Any:
    return training_within(run, lambda: torch.device("cpu"))


@script(costly=True)
def dual_numbers(run: Script) -> Any:
    """Forward-mode derivatives without torch.func."""
    model = run.sharded()
    rows = run.rows()
    with torch.autograd.forward_ad.dual_level():
        output = model(torch.autograd.forward_ad.make_dual(rows, torch.ones_like(rows)))
        primal, tangent = torch.autograd.forward_ad.unpack_dual(output)
        return [copy_of(primal), copy_of(tangent)]


@script(costly=True)
def dual_numbers_of_a_transform(run: Script) -> Any:
    """The same by torch.func."""
    rows = run.rows()
    return list(torch.func.jvp(run.sharded(), (rows,), (torch.ones_like(rows),)))


# ---- torch.func.functional_call ----


@script()
def called_with_its_own_parameters(run: Script) -> Any:
    model = run.sharded()
    own = dict(model.named_parameters())

    def loss(step: int) -> torch.Tensor:
        return torch.func.functional_call(model, own, (run.rows(step),)).square().mean()

    return run.train(model, loss)


@script()
def called_with_scaled_parameters(run: Script) -> Any:
    model = run.sharded()

    def loss(step: int) -> torch.Tensor:
        scaled = {name: param * 0.5 for name, param in model.named_parameters()}
        return torch.func.functional_call(model, scaled, (run.rows(step),)).square().mean()

    return run.train(model, loss)


# ---- autograd.grad and backward with inputs ----


@script()
def backward_to_the_inputs_only(run: Script) -> Any:
    model = run.sharded()
    rows = run.rows().requires_grad_()
    model(rows).sum().backward(inputs=[rows])
    return [copy_of(rows.grad), gradients(model), run.train(model)]


@script()
def gradients_of_sharded_parameters(run: Script) -> Any:
    """By autograd.grad, which finds none: forward used other tensors than these."""
    model = run.sharded()
    seen: list[Any] = []
    for create_graph in (False, False, True):
        loss = run.loss(model)
        params = list(model.parameters())
        found = torch.autograd.grad(loss, params, create_graph=create_graph, allow_unused=True)
        seen.append([copy_of(gradient) for gradient in found])
    return [*seen, run.train(model)]


# ---- checkpoints ----


@script()
def checkpoints_without_early_stop(run: Script) -> Any:
    model = run.sharded()

    def loss(step: int) -> torch.Tensor:
        hidden = run.rows(step)
        with set_checkpoint_early_stop(False):
            for block in model:
                hidden = checkpoint(block, hidden, use_reentrant=False)
        return hidden.square().mean()

    return run.train(model, loss)


def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if operation == torch.ops.aten.addmm.default:
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


@script()
def selective_checkpoints(run: Script) -> Any:
    model = run.sharded()

    def contexts() -> Any:
        return create_selective_checkpoint_contexts(policy)

    def loss(step: int) -> torch.Tensor:
        hidden = run.rows(step)
        for block in model:
            hidden = checkpoint(block, hidden, use_reentrant=False, context_fn=contexts)
        return hidden.square().mean()

    return run.train(model, loss)


class Twice(nn.Module):
    """One layer, checkpointed in each of two calls."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = checkpoint(self.layer, hidden, use_reentrant=True)
        return checkpoint(self.layer, hidden.tanh(), use_reentrant=True)


@script()
def a_layer_checkpointed_twice(run: Script) -> Any:
    torch.manual_seed(0)
    model = run.shard(nn.Sequential(Twice(run.width), Twice(run.width)))
    return run.train(model, lambda step: model(run.rows(step).requires_grad_()).square().mean())


# ---- torch.compile ----


@contextlib.contextmanager
def compiling() -> Iterator[None]:
    """What was compiled is forgotten, before and after."""
    torch.compiler.reset()
    try:
        yield
    finally:
        torch.compiler.reset()


def compiled_after_sharding(run: Script, backend: str) -> list[Any]:
    model = run.sharded()
    with compiling():
        for block in model:
            block.compile(backend=backend)
        return run.train(model)


@script(costly=True)
def blocks_compiled_after_sharding(run: Script) -> Any:
    return compiled_after_sharding(run, "eager")


@script(costly=True)
def blocks_compiled_ahead_of_time(run: Script) -> Any:
    return compiled_after_sharding(run, "aot_eager")


@script(costly=True)
def compiled_optimizer_step(run: Script) -> Any:
    model = run.sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    with compiling():
        step = torch.compile(lambda: optimizer.step(), backend="eager")
        for index in range(2):
            loss = run.loss(model, index)
            loss.backward()
            step()
            optimizer.zero_grad()
            seen += [copy_of(loss), weights(model)]
    return seen
