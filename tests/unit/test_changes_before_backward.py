"""Parameters that change between forward and backward get a gradient, or backward raises.

A conversion makes new unsharded parameters. On one rank, an unsharded parameter is an alias of its
shard, so a replaced shard makes a new one, too. The graph accumulates into the former parameters.
A change in place changes an alias as well, so the former values are lost.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group

import fsdp_c

LOST = r"parameter '1.bias' was converted or replaced between forward and backward"
CHANGED = r"parameter 'weight' was changed in place between forward and backward"


def make_model() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fsdp_c.fully_shard(layer)
    return fsdp_c.fully_shard(model)


def run_forward(model: Any) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(2, 4, dtype=model[0].weight.dtype)).square().sum()
    return loss


def has_gradients(model: Any) -> bool:
    return all(param.grad is not None for param in model.parameters())


def assign_state(model: Any) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def replace_memory(model: Any) -> None:
    model.to_empty(device="cpu")
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(0.5)


def freeze_weights(model: Any) -> None:
    for layer in model:
        layer.weight.requires_grad_(False)


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.double])
@pytest.mark.parametrize("group", ["fake_group", "single_group"])
def test_dtype_conversion_of_model_between_forward_and_backward_raises(
    group: str, convert: Callable[[nn.Module], Any], request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue(group)
    model = make_model()
    freeze_weights(model)  # backward then reads no weight
    loss = run_forward(model)
    convert(model)
    with pytest.raises(RuntimeError, match=LOST):
        loss.backward()
    run_forward(model).backward()
    assert all(layer.bias.grad is not None for layer in model)


@pytest.mark.parametrize("replace", [assign_state, replace_memory])
def test_backward_with_world_size_1_after_shard_was_replaced_raises(
    single_group: int, replace: Callable[[Any], None]
) -> None:
    model = make_model()
    loss = run_forward(model)
    replace(model)
    with pytest.raises(RuntimeError, match=LOST.replace("bias", "weight")):
        loss.backward()
    run_forward(model).backward()
    assert has_gradients(model)


@pytest.mark.parametrize("replace", [assign_state, replace_memory])
def test_shard_replaced_between_forward_and_backward_is_trained_on_several_ranks(
    fake_group: int, replace: Callable[[Any], None]
) -> None:
    model = make_model()
    loss = run_forward(model)
    replace(model)
    loss.backward()
    assert has_gradients(model)


def test_frozen_shard_replaced_between_forward_and_backward_is_accepted(single_group: int) -> None:
    model = make_model()
    model[0].requires_grad_(False)
    model[1].weight.requires_grad_(False)
    loss = run_forward(model)
    with torch.no_grad():
        assign_state(model[0])
    loss.backward()
    assert model[1].bias.grad is not None


def test_dtype_conversion_of_model_after_forward_without_backward_is_accepted(
    single_group: int,
) -> None:
    model = make_model()
    run_forward(model)
    model.double()
    run_forward(model).backward()
    assert has_gradients(model)
    assert model[0].weight.grad.dtype is torch.float64


ShardFunction = Callable[[nn.Module], Any]
KEEP_UNSHARDED: list[ShardFunction] = [
    fsdp_c.replicate,
    functools.partial(fsdp_c.fully_shard, reshard_after_forward=False),
]


def run_step(params: list[nn.Parameter]) -> None:
    for param in params:
        param.grad = torch.ones_like(param)
    torch.optim.SGD(params, lr=0.5).step()


def decay(params: list[nn.Parameter]) -> None:
    with torch.no_grad():
        for param in params:
            param.mul_(0.5)


def make_layers(shard: ShardFunction) -> tuple[Any, list[nn.Parameter]]:
    """Returns a model of two sharded layers, and its sharded parameters."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        shard(layer)
    return model, list(model.parameters())


@pytest.mark.parametrize("change", [run_step, decay])
@pytest.mark.parametrize("shard", KEEP_UNSHARDED)
def test_backward_after_aliased_parameters_changed_in_place_raises(
    single_group: int, shard: ShardFunction, change: Callable[[list[nn.Parameter]], None]
) -> None:
    model, params = make_layers(shard)
    loss = run_forward(model)
    change(params[:2])
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()
    run_forward(model).backward()
    assert has_gradients(model)


def test_backward_after_frozen_aliased_parameter_changed_in_place_raises(single_group: int) -> None:
    model, params = make_layers(fsdp_c.replicate)
    params[0].requires_grad_(False)
    loss = run_forward(model)
    decay(params[:1])
    with pytest.raises(RuntimeError, match=CHANGED):
        loss.backward()


@pytest.mark.parametrize("shard", KEEP_UNSHARDED)
def test_change_in_place_after_the_backward_or_before_the_forward_is_accepted(
    single_group: int, shard: ShardFunction
) -> None:
    model, params = make_layers(shard)
    for _ in range(3):
        run_forward(model).backward()
        run_step(params)
        decay(params)
    assert has_gradients(model)


@pytest.mark.parametrize("shard", [fsdp_c.fully_shard, *KEEP_UNSHARDED])
def test_change_in_place_before_forward_with_patched_all_gather_is_accepted(
    single_group: int, shard: ShardFunction, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, params = make_layers(shard)
    run_forward(model).backward()
    gather = param_group.foreach_all_gather
    replacement = functools.wraps(gather)(functools.partial(gather))
    monkeypatch.setattr(param_group, "foreach_all_gather", replacement)
    for _ in range(2):
        decay(params)
        run_forward(model).backward()
    assert has_gradients(model)


def test_in_place_change_of_resharded_parameters_is_accepted_as_in_torch(single_group: int) -> None:
    """Backward gathers the parameters again."""
    model, params = make_layers(functools.partial(fsdp_c.fully_shard, reshard_after_forward=True))
    loss = run_forward(model)
    decay(params)
    loss.backward()
    assert has_gradients(model)


def test_backward_after_change_of_cast_parameters_uses_values_of_the_forward(
    single_group: int,
) -> None:
    """The unsharded parameters are copies, not aliases."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    gradients = []
    for changes in (False, True):
        model, params = make_layers(functools.partial(fsdp_c.replicate, mp_policy=policy))
        loss = run_forward(model)
        if changes:
            decay(params)
        loss.backward()
        gradients.append([param.grad for param in model.parameters()])
    assert all(map(torch.equal, *gradients))
