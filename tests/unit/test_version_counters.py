"""An optimizer step increments the version counters of the shards that it updates.

DTensor's operators write local tensors below autograd, which does not increment the counters.
Tensors of a state dict share the counters of their parameters.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from implementations import list_python_calls
from torch.distributed.fsdp import fully_shard as torch_fully_shard

import fsdp_c

_C = importlib.import_module("fsdp_c._C")


def locals_of(model: nn.Module) -> list[Any]:
    return [param._local_tensor for param in model.parameters()]  # type: ignore[attr-defined]


def versions(model: nn.Module) -> list[int]:
    return [local._version for local in locals_of(model)]


def test_step_increments_versions_of_own_shards_only(fake_group: int) -> None:
    optimized, other = (fsdp_c.fully_shard(nn.Linear(8, 8)) for _ in range(2))
    plain = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([{"params": optimized.weight}, {"params": [optimized.bias, plain]}])
    before = versions(optimized), versions(other), plain._version
    optimizer.step()  # no parameter has a gradient: the step's hook increments the versions
    assert versions(optimized) == [version + 1 for version in before[0]]
    assert (versions(other), plain._version) == before[1:]


def test_second_step_runs_one_python_function_of_fsdp_c(fake_group: int) -> None:
    """The function is the hook that checks each optimizer once."""
    model = fsdp_c.fully_shard(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.step()
    before = versions(model)
    assert list_python_calls(optimizer.step) == ["lint_params.py:_before_step"]
    assert versions(model) != before


def test_step_on_shard_created_in_inference_mode_increments_versions_of_others(
    fake_group: int,
) -> None:
    model = fsdp_c.fully_shard(nn.Linear(8, 8))
    with torch.inference_mode():
        model.weight._local_tensor = model.weight._local_tensor.clone()  # type: ignore[union-attr]
    before = model.bias._local_tensor._version  # type: ignore[union-attr]
    torch.optim.SGD(model.parameters()).step()
    assert model.bias._local_tensor._version > before  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("optimizer", "error"),
    [
        (object(), AttributeError),
        (SimpleNamespace(param_groups=3), TypeError),
        (SimpleNamespace(param_groups=[{}]), KeyError),
        (SimpleNamespace(param_groups=[{"params": None}]), TypeError),
    ],
    ids=["no param_groups", "param_groups of int", "group without params", "params of None"],
)
def test_bump_shard_versions_of_object_that_is_not_an_optimizer_raises(
    optimizer: object, error: type[Exception]
) -> None:
    with pytest.raises(error):
        _C.bump_shard_versions(optimizer, (), {})
    with pytest.raises(TypeError, match="an optimizer was expected"):
        _C.bump_shard_versions()


def describe(tensor: Any) -> tuple[Any, ...]:
    local = tensor._local_tensor
    flags = (tensor.requires_grad, tensor.is_leaf, tensor._is_view(), type(tensor), vars(tensor))
    versions = (tensor._version, local._version)
    return (*flags, *versions, local.data_ptr(), local.stride(), local.dtype)


@pytest.mark.parametrize("shard", [torch_fully_shard, fsdp_c.fully_shard], ids=["torch", "fsdp_c"])
def test_tensors_of_state_dict_equal_detached_parameters(fake_group: int, shard: Any) -> None:
    model: Any = shard(nn.Linear(8, 8))
    entry, detached = model.state_dict()["weight"], model.weight.detach()
    with torch.no_grad():
        for tensor in (entry, detached, model.weight):
            tensor.add_(1)
            tensor._local_tensor.add_(1)
    assert describe(entry) == describe(detached)
    assert entry._version == model.weight._version == 3
    assert model.state_dict(keep_vars=True)["weight"] is model.weight
