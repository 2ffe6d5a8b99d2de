"""What a parameter carries around keeps no deleted model alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn as nn

import fsdp_c


class Scaled(nn.Module):
    """Returns its own parameter beside the output, as a loss with learned weights does."""

    def __init__(self, noted: bool) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))
        if noted:
            for param in self.parameters():
                param.owner = self  # type: ignore[attr-defined]
                param.note = "kept"  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x) * self.scale, self.scale


def step(model: nn.Module) -> None:
    output, scale = model(torch.ones(2, 4))
    (output.square().sum() + scale.exp().sum()).backward()


def unsharded(model: Any) -> list[Any]:
    [group] = model._get_fsdp_state()._fsdp_param_groups
    return [param._unsharded_param for param in group.fsdp_params]


@pytest.mark.parametrize("noted", [True, False])
@pytest.mark.parametrize("shard", [fsdp_c.fully_shard, fsdp_c.replicate])
def test_a_trained_model_is_collected(fake_group: int, shard: Any, noted: bool) -> None:
    model = shard(Scaled(noted))
    for _ in range(3):
        step(model)
    parts = [weakref.ref(model), weakref.ref(model._get_fsdp_state())]
    parts += [weakref.ref(param) for param in unsharded(model)]
    del model
    gc.collect()
    assert [part() is None for part in parts] == [True] * 5


def test_notes_on_parameters_stay_but_for_modules(fake_group: int) -> None:
    model: Any = fsdp_c.fully_shard(Scaled(True))
    assert all(param.owner is model and param.note == "kept" for param in model.parameters())
    step(model)
    assert all(param.note == "kept" for param in unsharded(model))


def test_a_returned_parameter_gathers_for_backward_and_is_hooked_once(single_group: int) -> None:
    model: Any = fsdp_c.fully_shard(Scaled(False), reshard_after_forward=True)
    reference = Scaled(False)
    for _ in range(3):
        model.zero_grad()
        reference.zero_grad()
        step(model)
        step(reference)
        for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
            assert torch.equal(ours.grad.to_local(), expected.grad)
    assert [len(p._backward_hooks or ()) for p in unsharded(model)] == [0, 0, 1]
