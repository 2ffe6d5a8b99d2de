"""Buffers from the process group's own allocator: who is asked, when, and for how much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from test_process_groups import BOTH, Group, groups
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_collectives as stock

from fsdp_c import fully_shard as ours

pytestmark = pytest.mark.torch("2.13")
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Giving(Group):
    """With memory of its own, and notes what is asked for."""

    gives = True
    changed: Callable[[torch.Tensor], torch.Tensor] | None = None

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        self.calls.append(f"{self.label} asked")
        return self.gives

    def allocate_tensor(
        self, numel: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        self.calls.append(f"{self.label} gives {numel} {str(dtype)[6:]}")
        made = torch.full((numel,), float("nan"), dtype=dtype, device=device)
        return made if self.changed is None else self.changed(made)


def build(shard: Any, group: Any, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (8,))
    for unit in (model[0], model):
        shard(unit, mesh=mesh, **kwargs)
        for one in unit._get_fsdp_state()._fsdp_param_groups:
            one.mesh_info.shard_process_group = group
        unit.set_allocate_memory_from_process_group_for_comm(True)
    return model


def step(model: Any) -> list[Any]:
    model(torch.ones(2, 8)).float().sum().backward()
    return [param.grad.to_local().tolist() for param in model.parameters()]


@pytest.mark.parametrize("gives", [True, False])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MIXED])
def test_the_group_is_asked_as_by_stock(
    fake_group: int, gives: bool, policy: MixedPrecisionPolicy
) -> None:
    found = []
    for shard in BOTH:
        calls: list[str] = []
        group = Giving(8, calls, "group")
        group.gives = gives
        model = build(shard, group, mp_policy=policy)
        found.append((step(model) + step(model), calls))
    assert found[0] == found[1]
    assert any("gives" in call for call in found[1][1]) == gives


def test_the_core_moves_the_data(fake_group: int) -> None:
    model = build(ours, Giving(8, [], "group"))
    step(model)
    for group in groups(model):
        assert not group._hosted_gather
        assert not group._hosted_reduce


def test_a_change_of_how_it_is_allocated_is_followed(fake_group: int) -> None:
    model = build(ours, Giving(8, [], "group"))
    seen: list[int] = []

    def allocate(size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        seen.append(size[0])
        return torch.empty(size, dtype=dtype, device=device)

    for group in groups(model):
        comm: Any = stock.ProcessGroupAllocAllGather(group.mesh_info.shard_process_group)
        comm.allocate = allocate
        group._all_gather_comm = comm
    step(model)
    assert seen


def test_it_is_switched_off(fake_group: int) -> None:
    calls: list[str] = []
    model = build(ours, Giving(8, calls, "group"))
    for unit in (model[0], model):
        unit.set_allocate_memory_from_process_group_for_comm(False)
    step(model)
    assert {"group gather", "group reduce"} == set(calls)


@pytest.mark.parametrize(
    "changed",
    [lambda t: t[:-1], lambda t: t.view(1, -1), lambda t: t.double(), lambda t: t.repeat(2)[::2]],
)
def test_memory_of_another_shape_is_refused(
    fake_group: int, changed: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    group = Giving(8, [], "group")
    model = build(ours, group)
    expected = step(model)
    group.changed = changed
    with pytest.raises(RuntimeError, match="the process group was asked for"):
        step(model)
    group.changed = None
    model.reset_iter_state()
    model.zero_grad()
    assert step(model) == expected


@pytest.mark.parametrize("shard", BOTH)
def test_what_the_allocator_raises_is_seen(fake_group: int, shard: Any) -> None:
    def fail(memory: torch.Tensor) -> torch.Tensor:
        raise MemoryError("none left")

    group = Giving(8, [], "group")
    model = build(shard, group)
    group.changed = fail
    with pytest.raises(MemoryError, match="none left"):
        step(model)


def test_gathers_in_evaluation_give_parameters_that_can_be_trained(fake_group: int) -> None:
    model = build(ours, Giving(8, [], "group"))
    with torch.inference_mode():
        model(torch.ones(2, 8))
    step(model)
