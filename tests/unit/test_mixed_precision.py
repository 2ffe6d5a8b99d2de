"""``fsdp_c.MixedPrecisionPolicy`` beside torch's: a policy without our addition is torch's."""

from __future__ import annotations

import dataclasses

import pytest
import releases
import torch
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn

import fsdp_c

FIELDS = {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}


def keep(param: torch.nn.Parameter) -> torch.dtype | None:
    return param.dtype


def test_without_the_function_it_equals_torchs() -> None:
    ours, stock = fsdp_c.MixedPrecisionPolicy(**FIELDS), torch_fsdp.MixedPrecisionPolicy(**FIELDS)
    assert ours == stock and stock == ours
    assert hash(ours) == hash(stock)
    assert ours != torch_fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    assert ours != "a policy"


def test_with_the_function_it_equals_only_one_with_the_same() -> None:
    ours = fsdp_c.MixedPrecisionPolicy(**FIELDS, param_dtype_override_fn=keep)
    assert ours == fsdp_c.MixedPrecisionPolicy(**FIELDS, param_dtype_override_fn=keep)
    assert ours != fsdp_c.MixedPrecisionPolicy(**FIELDS, param_dtype_override_fn=lambda _: None)
    assert ours != torch_fsdp.MixedPrecisionPolicy(**FIELDS)
    assert torch_fsdp.MixedPrecisionPolicy(**FIELDS) != ours


def test_it_is_torchs_by_type_and_can_be_varied() -> None:
    ours = fsdp_c.MixedPrecisionPolicy(**FIELDS, param_dtype_override_fn=keep)
    assert isinstance(ours, torch_fsdp.MixedPrecisionPolicy)
    varied = dataclasses.replace(ours, reduce_dtype=None)
    assert varied.param_dtype_override_fn is keep
    assert varied.reduce_dtype is None


# ---- torch 2.15's grad_dtype ---------------------------------------------------------------------


def wants(param: torch.Tensor, dtype: torch.dtype | None) -> None:
    """As ``param.grad_dtype = dtype`` of torch 2.15, also in the eyes of FSDP."""
    param.grad_dtype = dtype
    if not releases.has("2.15"):
        param._has_grad_dtype_override = True


@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_gradients_of_another_dtype_are_refused(fake_group: int, dtype: torch.dtype | None) -> None:
    plain = fsdp_c.fully_shard(nn.Linear(4, 4, dtype=torch.bfloat16))  # parameters of that kind
    layer = nn.Linear(4, 4, dtype=torch.bfloat16)
    wants(layer.weight, dtype)
    with pytest.raises(NotImplementedError, match=f"does not follow grad_dtype={dtype}: leave it"):
        fsdp_c.fully_shard(layer)
    assert type(layer) is nn.Linear and isinstance(plain, torch_fsdp.FSDPModule)


def test_a_gradient_dtype_that_comes_later_is_refused(fake_group: int) -> None:
    layer = fsdp_c.fully_shard(nn.Linear(4, 4, dtype=torch.bfloat16))
    wants(layer.weight, torch.float32)
    with pytest.raises(NotImplementedError, match=r"does not follow grad_dtype=torch.float32"):
        layer(torch.ones(2, 4, dtype=torch.bfloat16))


def test_a_gradient_dtype_that_is_the_parameters_changes_nothing(fake_group: int) -> None:
    layer = nn.Linear(4, 4)
    wants(layer.weight, torch.float32)
    fsdp_c.fully_shard(layer)(torch.ones(2, 4)).sum().backward()
    assert layer.weight.grad.dtype is torch.float32
