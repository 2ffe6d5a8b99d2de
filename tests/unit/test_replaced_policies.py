"""Mixed-precision policies replaced after ``fully_shard`` have the same effect as in torch."""

from __future__ import annotations

from typing import Any

import pytest
import releases
import torch
import torch.nn as nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from fsdp_c import fully_shard

MIXED = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float64)


def train_with_replaced_policy(shard: Any, owners: str, after_step: bool) -> list[Any]:
    """Replaces the policies of the state or the groups, after a step if ``after_step``, and trains.

    Returns outputs or errors, gradients, and the dtypes of the first layer's inputs.
    """
    torch.manual_seed(0)
    input_dtypes: list[Any] = []
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].register_forward_pre_hook(lambda module, args: input_dtypes.append(args[0].dtype))
    shard(model)
    x = torch.ones(2, 4)
    if after_step:
        model(x).sum().backward()
    state = model._get_fsdp_state()
    if "group" in owners:
        for group in state._fsdp_param_groups:
            group.mp_policy = MIXED
    if "state" in owners:
        state._mp_policy = MIXED
    results = []
    for _ in range(2):
        try:
            output = model(x)
            output.sum().backward()
            results += [output.dtype, output.tolist()]
        except RuntimeError as error:
            results.append(str(error))
            model.reset_iter_state()
    results += [p.grad.to_local().tolist() for p in model.parameters() if p.grad is not None]
    return [results, input_dtypes]


@pytest.mark.torch("2.13")
@pytest.mark.parametrize("after_step", [False, True])
@pytest.mark.parametrize("owners", ["state", "group", "state and group"])
def test_replaced_policy_gives_results_of_torch(
    fake_group: int, owners: str, after_step: bool
) -> None:
    if releases.has("2.15") and (after_step or owners != "state"):
        pytest.skip(
            "since 2.15 parameters have the policies instead of groups, and resets drop gradients"
        )
    expected = train_with_replaced_policy(torch_fully_shard, owners, after_step)
    assert train_with_replaced_policy(fully_shard, owners, after_step) == expected
