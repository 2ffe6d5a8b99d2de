"""Scenarios of training: evaluation, reductions, optimizers, checkpointing, compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from behavior import (
    DIM,
    Api,
    batch,
    blocks_and_head,
    collectives,
    full_value,
    grads,
    scenario,
    shard,
    train,
    weights,
)
from releases import groups_of
from torch._dynamo.testing import CompileCounter
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from toy_models import Checkpointed, ResidualBlock

# ---- an evaluation between backward and the optimizer's step ----


Step = Callable[[], Any]
MakeStep = Callable[[nn.Module], Step]


def optimizer_step(kind: type[torch.optim.Optimizer], **options: Any) -> MakeStep:
    """Returns a function that makes an optimizer of a model, and returns its ``step``."""

    def make(model: nn.Module) -> Step:
        return kind(model.parameters(), lr=0.5, **options).step

    return make


def user_step(write: Callable[[Any, Any], Any]) -> MakeStep:
    """Returns a function that makes an SGD step. ``write(param, change)`` subtracts the change."""

    def make(model: nn.Module) -> Step:
        params = list(model.parameters())

        def step() -> None:
            with torch.no_grad():
                for param in params:
                    write(param, 0.5 * param.grad)

        return step

    return make


STEPS: dict[str, MakeStep] = {
    "sgd foreach": optimizer_step(torch.optim.SGD, foreach=True),
    "sgd": optimizer_step(torch.optim.SGD, foreach=False),
    "adamw foreach": optimizer_step(torch.optim.AdamW, foreach=True),
    "adamw fused": optimizer_step(torch.optim.AdamW, fused=True),
    "parameter": user_step(lambda param, change: param.sub_(change)),
    "to_local": user_step(lambda param, change: param.to_local().sub_(change.to_local())),
    "copy_": user_step(lambda param, change: param.copy_(param - change)),
    "_local_tensor": user_step(lambda param, change: param._local_tensor.sub_(change.to_local())),
}


def train_with_evaluation(
    api: Api,
    mode: Any,
    make_step: MakeStep = STEPS["sgd foreach"],
    after: bool = False,
    prefetch: bool = False,
    **kwargs: Any,
) -> dict[str, list[float]]:
    """Trains three steps with an evaluation in ``mode`` before each optimizer step (None: without).

    ``after``: evaluates after each step as well. ``prefetch``: the forward of the last block
    prefetches the first block.
    """
    model = shard(api, blocks_and_head(), **kwargs)
    if prefetch:
        model[-2].set_modules_to_forward_prefetch([model[0]])
    step = make_step(model)
    params = list(model.parameters())

    def evaluate() -> float:
        with mode or torch.no_grad():
            return model(batch(api.rank, 50)).square().mean().item()

    results: dict[str, list[float]] = {"losses": [], "after": []}
    for index in range(3):
        loss = model(batch(api.rank, index)).square().mean()
        loss.backward()
        if mode is not None:
            evaluate()
        step()
        for param in params:
            param.grad = None
        if after:
            results["after"].append(evaluate())
        results["losses"].append(loss.item())
    return results


@scenario()
def evaluation_before_step(api: Api) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, make_step in STEPS.items():
        results[name] = {
            "without": train_with_evaluation(api, None, make_step)["losses"],
            "with": train_with_evaluation(api, torch.no_grad(), make_step)["losses"],
        }
    for reshard in (True, False):
        results[f"reshard {reshard}"] = {
            "without": train_with_evaluation(api, None)["losses"],
            "with": train_with_evaluation(api, torch.no_grad(), reshard_after_forward=reshard)[
                "losses"
            ],
        }
    results["prefetched"] = {
        "without": train_with_evaluation(api, None)["losses"],
        "with": train_with_evaluation(
            api, torch.no_grad(), prefetch=True, reshard_after_forward=True
        )["losses"],
    }
    results["inference_mode"] = {
        "without": train_with_evaluation(api, None)["losses"],
        "with": train_with_evaluation(api, torch.inference_mode())["losses"],
    }
    return results


@scenario()
def evaluations_around_a_step(api: Api) -> dict[str, Any]:
    """Evaluates after each optimizer step only, and before and after each."""
    return {
        "after": train_with_evaluation(api, None, after=True),
        "around": train_with_evaluation(api, torch.no_grad(), after=True),
    }


@scenario()
def gathers_of_evaluations(api: Api) -> dict[str, list[int]]:
    """Counts all-gathers of evaluations. Units that stay unsharded gather once after a step."""
    results: dict[str, list[int]] = {}
    for reshard in (None, True, False):
        model = shard(api, blocks_and_head(), reshard_after_forward=reshard)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        counts = results[f"reshard {reshard}"] = []
        for index in range(2):
            model(batch(api.rank, index)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            for _ in range(3):
                with torch.no_grad():
                    run = functools.partial(model, batch(api.rank))
                    counts.append(collectives(run).total())
    return results


def train_after_evaluation(api: Api, reshard: bool | None, inference_first: bool) -> list[Any]:
    """Evaluates, then trains two steps with an evaluation before each optimizer step."""
    model = shard(api, blocks_and_head(), reshard_after_forward=reshard)
    params = list(model.parameters())
    first = torch.inference_mode() if inference_first else torch.no_grad()
    with first:
        model(batch(api.rank))
    results: list[Any] = []
    for index in range(2):
        loss = model(batch(api.rank, index)).square().mean()
        loss.backward()
        with torch.no_grad():
            model(batch(api.rank, 9))
            for param in params:
                param.to_local().sub_(0.5 * param.grad.to_local())
        results += [loss.item(), [full_value(param.grad) for param in params]]
        for param in params:  # not model.zero_grad(): the model may be unsharded now
            param.grad = None
    return results


@scenario()
def first_forward_in_inference_mode(api: Api) -> list[Any]:
    return [train_after_evaluation(api, reshard, True) for reshard in (None, True, False)]


@scenario()
def first_forward_without_grad(api: Api) -> list[Any]:
    return [train_after_evaluation(api, True, False)]


# ---- the arithmetic of reductions ----


def local_gradients(api: Api) -> list[dict[str, torch.Tensor]]:
    """Returns each rank's gradients of the unsharded model."""
    model = blocks_and_head()
    model(batch(api.rank)).square().mean().backward()
    results: list[Any] = [None] * api.world
    dist.all_gather_object(results, {name: p.grad for name, p in model.named_parameters()})
    return results


