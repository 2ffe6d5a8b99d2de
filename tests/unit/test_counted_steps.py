"""An optimizer's step counts as a write to its shards: it writes them below what counts."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn

import fsdp_c

_C = importlib.import_module("fsdp_c._C")


def locals_of(model: nn.Module) -> list[Any]:
    return [param._local_tensor for param in model.parameters()]  # type: ignore[attr-defined]


def versions(model: nn.Module) -> list[int]:
    return [local._version for local in locals_of(model)]


def test_a_step_counts_for_the_optimizers_own_shards_only(fake_group: int) -> None:
    mine, others = (fsdp_c.fully_shard(nn.Linear(8, 8)) for _ in range(2))
    plain = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([{"params": mine.weight}, {"params": [mine.bias, plain]}])
    before = versions(mine), versions(others), plain._version
    optimizer.step()  # nothing has a gradient: what counts is the hook
    assert versions(mine) == [version + 1 for version in before[0]]
    assert (versions(others), plain._version) == before[1:]


def test_no_python_frame_of_ours_counts(fake_group: int) -> None:
    """All there is, after the first step, is one that has seen the optimizer already."""
    model = fsdp_c.fully_shard(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.step()
    before, called = versions(model), []

    def profile(frame: Any, event: str, arg: Any) -> None:
        name = frame.f_code.co_filename
        if event == "call" and "fsdp_c" in name and "tests" not in name:
            called.append(f"{Path(name).name}:{frame.f_code.co_name}")

    sys.setprofile(profile)
    try:
        optimizer.step()
    finally:
        sys.setprofile(None)
    assert called == ["suspicions.py:_before_step"] and versions(model) != before


def test_shards_made_in_inference_mode_have_no_counter(fake_group: int) -> None:
    model = fsdp_c.fully_shard(nn.Linear(8, 8))
    with torch.inference_mode():
        model.weight._local_tensor = model.weight._local_tensor.clone()  # type: ignore[union-attr]
    torch.optim.SGD(model.parameters()).step()
    assert model.bias._local_tensor._version > 0  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("optimizer", "error"),
    [
        (object(), AttributeError),
        (SimpleNamespace(param_groups=3), TypeError),
        (SimpleNamespace(param_groups=[{}]), KeyError),
        (SimpleNamespace(param_groups=[{"params": None}]), TypeError),
    ],
    ids=["nothing", "a number", "no params", "None"],
)
def test_what_is_no_optimizer_is_an_error(optimizer: object, error: type[Exception]) -> None:
    with pytest.raises(error):
        _C.count_step(optimizer, (), {})
    with pytest.raises(TypeError, match="an optimizer was expected"):
        _C.count_step()
