"""Buffers that a process group allocates: calls of its allocator, and their errors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from test_process_groups import SHARD_FUNCTIONS, Group, param_groups_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard import _fsdp_collectives

from fsdp_c import fully_shard

pytestmark = pytest.mark.torch("2.13")
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class AllocatingGroup(Group):
    """A group with an allocator that records its calls."""

    has_allocator = True
    transform: Callable[[torch.Tensor], torch.Tensor] | None = None
    """Called with each allocated tensor; the allocator returns its result."""

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        self.calls.append(f"{self.label} supports_tensor_alloc")
        return self.has_allocator

    def allocate_tensor(
        self, numel: int, *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        self.calls.append(f"{self.label} allocate_tensor {numel} {str(dtype)[6:]}")
        tensor = torch.full((numel,), float("nan"), dtype=dtype, device=device)
        return tensor if self.transform is None else self.transform(tensor)


def build(shard: Any, group: Any, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    mesh = init_device_mesh("cpu", (8,))
    for unit in (model[0], model):
        shard(unit, mesh=mesh, **kwargs)
        for param_group in unit._get_fsdp_state()._fsdp_param_groups:
            param_group.mesh_info.shard_process_group = group
        unit.set_allocate_memory_from_process_group_for_comm(True)
    return model


def step(model: Any) -> list[Any]:
    model(torch.ones(2, 8)).float().sum().backward()
    return [param.grad.to_local().tolist() for param in model.parameters()]


@pytest.mark.parametrize("has_allocator", [True, False])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MIXED])
def test_allocator_of_process_group_is_called_as_by_torch(
    fake_group: int, has_allocator: bool, policy: MixedPrecisionPolicy
) -> None:
    results = []
    for shard in SHARD_FUNCTIONS:
        calls: list[str] = []
        group = AllocatingGroup(8, calls, "group")
        group.has_allocator = has_allocator
        model = build(shard, group, mp_policy=policy)
        results.append((step(model) + step(model), calls))
    assert results[0] == results[1]
    assert any("allocate_tensor" in call for call in results[1][1]) == has_allocator


def test_group_with_allocator_does_not_use_fallback(fake_group: int) -> None:
    model = build(fully_shard, AllocatingGroup(8, [], "group"))
    step(model)
    for group in param_groups_of(model):
        assert not group._uses_fallback_gather
        assert not group._uses_fallback_reduce


def test_replaced_allocate_of_all_gather_comm_is_called(fake_group: int) -> None:
    model = build(fully_shard, AllocatingGroup(8, [], "group"))
    sizes: list[int] = []

    def allocate(size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        sizes.append(size[0])
        return torch.empty(size, dtype=dtype, device=device)

    for group in param_groups_of(model):
        comm: Any = _fsdp_collectives.ProcessGroupAllocAllGather(
            group.mesh_info.shard_process_group
        )
        comm.allocate = allocate
        group._all_gather_comm = comm
    step(model)
    assert sizes


def test_disabled_allocation_from_group_does_not_call_allocator(fake_group: int) -> None:
    calls: list[str] = []
    model = build(fully_shard, AllocatingGroup(8, calls, "group"))
    for unit in (model[0], model):
        unit.set_allocate_memory_from_process_group_for_comm(False)
    step(model)
    assert {"group gather", "group reduce"} == set(calls)


@pytest.mark.parametrize(
    "transform",
    [lambda t: t[:-1], lambda t: t.view(1, -1), lambda t: t.double(), lambda t: t.repeat(2)[::2]],
)
def test_allocated_tensor_of_wrong_layout_raises(
    fake_group: int, transform: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    group = AllocatingGroup(8, [], "group")
    model = build(fully_shard, group)
    expected = step(model)
    group.transform = transform
    with pytest.raises(RuntimeError, match="allocator 'process group' returned"):
        step(model)
    group.transform = None
    model.reset_iter_state()
    model.zero_grad()
    assert step(model) == expected


@pytest.mark.parametrize("shard", SHARD_FUNCTIONS)
def test_exception_of_process_group_allocator_is_raised(fake_group: int, shard: Any) -> None:
    def raise_memory_error(memory: torch.Tensor) -> torch.Tensor:
        raise MemoryError("out of memory")

    group = AllocatingGroup(8, [], "group")
    model = build(shard, group)
    group.transform = raise_memory_error
    with pytest.raises(MemoryError, match="out of memory"):
        step(model)


def test_step_with_allocator_after_forward_in_inference_mode_trains(fake_group: int) -> None:
    model = build(fully_shard, AllocatingGroup(8, [], "group"))
    with torch.inference_mode():
        model(torch.ones(2, 8))
    step(model)
