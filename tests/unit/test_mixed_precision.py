"""``fsdp_c.MixedPrecisionPolicy`` compared with torch's, and ``grad_dtype`` of parameters."""

from __future__ import annotations

import dataclasses
import io
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from torch.distributed._composable.replicate_with_fsdp import replicate as torch_replicate
from torch.overrides import TorchFunctionMode

import fsdp_c
from fsdp_c._runtime import mixed_precision
from fsdp_c._runtime.mixed_precision import REDUCES_IN_PARAM_DTYPE

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


@pytest.mark.filterwarnings("ignore:Casting complex values")
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool])
@pytest.mark.parametrize("param_dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("name", ["fully_shard", "replicate"])
def test_reduce_dtype_that_is_not_floating_raises_as_in_torch(
    single_group: int, name: str, accumulates: bool, param_dtype: torch.dtype, dtype: torch.dtype
) -> None:
    def train(shard: Callable[..., Any]) -> str:
        model = nn.Linear(4, 4, dtype=param_dtype)
        module = shard(model, mp_policy=torch_fsdp.MixedPrecisionPolicy(reduce_dtype=dtype))
        x = torch.ones(2, 4, dtype=param_dtype)
        with pytest.raises((RuntimeError, TypeError)) as caught:
            module.set_requires_gradient_sync(not accumulates)
            module(x).abs().sum().backward()
            module.set_requires_gradient_sync(True)
            module(x).abs().sum().backward()
        return repr(caught.value)

    torch_shard = {"fully_shard": torch_fsdp.fully_shard, "replicate": torch_replicate}[name]
    expected = train(torch_shard)
    error = train(getattr(fsdp_c, name))
    # torch 2.15 has an internal error for complex parameters.
    assert error == expected or ("INTERNAL ASSERT FAILED" in expected and param_dtype.is_complex)


@pytest.mark.parametrize("field", ["param_dtype", "reduce_dtype", "output_dtype"])
def test_python_type_in_place_of_dtype_raises_also_where_torch_accepts_it(
    fake_group: int, field: str
) -> None:
    policy = torch_fsdp.MixedPrecisionPolicy(**{field: float})
    with pytest.raises(TypeError, match=r"expected torch\.dtype or None, not type"):
        fsdp_c.fully_shard(nn.Linear(4, 4), mp_policy=policy)
    if REDUCES_IN_PARAM_DTYPE and field != "output_dtype":
        return
    torch_fsdp.fully_shard(nn.Linear(4, 4), mp_policy=policy)(torch.ones(2, 4)).sum().backward()


# ---- grad_dtype, which FSDP2 follows since torch 2.15 --------------------------------------------


@pytest.mark.torch("2.15")
@pytest.mark.parametrize("dtype", [torch.float32, None])
def test_grad_dtype_of_parameter_is_kept_by_fully_shard_and_conversions(
    fake_group: int, dtype: torch.dtype | None
) -> None:
    layer = nn.Linear(4, 4, dtype=torch.bfloat16)
    layer.weight.grad_dtype = dtype
    fsdp_c.fully_shard(layer)
    layer(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    assert layer.weight.grad_dtype is dtype
    assert layer.weight.grad.dtype is (dtype or torch.bfloat16)
    assert layer.bias.grad.dtype is torch.bfloat16
    layer.zero_grad()
    layer.to(torch.float16)
    layer(torch.ones(2, 4, dtype=torch.float16)).sum().backward()
    assert layer.weight.grad_dtype is dtype
    assert layer.weight.grad.dtype is (dtype or torch.float16)
    assert layer.bias.grad.dtype is torch.float16


@pytest.mark.torch("2.15")
def test_grad_dtype_set_after_first_forward_applies_after_module_to(fake_group: int) -> None:
    layer = fsdp_c.fully_shard(nn.Linear(4, 4, dtype=torch.bfloat16))
    x = torch.ones(2, 4, dtype=torch.bfloat16)
    layer(x).sum().backward()
    layer.zero_grad()
    layer.weight.grad_dtype = torch.float32
    layer.to(torch.bfloat16)  # torch reads grad_dtype when a parameter may have been replaced
    layer(x).sum().backward()
    assert layer.weight.grad.dtype is torch.float32


@pytest.mark.torch("2.13")
def test_grad_dtype_equal_to_dtype_of_parameter_trains(fake_group: int) -> None:
    layer = nn.Linear(4, 4)
    layer.weight.grad_dtype = torch.float32
    fsdp_c.fully_shard(layer)(torch.ones(2, 4)).sum().backward()
    assert layer.weight.grad.dtype is torch.float32


@pytest.mark.torch("2.13")
@pytest.mark.parametrize("grad_dtype", [torch.bfloat16, torch.float64, torch.float32, None])
@pytest.mark.parametrize("policy", [{}, FIELDS], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["fully_shard", "replicate"])
def test_grad_dtype_set_on_sharded_parameter_refuses_gradients_of_other_dtypes_as_in_torch(
    single_group: int, name: str, policy: dict[str, Any], grad_dtype: torch.dtype | None
) -> None:
    def train(shard: Callable[..., Any]) -> list[Any]:
        layer = shard(nn.Linear(4, 4), mp_policy=torch_fsdp.MixedPrecisionPolicy(**policy))
        layer(torch.ones(2, 4)).sum().backward()
        layer.zero_grad()
        layer.weight.grad_dtype = grad_dtype
        result: list[Any] = []
        try:
            layer(torch.ones(2, 4)).sum().backward()
        except RuntimeError as error:
            result = str(error).splitlines()[:1]
        weight = next(iter(layer.parameters()))
        return [*result, weight.grad is not None and weight.grad.dtype]

    torch_shard = {"fully_shard": torch_fsdp.fully_shard, "replicate": torch_replicate}[name]
    result = train(getattr(fsdp_c, name))
    assert result == train(torch_shard)
    assert len(result) == (2 if grad_dtype in (torch.bfloat16, torch.float64) else 1)


@pytest.mark.parametrize("reduces_in_param_dtype", [False, True])
def test_reduce_dtype_that_plan_suggests_saves_predicted_bytes(
    reduces_in_param_dtype: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``True``: as in torch 2.15, in which ``reduce_dtype=None`` means the parameters' dtype."""
    monkeypatch.setattr(mixed_precision, "REDUCES_IN_PARAM_DTYPE", reduces_in_param_dtype)

    def plan(reduce_dtype: torch.dtype | None) -> fsdp_c.Explanation:
        policy = fsdp_c.MixedPrecisionPolicy(torch.bfloat16, reduce_dtype)
        model = nn.Linear(64, 64, device="meta")
        return fsdp_c.plan(model, {nn.Linear}, world_size=8, mp_policy=policy, file=io.StringIO())

    before = plan(torch.float32)
    (change,) = (c for c in before.changes if c.text.startswith("reduce in bfloat16"))
    suggested = re.search(r"reduce_dtype=(\S+)", change.text)
    assert suggested is not None
    after = plan(eval(suggested[1], {"torch": torch}))
    assert change.saves == before.peak.total - after.peak.total


class TripleCasts(TorchFunctionMode):
    """Multiplies the results of casts of tensors with ``rows`` rows by 3."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.rows = rows

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_cast = func is torch.Tensor.to and args[0].shape[0] == self.rows
        return result * 3 if is_cast and result.dtype != args[0].dtype else result


@pytest.mark.parametrize("keyword", [False, True])
def test_function_mode_replaces_casts_of_inputs_and_outputs_as_in_torch(
    single_group: int, keyword: bool
) -> None:
    outputs = []
    for shard in (torch_fsdp.fully_shard, fsdp_c.fully_shard):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        policy = torch_fsdp.MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, output_dtype=torch.float64
        )
        shard(model, mp_policy=policy)
        rows = torch.ones(7, 4)
        plain = model(rows)
        with TripleCasts(7):
            outputs.append(model(input=rows) if keyword else model(rows))
        assert not torch.equal(outputs[-1], plain)
    assert torch.equal(*outputs)