def reduce_gradients(api: Api, configure: Any, **policy: Any) -> dict[str, torch.Tensor | None]:
    model = shard(api, blocks_and_head(), mp_policy=MixedPrecisionPolicy(**policy))
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            configure(module)
    model(batch(api.rank)).square().mean().backward()
    return grads(model)


def set_divide_factor(value: float) -> Any:
    return lambda module: module.set_gradient_divide_factor(value)


def force_sum(module: Any) -> None:
    module.set_force_sum_reduction_for_comms(True)


@scenario()
def divide_factor(api: Api) -> dict[str, Any]:
    return {
        "local": local_gradients(api),
        4: reduce_gradients(api, set_divide_factor(4.0)),
        3: reduce_gradients(api, set_divide_factor(3.0)),
        1: reduce_gradients(api, set_divide_factor(1.0)),
    }


@scenario()
def divide_factor_of_the_world_size(api: Api) -> Any:
    return reduce_gradients(api, set_divide_factor(float(api.world)))


@scenario()
def forced_sums(api: Api) -> list[Any]:
    def both(module: Any) -> None:
        force_sum(module)
        module.set_gradient_divide_factor(3.0)

    return [
        reduce_gradients(api, force_sum),
        reduce_gradients(api, both),
        reduce_gradients(api, force_sum, reduce_dtype=torch.bfloat16),
        reduce_gradients(api, both, param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
    ]


@scenario()
def reductions_in_fp16(api: Api) -> list[Any]:
    def nothing(module: Any) -> None:
        pass

    half = {"reduce_dtype": torch.float16}
    return [
        reduce_gradients(api, nothing, **half),
        reduce_gradients(api, set_divide_factor(3.0), **half),
        reduce_gradients(api, set_divide_factor(8.0), **half),
        reduce_gradients(api, set_divide_factor(1.0), **half),
        reduce_gradients(api, nothing, param_dtype=torch.float16),
        reduce_gradients(api, force_sum, param_dtype=torch.float16, reduce_dtype=torch.float32),
    ]


# ---- optimizers ----


@scenario()
def optimizers(api: Api) -> dict[str, Any]:
    results = {}
    for name, options in {
        "foreach": {"foreach": True},
        "fused": {"fused": True},
        "single": {"foreach": False},
        "amsgrad": {"foreach": True, "amsgrad": True, "weight_decay": 0.1},
    }.items():
        model = shard(api, blocks_and_head())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, **options)
        results[name] = train(model, api.rank, 3, optimizer)
    return results


