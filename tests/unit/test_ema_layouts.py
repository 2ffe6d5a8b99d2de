"""``ShardedEMA`` on meshes of other devices, and models and states that it rejects."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import releases
import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from fsdp_c import ShardedEMA, fully_shard


def make_sharded_layer(rows: int, ranks: Iterable[int]) -> Any:
    mesh = DeviceMesh("cpu", list(ranks), mesh_dim_names=("shard",))
    return fully_shard(nn.Linear(4, rows, bias=False), mesh=mesh)


@pytest.mark.parametrize(
    ("rows", "ranks"), [(15, range(8)), (16, range(7, -1, -1))], ids=["shape", "rank order"]
)
def test_ema_of_other_model_with_equal_local_shapes_raises(
    fake_group: int, rows: int, ranks: range
) -> None:
    model, other = make_sharded_layer(16, range(8)), make_sharded_layer(rows, ranks)
    assert model.weight._local_tensor.shape == other.weight._local_tensor.shape
    ema = ShardedEMA(model)
    with pytest.raises(ValueError, match="'weight' has another shape or sharding than its average"):
        ema.update(other)
    with pytest.raises(ValueError, match="'weight' has another shape or sharding in the state"):
        ema.load_state_dict(ShardedEMA(other).state_dict())
    assert ema.updates == 0


def test_ema_loads_state_with_another_mesh_object_of_the_same_ranks(fake_group: int) -> None:
    ema, other = (ShardedEMA(make_sharded_layer(16, range(8))) for _ in range(2))
    average: Any = ema["weight"]
    expected: Any = other["weight"]
    assert average.device_mesh is not expected.device_mesh
    assert not torch.equal(average._local_tensor, expected._local_tensor)
    ema.load_state_dict(other.state_dict())
    assert torch.equal(average._local_tensor, expected._local_tensor)


def test_ema_of_sharded_model_rejects_plain_state(single_group: int) -> None:
    ema = ShardedEMA(make_sharded_layer(16, range(1)))
    plain = ShardedEMA(nn.Linear(4, 16, bias=False))
    assert ema["weight"]._local_tensor.shape == plain["weight"].shape  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="'weight' has another shape or sharding in the state"):
        ema.load_state_dict(plain.state_dict())


@pytest.mark.parametrize("device", [None, "cpu", "meta"])
def test_ema_device_does_not_depend_on_device_of_mesh(single_group: int, device: Any) -> None:
    """A mesh of the type "meta" stands for a mesh of GPUs, and the shards for offloaded shards."""
    if releases.has("2.14"):
        pytest.skip("torch 2.14 and later create no parameters on meshes of the type 'meta'")
    mesh, values = DeviceMesh("meta", [0]), torch.ones(4, 2)
    spec = DTensorSpec(mesh, (Shard(0),), TensorMeta(values.shape, values.stride(), values.dtype))
    model: Any = nn.Module()
    model.weight = nn.Parameter(DTensor(values, spec, requires_grad=False))
    ema: Any = ShardedEMA(model, 0.5, dtype=torch.float64, device=device)
    average = ema["weight"]
    assert average._local_tensor.device == torch.device(device or "cpu")
    assert average.dtype == average._local_tensor.dtype == torch.float64
    assert average.shape == (4, 2) and average.placements == (Shard(0),)
    ema.update(model)
    ema.update(model)
    if device != "meta":
        assert torch.equal(average._local_tensor, values.double())


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda state: state.pop("updates"), "has no 'updates'"),
        (lambda state: state.pop("averages"), "has no 'averages'"),
        (lambda state: state.update(updates="many"), "'updates' is 'many', not a number"),
        (lambda state: state["averages"].update(weight=None), "'weight' is no tensor"),
    ],
    ids=["no updates", "no averages", "updates", "average"],
)
def test_ema_rejects_malformed_state_and_keeps_averages(
    single_group: int, change: Callable[[Any], object], match: str
) -> None:
    ema: Any = ShardedEMA(make_sharded_layer(4, range(1)))
    before = ema["weight"]._local_tensor.clone()
    state = {"averages": {"weight": ema["weight"] + 1}, "updates": 3}
    change(state)
    with pytest.raises(ValueError, match=match):
        ema.load_state_dict(state)
    assert torch.equal(ema["weight"]._local_tensor, before) and ema.updates == 0
