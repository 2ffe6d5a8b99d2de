"""Scenarios of double backward; each returns the results found and the results expected.

The penalty is that of WGAN-GP: the norm of the gradient of the output with respect to the input.
The expected results are those of the unsharded model, with gradients averaged over the ranks
(``torch_bugs.average``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from behavior import DIM, Api, batch, grads, scenario, weights
from recorded_operators import RecordedOperators
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint as checkpointed
from torch_bugs import MIXED, average, step_by, take_gradients

from fsdp_c import replicate
from fsdp_c._runtime.fsdp_units import reshard_all

Found = dict[str, Any]
Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Curved(nn.Module):
    """A residual block with nonzero second derivatives and an optional inner block."""

    def __init__(self, inner: nn.Module | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.first = nn.Linear(DIM, DIM)
        self.inner = inner or nn.Identity()
        self.second = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.second(self.inner(self.first(self.norm(x)).tanh()))


def curved_model(blocks: int = 3, nested: bool = False) -> nn.Sequential:
    torch.manual_seed(7)
    layers = [Curved(Curved() if nested else None) for _ in range(blocks)]
    return nn.Sequential(*layers, nn.Linear(DIM, 3))


def shard(api: Api, model: nn.Sequential, **kwargs: Any) -> nn.Sequential:
    for block in list(model)[:-1]:
        if isinstance(block.inner, Curved):
            api.fully_shard(block.inner, **kwargs)
        api.fully_shard(block, **kwargs)
    return api.fully_shard(model, **kwargs)


def penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
    return (grad.norm(dim=1) - 1).square().mean()


def loss_and_penalty(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    x = x.clone().requires_grad_()
    output = model(x)
    (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    return output.square().mean() + (grad.norm(dim=1) - 1).square().mean()


def train_both(
    model: nn.Module,
    reference: nn.Module,
    rank: int,
    loss: Loss = loss_and_penalty,
) -> Found:
    """Trains both models for three steps; the last one has no penalty.

    Returns losses, gradients and weights, and the most bytes that stayed unsharded.
    """
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found, expected, max_bytes = [], [], 0
    for step in range(3):
        x = batch(rank, step)
        step_loss = loss if step < 2 else lambda m, x: m(x).square().mean()
        sharded_loss = step_loss(model, x)
        sharded_loss.backward()
        reference_loss = step_loss(reference, x)
        reference_loss.backward()
        averaged = average(take_gradients(reference))
        max_bytes = max(max_bytes, unsharded_bytes(model))
        reshard_all(model)
        found += [sharded_loss.detach(), grads(model)]
        expected += [reference_loss.detach(), averaged]
        step_by(reference, averaged)
        optimizer.step()
        optimizer.zero_grad()
    return {
        "found": [*found, weights(model)],
        "expected": [*expected, weights(reference)],
        "unsharded_bytes": max_bytes,
    }


def unsharded_bytes(model: nn.Module) -> int:
    """Returns the bytes of unsharded parameters that are still allocated."""
    states = [m._get_fsdp_state() for m in model.modules() if hasattr(m, "_get_fsdp_state")]
    return sum(
        param._unsharded_param.untyped_storage().nbytes()
        for state in states
        for group in state._fsdp_param_groups
        for param in group.fsdp_params
    )


@scenario()
def gradient_penalty(api: Api, **kwargs: Any) -> Found:
    return train_both(shard(api, curved_model(), **kwargs), curved_model(), api.rank)


@scenario()
def penalty_without_loss(api: Api) -> Found:
    """Backward enters the graph of the forward inside the units, not at their outputs."""
    return train_both(shard(api, curved_model()), curved_model(), api.rank, penalty)


@scenario()
def penalty_that_always_reshards(api: Api) -> Found:
    return gradient_penalty(api, reshard_after_forward=True)


@scenario()
def penalty_that_reshards_after_backward_only(api: Api) -> Found:
    return gradient_penalty(api, reshard_after_forward=False)


@scenario()
def penalty_that_never_reshards(api: Api) -> Found:
    model = shard(api, curved_model(), reshard_after_forward=False)
    model.set_reshard_after_backward(False)
    return train_both(model, curved_model(), api.rank)


def compare_with_torch(
    api: Api, make: Callable[[], nn.Sequential], accumulated: int = 1, **kwargs: Any
) -> Found:
    """Compares with torch's FSDP2 that never reshards, and so never frees a parameter.

    The post-backward node changes the order of sums, so the plain model may round differently.
    """
    models = shard(api, make(), **kwargs), shard(api.other(), make(), **kwargs)
    models[1].set_reshard_after_forward(False)
    models[1].set_reshard_after_backward(False)
    for model in models:
        for step in range(accumulated):
            model.set_requires_gradient_sync(step + 1 == accumulated)
            loss_and_penalty(model, batch(api.rank, step)).backward()
    max_bytes = unsharded_bytes(models[0])
    reshard_all(models[1])
    return {"found": grads(models[0]), "expected": grads(models[1]), "unsharded_bytes": max_bytes}


@scenario()
def penalty_through_nested_units(api: Api) -> Found:
    return compare_with_torch(api, lambda: curved_model(2, nested=True))


@scenario()
def penalty_in_mixed_precision(api: Api) -> Found:
    return compare_with_torch(api, curved_model, mp_policy=MIXED)


@scenario()
def penalty_with_a_reduce_dtype_and_accumulation(api: Api) -> Found:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    return compare_with_torch(api, curved_model, 3, mp_policy=policy)


@scenario()
def penalty_with_checkpointing_inside(api: Api) -> Found:
    class Recomputed(Curved):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpointed(super().forward, x, use_reentrant=False)

    model = curved_model()
    for block in list(model)[:-1]:
        block.__class__ = Recomputed
    return train_both(shard(api, model), curved_model(), api.rank)


@scenario()
def penalty_with_checkpointing_outside(api: Api) -> Found:
    class Outside(nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self:
                x = checkpointed(layer, x, use_reentrant=False)
            return x

    model = shard(api, Outside(*curved_model()))
    return train_both(model, curved_model(), api.rank)


@scenario()
def penalty_of_wgan_gp(api: Api) -> Found:
    """Runs a step of WGAN-GP: three forwards, the penalty on the second, one backward."""

    def critic(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        first = model(x)
        middle = penalty(model, x + 0.5)
        return first.mean() - model(x - 0.5).mean() + 10 * middle

    return train_both(shard(api, curved_model()), curved_model(), api.rank, critic)


@scenario()
def penalty_on_activations(api: Api) -> Found:
    """The first backward ends at the output of the first block, an activation of the model."""

    def adversarial(model: nn.Sequential, x: torch.Tensor) -> torch.Tensor:
        activations: list[torch.Tensor] = []
        handle = model[0].register_forward_hook(lambda m, args, output: activations.append(output))
        output = model(x)
        handle.remove()
        (grad,) = torch.autograd.grad(output.square().sum(), activations[0], create_graph=True)
        return output.square().mean() + grad.square().mean()

    return train_both(shard(api, curved_model()), curved_model(), api.rank, adversarial)


@scenario()
def backward_with_create_graph(api: Api) -> Found:
    """``backward(create_graph=True)``: each backward reduces, and the gradients accumulate."""
    model, reference = shard(api, curved_model()), curved_model()
    counts = []
    for module in (model, reference):
        x = batch(api.rank).requires_grad_()
        with RecordedOperators() as mode:
            module(x).square().mean().backward(create_graph=True)
            assert x.grad is not None
            grad, x.grad = x.grad, None
            grad.square().sum().backward()
        counts.append(mode.collectives().count("_reduce_scatter_base_"))
    return {
        "found": grads(model),
        "expected": average(take_gradients(reference)),
        "unsharded_bytes": unsharded_bytes(model),
        "reduced": counts[0],
    }


@scenario()
def third_derivatives(api: Api) -> Found:
    def third(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        (first,) = torch.autograd.grad(model(x).square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x, create_graph=True)
        return 1e-3 * second.square().mean()

    return train_both(shard(api, curved_model()), curved_model(), api.rank, third)


@scenario()
def hessian_of_the_outputs(api: Api) -> Found:
    """``torch.autograd.functional``: Hessian and its product with a vector, then training."""
    model, reference = shard(api, curved_model()), curved_model()
    x = batch(api.rank)[0]
    by_model: list[Any] = []
    for module in (model, reference):

        def value(x: torch.Tensor, module: nn.Module = module) -> torch.Tensor:
            return module(x).square().sum()

        product = torch.autograd.functional.hvp(value, x, torch.ones_like(x))
        by_model.append([torch.autograd.functional.hessian(value, x), *product])
    found = train_both(model, reference, api.rank)
    found["found"].append(by_model[0])
    found["expected"].append(by_model[1])
    return found


@scenario()
def one_reduction_for_each_unit(api: Api) -> Found:
    model = shard(api, curved_model())
    x = batch(api.rank).requires_grad_()
    output = model(x)
    with RecordedOperators() as first:
        (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    with RecordedOperators() as second:
        (output.square().mean() + grad.square().sum()).backward()
    return {"first": Counter(first.collectives()), "second": Counter(second.collectives())}


@scenario()
def gradients_of_shards(api: Api) -> Found:
    """Sharded parameters are in no autograd graph, so ``autograd.grad`` raises, as in torch."""
    model = shard(api, curved_model(), reshard_after_forward=True)
    loss = model(batch(api.rank)).square().mean()
    try:
        torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    except RuntimeError as error:
        return {"error": str(error)}
    return {}


@scenario()
def error_between_the_two_backwards(api: Api) -> Found:
    """A reset drops the gradients of the first backward; later steps are ordinary."""
    model = shard(api, curved_model())
    x = batch(api.rank, 9).requires_grad_()
    (grad,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)

    def fail(grad: torch.Tensor) -> None:
        raise ValueError("in the second backward")

    grad = grad * 1
    grad.register_hook(fail)
    try:
        (grad * 2).sum().backward()
    except ValueError:
        model.reset_iter_state()
    model.zero_grad()
    return train_both(model, curved_model(), api.rank)


@scenario()
def penalty_with_manual_finalization(api: Api) -> Found:
    model, reference = shard(api, curved_model()), curved_model()
    model.set_manual_backward_finalization(True)
    model.set_keep_unsharded_storage(True)
    model.set_requires_gradient_sync(False)
    loss_and_penalty(model, batch(api.rank)).backward()
    loss_and_penalty(reference, batch(api.rank)).backward()
    model.set_requires_gradient_sync(True)
    model.finalize_backward()
    model.set_keep_unsharded_storage(False)
    return {
        "found": grads(model),
        "expected": average(take_gradients(reference)),
        "unsharded_bytes": unsharded_bytes(model),
    }


@scenario()
def penalty_of_replicated_units(api: Api) -> Found:
    model, reference = curved_model(), curved_model()
    for block in list(model)[:-1]:
        replicate(block)
    replicate(model)
    loss_and_penalty(model, batch(api.rank)).backward()
    loss_and_penalty(reference, batch(api.rank)).backward()
    return {"found": grads(model), "expected": average(take_gradients(reference))}


@scenario(4)
def penalty_with_a_smaller_group(api: Api) -> Found:
    return gradient_penalty(api, reshard_after_forward=2)


@scenario(4)
def penalty_with_replicas(api: Api) -> Found:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    return gradient_penalty(api, mesh=mesh)


@scenario(1)
def penalty_on_one_rank(api: Api) -> Found:
    return gradient_penalty(api)
