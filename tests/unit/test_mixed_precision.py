"""``fsdp_c.MixedPrecisionPolicy`` beside torch's: a policy without our addition is torch's."""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed.fsdp as torch_fsdp

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
