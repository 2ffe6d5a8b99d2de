"""Mesh infos of sharded modules: their class while groups use them, and comparisons."""

from __future__ import annotations

import pytest
import torch.nn as nn
from releases import ShardPlacementResult
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.tensor import Shard

from fsdp_c import fully_shard
from fsdp_c._compat import patches
from fsdp_c._runtime import meshes


@pytest.mark.torch("2.12")
def test_mesh_info_of_sharded_module_equals_mesh_info_with_the_same_fields(
    fake_group: int,
) -> None:
    mesh = init_device_mesh("cpu", (fake_group,))
    info, other, equal = (FSDPMeshInfo(mesh, shard_mesh_dim=0) for _ in range(3))
    smaller = FSDPMeshInfo(init_device_mesh("cpu", (2,)), shard_mesh_dim=0)
    modules = [nn.Linear(4, 4), nn.Linear(4, 4)]
    for module, mesh_info in zip(modules, (info, other)):
        result = ShardPlacementResult(Shard(0), mesh_info)
        fully_shard(module, shard_placement_fn=lambda param, result=result: result)
    assert type(info) is not FSDPMeshInfo
    assert info == equal and equal == info and info == other
    assert info != smaller and smaller != info and info != "mesh"


def test_mesh_info_class_is_restored_when_no_group_uses_it(fake_group: int) -> None:
    class FakeGroup:
        calls = 0

        def _refresh_process_groups(self) -> None:
            self.calls += 1

    info = FSDPMeshInfo(init_device_mesh("cpu", (fake_group,)), shard_mesh_dim=0)
    before = dict(vars(info))
    first, second = FakeGroup(), FakeGroup()
    lease = patches.lease()
    for group in (first, second, first):
        meshes.subscribe(info, group)
    info.shard_mesh_size = 7
    assert (first.calls, second.calls) == (1, 1)
    assert type(info) is not FSDPMeshInfo and isinstance(info, FSDPMeshInfo)
    meshes.unsubscribe(info, first)
    assert type(info) is not FSDPMeshInfo
    meshes.unsubscribe(info, second)
    assert type(info) is FSDPMeshInfo
    assert vars(info) == {**before, "shard_mesh_size": 7}
    meshes.subscribe(info, first)
    del first, group
    meshes._restore_unused_classes()
    assert type(info) is FSDPMeshInfo
    assert vars(info) == {**before, "shard_mesh_size": 7}
    del lease
