"""``ShardedEMA`` rejects models and states of other shapes or shardings."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

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
    assert ema["weight"].device_mesh is not other["weight"].device_mesh  # type: ignore[attr-defined]
    ema.load_state_dict(other.state_dict())


def test_ema_of_sharded_model_rejects_plain_state(single_group: int) -> None:
    ema = ShardedEMA(make_sharded_layer(16, range(1)))
    plain = ShardedEMA(nn.Linear(4, 16, bias=False))
    assert ema["weight"]._local_tensor.shape == plain["weight"].shape  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="'weight' has another shape or sharding in the state"):
        ema.load_state_dict(plain.state_dict())
