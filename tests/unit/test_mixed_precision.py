"""``fsdp_c.MixedPrecisionPolicy`` compared with torch's, and ``grad_dtype`` of parameters."""

from __future__ import annotations

import dataclasses

import pytest
import releases
import torch
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn

import fsdp_c

FIELDS = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def keep_dtype(param: torch.nn.Parameter) -> torch.dtype | None:
    return param.dtype


def test_policy_without_override_fn_equals_policy_of_torch() -> None:
    policy = fsdp_c.MixedPrecisionPolicy(**FIELDS)
    torch_policy = torch_fsdp.MixedPrecisionPolicy(**FIELDS)
    assert policy == torch_policy and torch_policy == policy
    assert hash(policy) == hash(torch_policy)
    assert policy != torch_fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    assert policy != "a policy"


def test_policy_with_override_fn_equals_only_policy_with_same_function() -> None:
    policy = fsdp_c.MixedPrecisionPolicy(**FIELDS, param_dtype_override_fn=keep_dtype)
    assert policy == fsdp_c.MixedPrecisionPolicy(**FIELDS, param_dtype_override_fn=keep_dtype)
    assert policy != fsdp_c.MixedPrecisionPolicy(**FIELDS, param_dtype_override_fn=lambda _: None)
    assert policy != torch_fsdp.MixedPrecisionPolicy(**FIELDS)
    assert torch_fsdp.MixedPrecisionPolicy(**FIELDS) != policy


def test_policy_is_instance_of_torch_policy_and_supports_replace() -> None:
    policy = fsdp_c.MixedPrecisionPolicy(**FIELDS, param_dtype_override_fn=keep_dtype)
    assert isinstance(policy, torch_fsdp.MixedPrecisionPolicy)
    replaced = dataclasses.replace(policy, reduce_dtype=None)
    assert replaced.param_dtype_override_fn is keep_dtype
    assert replaced.reduce_dtype is None


# ---- torch 2.15's grad_dtype ---------------------------------------------------------------------


def set_grad_dtype(param: torch.Tensor, dtype: torch.dtype | None) -> None:
    """Sets ``param.grad_dtype`` as torch 2.15 does, including the flag that FSDP reads."""
    param.grad_dtype = dtype
    if not releases.has("2.15"):
        param._has_grad_dtype_override = True


@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_fully_shard_of_parameter_with_other_grad_dtype_raises(
    fake_group: int, dtype: torch.dtype | None
) -> None:
    plain = fsdp_c.fully_shard(nn.Linear(4, 4, dtype=torch.bfloat16))
    layer = nn.Linear(4, 4, dtype=torch.bfloat16)
    set_grad_dtype(layer.weight, dtype)
    with pytest.raises(NotImplementedError, match=f"does not follow grad_dtype={dtype}: leave it"):
        fsdp_c.fully_shard(layer)
    assert type(layer) is nn.Linear and isinstance(plain, torch_fsdp.FSDPModule)


def test_forward_after_setting_other_grad_dtype_raises(fake_group: int) -> None:
    layer = fsdp_c.fully_shard(nn.Linear(4, 4, dtype=torch.bfloat16))
    set_grad_dtype(layer.weight, torch.float32)
    with pytest.raises(NotImplementedError, match=r"does not follow grad_dtype=torch.float32"):
        layer(torch.ones(2, 4, dtype=torch.bfloat16))


def test_grad_dtype_equal_to_dtype_of_parameter_trains(fake_group: int) -> None:
    layer = nn.Linear(4, 4)
    set_grad_dtype(layer.weight, torch.float32)
    fsdp_c.fully_shard(layer)(torch.ones(2, 4)).sum().backward()
    assert layer.weight.grad.dtype is torch.float32
