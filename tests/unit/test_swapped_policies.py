"""Policies that are put in the place of others after the call count as they do in torch."""

from __future__ import annotations

from typing import Any

import pytest
import releases
import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs

from fsdp_c import fully_shard as ours

HALF = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float64)


def swapped(shard: Any, where: str, used: bool) -> list[Any]:
    torch.manual_seed(0)
    seen: list[Any] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].register_forward_pre_hook(lambda module, args: seen.append(args[0].dtype))
    shard(model)
    x = torch.ones(2, 4)
    if used:
        model(x).sum().backward()
    state = model._get_fsdp_state()
    if "group" in where:
        for group in state._fsdp_param_groups:
            group.mp_policy = HALF
    if "state" in where:
        state._mp_policy = HALF
    found = []
    for _ in range(2):
        try:
            output = model(x)
            output.sum().backward()
            found += [output.dtype, output.tolist()]
        except RuntimeError as error:
            found.append(str(error))
            model.reset_iter_state()
    found += [p.grad.to_local().tolist() for p in model.parameters() if p.grad is not None]
    return [found, seen]


@pytest.mark.torch("2.13")
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("where", ["state", "group", "state and group"])
def test_another_policy(fake_group: int, where: str, used: bool) -> None:
    if releases.has("2.15") and (used or where != "state"):
        pytest.skip("from 2.15 on parameters have policies, groups none; resets drop gradients")
    assert swapped(ours, where, used) == swapped(torchs, where, used)
