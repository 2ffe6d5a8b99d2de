"""Uses of groups and states by libraries: attributes, hooks, types and direct calls."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from implementations import IMPLEMENTATIONS, groups_of, record_calls, run_both
from linear_stack import model_of, step
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_common import TrainingState
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState

import fsdp_c

MIXED = MixedPrecisionPolicy(
    param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32
)
guard = importlib.import_module("fsdp_c._compat.guard")


@pytest.fixture(autouse=True)
def world(fake_group: int) -> int:
    return fake_group


def test_training_state_and_new_attributes_of_group_can_be_set() -> None:
    model = model_of(fsdp_c.fully_shard)
    step(model)
    for group in groups_of(model):
        group.of_a_library = {"any": "thing"}
        assert vars(group)["of_a_library"] is group.of_a_library
        for state in TrainingState:
            group._training_state = state
            assert group._training_state is state
        group._training_state = TrainingState.IDLE
        assert isinstance(group, FSDPParamGroup)
        assert all(isinstance(param, FSDPParam) for param in group.fsdp_params)
    step(model)


@pytest.mark.torch("2.13")  # older fake groups leave gathered memory unset
def test_post_backward_outside_of_autograd_matches_torch() -> None:
    def scenario(shard: Callable[..., Any]) -> list[Any]:
        model = model_of(shard)
        model.set_requires_gradient_sync(False)
        step(model)
        model.set_requires_gradient_sync(True)
        found = [[parameter.grad for parameter in model.parameters()]]
        for group in groups_of(model):
            group.post_backward()
            group._training_state = TrainingState.IDLE
        for module in model.modules():
            state = module._get_fsdp_state()
            if hasattr(state._state_ctx, "manual_backward_finalization_active"):  # since torch 2.15
                state._state_ctx.manual_backward_finalization_active = False
            state._root_post_backward_final_callback()
        found.append([parameter.grad.to_local() for parameter in model.parameters()])
        return found

    torch_result, result = run_both(scenario)
    assert result[0] == torch_result[0] == [None] * 6
    assert all(map(torch.equal, result[1], torch_result[1]))


@pytest.mark.torch("2.13")  # older fake groups leave gathered memory unset
def test_state_hooks_removed_and_registered_again_match_torch() -> None:
    def scenario(shard: Callable[..., Any]) -> list[Any]:
        model = model_of(shard, mp_policy=MIXED)
        seen: list[str] = []
        for name, module in model.named_children():
            state = module._get_fsdp_state()
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()
            state._pre_forward_hook_handle = module.register_forward_pre_hook(
                record_calls(seen, name, state._pre_forward), prepend=True, with_kwargs=True
            )
            state._post_forward_hook_handle = module.register_forward_hook(
                record_calls(seen, name, state._post_forward), always_call=True
            )
        for _ in range(2):
            step(model)
        assert seen
        return [*seen, *(p.grad.to_local() for p in model.parameters())]

    torch_result, result = run_both(scenario)
    assert len(result) == len(torch_result) == 12 + 6
    assert all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
        for a, b in zip(result, torch_result)
    )


def test_state_hook_attributes_are_torchs_functions() -> None:
    state = model_of(fsdp_c.fully_shard)._get_fsdp_state()
    for name in ("_pre_forward", "_post_forward", "_pre_backward"):
        assert getattr(state, name).__func__ is vars(FSDPState)[name]
        assert getattr(state, name).__self__ is state


@pytest.mark.parametrize("kind", ["group", "state", "param"])
def test_torch_objects_keep_torch_types_while_fsdp_c_model_exists(kind: str) -> None:
    result = model_of(fsdp_c.fully_shard)  # redirects torch's functions while it exists
    model = model_of(IMPLEMENTATIONS["torch"])
    step(model)
    group = groups_of(model)[0]
    item = {"group": group, "state": model._get_fsdp_state(), "param": group.fsdp_params[0]}[kind]
    assert type(item).__module__.startswith("torch.")
    cls = {"group": FSDPParamGroup, "state": FSDPState, "param": FSDPParam}[kind]
    assert type(item) is cls
    names = [n for n, v in vars(cls).items() if callable(v) and not n.startswith("__")]
    redirected = [n for n in names if guard.get_torch_function(cls, n) is not vars(cls)[n]]
    assert redirected, "no function of this class is redirected: the test would check nothing"
    assert fsdp_c.is_active(result)
