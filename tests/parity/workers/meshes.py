"""The device meshes of one launch, and the role of each dimension.

A setting names a kind of mesh; the shape follows from the number of ranks. All ranks create a mesh
on its first use and cache it, because creating a mesh creates process groups.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from releases import DataParallelMeshDims
from setting import DEVICE, Setting
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo

KINDS: dict[str, tuple[str, ...]] = {
    "flat": ("world",),
    "hsdp": ("replicate", "shard"),
    "hsdp_rows": ("replicate", "shard"),
    "hsdp_columns": ("replicate", "shard"),
    "tp": ("shard", "tensor"),
    "hsdp_tp": ("replicate", "shard", "tensor"),
    "dims": ("shard", "tensor"),
    "dims_hsdp": ("replicate", "shard", "tensor"),
    "dims_two": ("shard", "context"),
}
"""Dimension names of each kind. ``hsdp_rows`` has more replicas than shards, and ``hsdp_columns``
one replica. In the dims kinds all parameters are DTensors on the whole mesh, and dp_mesh_dims names
the data-parallel dimensions."""

SHAPES: dict[tuple[str, int], tuple[int, ...]] = {
    ("hsdp", 2): (2, 1),
    ("hsdp", 4): (2, 2),
    ("hsdp", 8): (2, 4),
    ("hsdp_rows", 4): (4, 1),
    ("hsdp_rows", 8): (4, 2),
    ("hsdp_columns", 2): (1, 2),
    ("hsdp_columns", 4): (1, 4),
    ("hsdp_columns", 8): (1, 8),
    ("tp", 2): (1, 2),
    ("tp", 4): (2, 2),
    ("tp", 8): (4, 2),
    ("hsdp_tp", 4): (2, 1, 2),
    ("hsdp_tp", 8): (2, 2, 2),
    ("dims", 2): (2, 1),
    ("dims", 4): (2, 2),
    ("dims", 8): (4, 2),
    ("dims_hsdp", 4): (2, 2, 1),
    ("dims_hsdp", 8): (2, 2, 2),
    ("dims_two", 4): (2, 2),
    ("dims_two", 8): (4, 2),
}
"""Kind and number of ranks -> shape. A flat mesh has one dimension."""


def is_hsdp(kind: str) -> bool:
    """Returns whether gradients are all-reduced over a replicate dimension."""
    return "replicate" in KINDS[kind]


def has_tensor_dim(kind: str) -> bool:
    """Returns whether modules are parallelized over a tensor dimension outside of FSDP's mesh."""
    return kind in ("tp", "hsdp_tp")


def is_spmd(kind: str) -> bool:
    """Returns whether all parameters are DTensors on the whole mesh (dp_mesh_dims)."""
    return kind.startswith("dims")


class Meshes:
    """This rank's meshes by kind."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self._meshes: dict[str, DeviceMesh] = {}
        self._experts: FSDPMeshInfo | None = None

    def prepare(self, setting: Setting) -> None:
        """Creates the meshes that a setting uses, so that they outlive the setting."""
        self.whole(setting.mesh)
        if has_tensor_dim(setting.mesh):
            self.data(setting.mesh)
            self.tensor(setting.mesh)
        if setting.placement == "experts":
            self.experts()

    def whole(self, kind: str) -> DeviceMesh:
        """Returns the mesh with all its dimensions."""
        if kind not in self._meshes:
            shape = SHAPES.get((kind, self.world_size), (self.world_size,))
            # Without dimension names, as fully_shard's default mesh.
            names = None if kind == "flat" else KINDS[kind]
            self._meshes[kind] = init_device_mesh(DEVICE, shape, mesh_dim_names=names)
        return self._meshes[kind]

    def data(self, kind: str) -> DeviceMesh:
        """Returns the mesh that ``fully_shard`` receives."""
        mesh = self.whole(kind)
        if not has_tensor_dim(kind):
            return mesh
        names = tuple(name for name in KINDS[kind] if name != "tensor")
        return mesh[names] if len(names) > 1 else mesh[names[0]]

    def tensor(self, kind: str) -> DeviceMesh:
        """Returns the dimension over which modules are parallelized."""
        return self.whole(kind)["tensor"]

    def dims(self, kind: str) -> Any:
        """Returns dp_mesh_dims for a dims kind."""
        names = KINDS[kind]
        shard = tuple(name for name in names if name in ("shard", "context"))
        return DataParallelMeshDims(
            shard=shard if len(shard) > 1 else shard[0],
            replicate="replicate" if "replicate" in names else None,
        )

    def shard_size(self, kind: str) -> int:
        """Returns the number of ranks over which FSDP shards a parameter."""
        sizes = dict(zip(KINDS[kind], self.whole(kind).shape, strict=True))
        return sizes.get("world", sizes.get("shard", 1)) * sizes.get("context", 1)

    def data_rank(self, kind: str) -> int:
        """Returns the index of this rank's inputs; tensor-parallel peers have equal inputs."""
        mesh = self.whole(kind)
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        rank = 0
        for name, size, place in zip(KINDS[kind], mesh.shape, coordinate, strict=True):
            if name != "tensor":
                rank = rank * size + place
        return rank

    def experts(self) -> FSDPMeshInfo:
        """Returns the shard dimension of the hsdp mesh, for parameters with their own mesh."""
        if self._experts is None:
            self._experts = FSDPMeshInfo(self.whole("hsdp")["shard"], shard_mesh_dim=0)
        return self._experts


def existing_groups() -> set[Any]:
    """Returns the process groups that exist now."""
    return set(dist.distributed_c10d._world.pg_map)


def drop_new_groups(kept: set[Any]) -> None:
    """Destroys the process groups that are not in ``kept``.

    Separate reduce-scatter groups stay. Their name is a hash of their ranks. The store keeps
    the addresses of a destroyed group, and torch would connect the next group of that name to them.
    """
    for group in existing_groups() - kept:
        if group.group_desc != "fsdp_reduce_scatter":
            dist.destroy_process_group(group)