@scenario()
def optimizer_in_backward(api: Api) -> dict[str, Any]:
    """A post-accumulate hook of each parameter runs its own optimizer."""
    model = shard(api, blocks_and_head())
    calls: list[str] = []
    by_param = {p: torch.optim.AdamW([p], lr=0.05) for p in model.parameters()}
    names = {p: name for name, p in model.named_parameters()}

    def step(param: torch.Tensor) -> None:
        calls.append(names[param])
        assert type(param.grad).__name__ == "DTensor"
        by_param[param].step()
        by_param[param].zero_grad()

    handles = [p.register_post_accumulate_grad_hook(step) for p in model.parameters()]
    losses = []
    for index in range(3):
        loss = model(batch(api.rank, index)).square().mean()
        loss.backward()
        losses.append(loss.item())
    for handle in handles:
        handle.remove()
    model(batch(api.rank, 9)).square().mean().backward()
    return {"losses": losses, "calls": calls, "weights": weights(model), "grads": grads(model)}


@scenario()
def clipped_gradients(api: Api) -> list[Any]:
    model = shard(api, blocks_and_head())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    record: list[Any] = []
    for step in range(3):
        model(batch(api.rank, step)).square().mean().backward()
        record.append(full_value(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
    return [*record, weights(model)]


# ---- activation checkpointing, several forwards, retained graphs ----


def input_with_grad(api: Api, step: int = 0) -> torch.Tensor:
    """Reentrant checkpoints need an input that requires grad."""
    return batch(api.rank, step).requires_grad_()


def train_checkpointed(api: Api, model: nn.Module) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    record: list[Any] = []
    for step in range(3):
        x = input_with_grad(api, step)
        loss = model(x).square().mean()
        loss.backward()
        record += [loss.item(), x.grad, grads(model)]
        optimizer.step()
        optimizer.zero_grad()
    return [*record, weights(model)]


@scenario()
def activation_checkpointing(api: Api) -> dict[str, Any]:
    results: dict[str, Any] = {}
    for reentrant in (False, True):
        kind = "reentrant" if reentrant else "nonreentrant"
        impl = CheckpointImpl.REENTRANT if reentrant else CheckpointImpl.NO_REENTRANT
        for reshard in (True, False):
            torch.manual_seed(3)
            model = nn.Sequential(
                *(Checkpointed(ResidualBlock(), reentrant) for _ in range(3)), nn.Linear(DIM, 3)
            )
            shard(api, model, reshard_after_forward=reshard)
            results[f"{kind}, inside, reshard {reshard}"] = train_checkpointed(api, model)

            # fully_shard(checkpoint(block)): the wrapper module is sharded
            torch.manual_seed(3)
            blocks = [checkpoint_wrapper(ResidualBlock(), checkpoint_impl=impl) for _ in range(3)]
            model = nn.Sequential(*blocks, nn.Linear(DIM, 3))
            shard(api, model, reshard_after_forward=reshard)
            results[f"{kind}, wrapper sharded, reshard {reshard}"] = train_checkpointed(api, model)

            # checkpoint(fully_shard(block)): recomputation runs the hooks of the module
            torch.manual_seed(3)
            inner = [
                api.fully_shard(ResidualBlock(), reshard_after_forward=reshard) for _ in range(3)
            ]
            model = nn.Sequential(
                *(checkpoint_wrapper(b, checkpoint_impl=impl) for b in inner), nn.Linear(DIM, 3)
            )
            api.fully_shard(model, reshard_after_forward=reshard)
            results[f"{kind}, sharded inside, reshard {reshard}"] = train_checkpointed(api, model)
    return results


@scenario()
def several_forwards(api: Api) -> list[Any]:
    """Runs two and three forwards before one backward; then separate backwards."""
    model = shard(api, blocks_and_head())
    record: list[Any] = []
    for count in (2, 3):
        loss = sum(model(batch(api.rank, step)).square().mean() for step in range(count))
        loss.backward()
        record += [loss.item(), grads(model)]
    first = model(batch(api.rank, 5)).square().mean()
    second = model(batch(api.rank, 6)).square().mean()
    first.backward()
    record.append(grads(model))
    second.backward()
    return [*record, grads(model), *train(model, api.rank, 1)]


def training_states(model: nn.Module) -> list[str]:
    results = []
    for module in model.modules():
        if hasattr(module, "_get_fsdp_state"):
            state = module._get_fsdp_state()
            results.append(state._training_state.name)
            results += [
                f"{g._training_state.name} {g._sharded_state.name}" for g in groups_of(state)
            ]
    return results


@scenario()
def kept_graphs(api: Api) -> dict[str, Any]:
    """Calls backward(retain_graph=True) twice, then backward() once."""
    results: dict[str, Any] = {}
    for reshard in (None, True, False):
        model = shard(api, blocks_and_head(), reshard_after_forward=reshard)
        loss = model(batch(api.rank)).square().mean()
        gradients, states = [], []
        for retain in (True, True, False):
            loss.backward(retain_graph=retain)
            gradients.append(grads(model))
            states.append(training_states(model))
        results[f"reshard {reshard}"] = {
            "gradients": gradients,
            "states": states,
            "trained": train(model, api.rank, 1),
        }
    return results


@scenario()
def gradients_of_inputs(api: Api) -> dict[str, Any]:
    """Calls ``autograd.grad`` of inputs; parameters get no gradient."""
    model = shard(api, blocks_and_head())
    x = input_with_grad(api)
    (gradient,) = torch.autograd.grad(model(x).square().mean(), (x,))
    results = {"gradient": gradient, "states": training_states(model), "grads": grads(model)}
    return results | {"after": train(model, api.rank, 2)}


@scenario()
def forwards_without_backward(api: Api) -> list[Any]:
    """Runs forwards in training mode without a backward."""
    model = shard(api, blocks_and_head())
    for step in range(3):
        model(batch(api.rank, step))
    record: list[Any] = [training_states(model)]
    return record + train(model, api.rank, 2)


# ---- torch.compile ----


def run_compiled(run: Callable[[str | Callable[..., Any]], Any]) -> dict[str, Any]:
    """Returns run(backend) for the eager backend and for a backend that counts graphs."""
    torch._dynamo.reset()
    results = {"eager": run("eager")}
    torch._dynamo.reset()
    counter = CompileCounter()
    return results | {"counted": run(counter), "graphs": counter.frame_count}


@scenario()
def compiled_blocks(api: Api) -> dict[str, Any]:
    """Each block is compiled, then sharded."""

    def run(backend: Any) -> list[Any]:
        model = blocks_and_head()
        for block in list(model)[:-1]:
            block.compile(backend=backend)
        return train(shard(api, model), api.rank, 3)

    return run_compiled(run)


@scenario()
def compiled_model(api: Api) -> dict[str, Any]:
    """Compiles the sharded model: the graph breaks at the hooks."""

    def run(backend: Any) -> list[Any]:
        model = shard(api, blocks_and_head())
        return train(model, api.rank, 3, forward=torch.compile(model, backend=backend))

    return run_compiled(run)


@scenario()
def uncompiled(api: Api) -> list[Any]:
    return train(shard(api, blocks_and_head()), api.rank, 3)
