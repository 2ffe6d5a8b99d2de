"""The device meshes of one launch, and which part of each does what.

A kind of mesh is named by the setting; its shape follows from the number of ranks. Meshes are made
when first asked for, by all ranks alike, and kept: making one makes process groups.
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
"""The dimensions of each kind. The dims kinds are meshes whose parameters are DTensors on the whole
mesh, and of which dp_mesh_dims names the data-parallel dimensions."""

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


def is_hsdp(kind: str) -> bool:
    """Whether gradients are all-reduced over a replicating dimension."""
    return "replicate" in KINDS[kind]


def has_tensor_dim(kind: str) -> bool:
    """Whether modules are parallelised over a tensor dimension beside FSDP's mesh."""
    return kind in ("tp", "hsdp_tp")


def is_spmd(kind: str) -> bool:
    """Whether all parameters are DTensors on the whole mesh (dp_mesh_dims)."""
    return kind.startswith("dims")


class Meshes:
    """The meshes of this rank, by kind."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.rank = dist.get_rank()
        self._meshes: dict[str, DeviceMesh] = {}
        self._experts: FSDPMeshInfo | None = None

    def prepare(self, setting: Setting) -> None:
        """Make the meshes that a setting uses, so that they outlive it."""
        self.whole(setting.mesh)
        if has_tensor_dim(setting.mesh):
            self.data(setting.mesh)
            self.tensor(setting.mesh)
        if setting.placement == "experts":
            self.experts()

    def whole(self, kind: str) -> DeviceMesh:
        """The mesh with all its dimensions."""
        if kind not in self._meshes:
            shape = SHAPES.get((kind, self.world_size), (self.world_size,))
            # A plain mesh stays unnamed, as the default one.
            names = None if kind == "flat" else KINDS[kind]
            self._meshes[kind] = init_device_mesh(DEVICE, shape, mesh_dim_names=names)
        return self._meshes[kind]

    def data(self, kind: str) -> DeviceMesh:
        """What ``fully_shard`` is given."""
        mesh = self.whole(kind)
        if not has_tensor_dim(kind):
            return mesh
        names = tuple(name for name in KINDS[kind] if name != "tensor")
        return mesh[names] if len(names) > 1 else mesh[names[0]]

    def tensor(self, kind: str) -> DeviceMesh:
        """The dimension over which modules are parallelised."""
        return self.whole(kind)["tensor"]

    def dims(self, kind: str) -> Any:
        """dp_mesh_dims of a kind of the dims family."""
        names = KINDS[kind]
        shard = tuple(name for name in names if name in ("shard", "context"))
        return DataParallelMeshDims(
            shard=shard if len(shard) > 1 else shard[0],
            replicate="replicate" if "replicate" in names else None,
        )

    def shard_size(self, kind: str) -> int:
        """Over how many ranks FSDP shards a parameter."""
        sizes = dict(zip(KINDS[kind], self.whole(kind).shape, strict=True))
        return sizes.get("world", sizes.get("shard", 1)) * sizes.get("context", 1)

    def data_rank(self, kind: str) -> int:
        """The rank among those with different inputs: tensor-parallel peers share theirs."""
        mesh = self.whole(kind)
        coordinate = mesh.get_coordinate()
        assert coordinate is not None
        rank = 0
        for name, size, place in zip(KINDS[kind], mesh.shape, coordinate, strict=True):
            if name != "tensor":
                rank = rank * size + place
        return rank

    def experts(self) -> FSDPMeshInfo:
        """A smaller mesh for parameters with a mesh of their own: the last dim of the hsdp mesh."""
        if self._experts is None:
            self._experts = FSDPMeshInfo(self.whole("hsdp")["shard"], shard_mesh_dim=0)
        return self._experts


def existing_groups() -> set[Any]:
    """The process groups that exist now."""
    return set(dist.distributed_c10d._world.pg_map)


def drop_new_groups(kept: set[Any]) -> None:
    """Destroy the process groups that are not among those ``kept``.

    Groups for reduce-scatters alone stay: they are named by a hash of their ranks, and torch would
    join the next one of that name through the addresses that the destroyed one left in the store.
    """
    for group in existing_groups() - kept:
        if group.group_desc != "fsdp_reduce_scatter":
            dist.destroy_process_group(group)
