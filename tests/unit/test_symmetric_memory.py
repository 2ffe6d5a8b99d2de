"""Buffers in symmetric memory: the same calls and gradients as in torch.

Symmetric memory requires CUDA and NCCL. These tests replace torch's functions for it by functions
that record their calls, and return ordinary memory.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
import torch.distributed.fsdp._fully_shard._fsdp_collectives as collectives
import torch.nn as nn
from test_process_groups import SHARD_FUNCTIONS, param_groups_of
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from fsdp_c import fully_shard
from fsdp_c._compat.missing_members import MissingGroupMembers

pytestmark = pytest.mark.torch("2.13")
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces torch's functions for symmetric memory; returns the list of their calls."""
    recorded: list[str] = []

    def rendezvous(tensor: torch.Tensor, group: str) -> None:
        size = dist.distributed_c10d._resolve_process_group(group).size()
        recorded.append(f"rendezvous {tensor.numel()} {tensor.dtype} over {size} ranks")

    def get_mem_pool(device: torch.device) -> str:
        recorded.append(f"get_mem_pool {device.type}")
        return "pool"

    @contextlib.contextmanager  # dynamo reads __wrapped__ of torch's function when it is imported
    def use_mem_pool(pool: str) -> Iterator[None]:
        yield

    monkeypatch.setattr(symm_mem, "set_backend", lambda name: recorded.append(f"backend {name}"))
    monkeypatch.setattr(symm_mem, "rendezvous", rendezvous)
    monkeypatch.setattr(symm_mem, "get_mem_pool", get_mem_pool)
    for module in (torch.cuda, torch.cpu):  # torch uses the module of the device since 2.15
        monkeypatch.setattr(module, "use_mem_pool", use_mem_pool, raising=False)
    return recorded


def set_symmetric_memory(model: Any) -> None:
    """Does the same as ``set_symm_mem_for_comm``, which refuses devices other than CUDA."""
    for group in param_groups_of(model):
        group._all_gather_comm = collectives.SymmMemAllGather(group._all_gather_process_group)
        group._reduce_scatter_comm = collectives.SymmMemReduceScatter(
            group._reduce_scatter_process_group
        )


def build(shard: Any, mesh: DeviceMesh, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for unit in (model[0], model):
        shard(unit, mesh=mesh, **kwargs)
        unit.set_force_sum_reduction_for_comms(True)
    return model


def step(model: Any) -> list[Any]:
    model(torch.ones(2, 8)).float().sum().backward()
    return [param.grad.to_local().tolist() for param in model.parameters()]


@pytest.mark.parametrize("sizes", [(8,), (2, 4)])
@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MIXED])
@pytest.mark.parametrize("reshard", [True, 2])
def test_symmetric_memory_is_used_as_by_torch(
    fake_group: int, calls: list[str], sizes: Any, policy: MixedPrecisionPolicy, reshard: Any
) -> None:
    """Compares the order of registrations, and all calls without their order.

    torch allocates both buffers of a reduce-scatter before it registers them. fsdp_c registers each
    buffer right after its allocation.
    """
    results = []
    for shard in SHARD_FUNCTIONS:
        calls.clear()
        names = ("replicate", "shard")[-len(sizes) :]
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=names)
        model = build(shard, mesh, mp_policy=policy, reshard_after_forward=reshard)
        set_symmetric_memory(model)
        grads = step(model) + step(model)
        registered = [call for call in calls if "rendezvous" in call]
        results.append((grads, registered, sorted(calls)))
    assert results[0] == results[1]
    assert len(registered) == 16


def test_group_with_symmetric_memory_does_not_use_fallback(
    fake_group: int, calls: list[str]
) -> None:
    model = build(fully_shard, init_device_mesh("cpu", (8,)))
    set_symmetric_memory(model)
    step(model)
    for group in param_groups_of(model):
        assert not group._uses_fallback_gather
        assert not group._uses_fallback_reduce


def test_check_of_max_input_buffers_for_older_torch_raises_error_of_torch(
    fake_group: int, calls: list[str]
) -> None:
    model = build(fully_shard, init_device_mesh("cpu", (8,)))
    set_symmetric_memory(model)
    group = param_groups_of(model)[0]
    messages = []
    for owner in (FSDPParamGroup, MissingGroupMembers):
        group.reduce_scatter_max_input_buffers = 1
        owner._validate_reduce_scatter_max_input_buffers(group)
        group.reduce_scatter_max_input_buffers = 2
        with pytest.raises(ValueError, match="not supported with the symmetric-memory") as raised:
            owner._validate_reduce_scatter_max_input_buffers(group)
        messages.append(str(raised.value))
    assert messages[0] == messages[1]


@pytest.mark.parametrize("name", ["allocate", "__call__"])
@pytest.mark.parametrize("kind", ["SymmMemAllGather", "SymmMemReduceScatter"])
def test_patched_method_of_symmetric_memory_is_called(
    fake_group: int, calls: list[str], monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    model = build(fully_shard, init_device_mesh("cpu", (8,)))
    set_symmetric_memory(model)
    cls = getattr(collectives, kind)
    original, called = getattr(cls, name), []

    def record(self: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(name)
        return original(self, *args, **kwargs)

    monkeypatch.setattr(cls, name, record)
    step(model)
    assert called


def test_comm_object_with_attribute_set_by_user_uses_fallback(
    fake_group: int, calls: list[str]
) -> None:
    model, expected = (build(fully_shard, init_device_mesh("cpu", (8,))) for _ in range(2))
    set_symmetric_memory(model)
    for group in param_groups_of(model):
        comm = group._all_gather_comm
        comm.label = "of the user"
        group._all_gather_comm = comm
        assert group._uses_fallback_gather
        assert not group._uses_fallback_reduce
    assert step(model) == step(expected)


@pytest.mark.parametrize("shard", SHARD_FUNCTIONS)
def test_exception_of_symmetric_memory_rendezvous_is_raised(
    fake_group: int, calls: list[str], monkeypatch: pytest.MonkeyPatch, shard: Any
) -> None:
    def refuse(tensor: torch.Tensor, group: str) -> None:
        raise ValueError("not symmetric")

    model = build(shard, init_device_mesh("cpu", (8,)))
    set_symmetric_memory(model)
    monkeypatch.setattr(symm_mem, "rendezvous", refuse)
    with pytest.raises(ValueError, match="not symmetric"):
        step(model)
