"""Process groups that are put in the place of others, as fault-tolerance libraries do it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torchs
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

from fsdp_c import fully_shard as ours

pytestmark = pytest.mark.torch("2.13")
BOTH = (torchs, ours)


class Group(dist.ProcessGroup):
    """Whose ranks all hold what this one holds; notes its calls, and is registered nowhere."""

    def __init__(self, ranks: int, calls: list[str], label: str, rank: int = 0) -> None:
        super().__init__(rank, ranks)
        self.ranks, self.calls, self.label, self.own = ranks, calls, label, rank

    def getBackendName(self) -> str:
        return "python"

    def rank(self) -> int:
        return self.own

    def all_gather_single(self, output: Any, shard: Any, options: Any = None) -> None:
        self.calls.append(f"{self.label} gather")
        output.copy_(shard.clone().repeat(self.ranks))

    def reduce_scatter_single(self, output: Any, whole: Any, options: Any = None) -> None:
        self.calls.append(f"{self.label} reduce")
        output.copy_(whole.view(self.ranks, -1).sum(0))

    def allreduce(self, tensors: list[Any], options: Any = None) -> None:
        self.calls.append(f"{self.label} all-reduce")
        for tensor in tensors:
            tensor.mul_(self.ranks)


class Elastic(Group):
    """One that may lose ranks."""

    def size(self) -> int:
        return self.ranks


def step(model: Any) -> list[Any]:
    model.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    return [param.grad.to_local().tolist() for param in model.parameters()]


def groups(model: Any) -> list[Any]:
    found = []
    for module in (model[0], model):
        found += module._get_fsdp_state()._fsdp_param_groups
    return found


def build(shard: Callable[..., Any], mesh: Any, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    shard(model[0], mesh=mesh, **kwargs)
    return shard(model, mesh=mesh, **kwargs)


def put_shard(model: Any, calls: list[str]) -> None:
    for group in groups(model):
        group.mesh_info.shard_process_group = Group(4, calls, "shard")


def put_replicate(model: Any, calls: list[str]) -> None:
    for group in groups(model):
        group.mesh_info.replicate_process_group = Group(2, calls, "replicate")


def put_more_replicas(model: Any, calls: list[str]) -> None:
    """Which changes what gradients are divided by."""
    for group in groups(model):
        group.mesh_info.replicate_process_group = Group(4, calls, "replicate")


def put_scatter(model: Any, calls: list[str]) -> None:
    for group in groups(model):
        group.mesh_info.reduce_scatter_process_group = Group(4, calls, "scatter")


def put_info(model: Any, calls: list[str]) -> None:
    for group in groups(model):
        before = group.mesh_info
        info = type(before)(before.mesh, before.shard_mesh_dim, before.replicate_mesh_dim)
        info.shard_process_group = Group(4, calls, "other info's")
        group.mesh_info = info


def put_smaller(model: Any, calls: list[str]) -> None:
    for group in groups(model):
        if group.post_forward_mesh_info is not None:
            group.post_forward_mesh_info.shard_process_group = Group(2, calls, "smaller")


SWAPS = {
    "shard": put_shard,
    "replicate": put_replicate,
    "more replicas": put_more_replicas,
    "scatter": put_scatter,
    "info": put_info,
    "smaller": put_smaller,
}


def swapped(shard: Callable[..., Any], name: str, when: str) -> list[Any]:
    calls: list[str] = []
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("r", "s"))
    kwargs = {"reshard_after_forward": 2} if name == "smaller" else {}
    model = build(shard, mesh, **kwargs)
    found = []
    if when == "after a step":
        found.append(step(model))
    if when == "between forward and backward":
        output = model(torch.ones(2, 8)).sum()
        SWAPS[name](model, calls)
        output.backward()
    else:
        SWAPS[name](model, calls)
    found += [step(model), step(model)]
    return [found, calls]


@pytest.mark.parametrize("when", ["at once", "after a step", "between forward and backward"])
@pytest.mark.parametrize("name", SWAPS)
def test_a_group_that_is_put_into_a_mesh_info_is_used(
    fake_group: int, name: str, when: str
) -> None:
    theirs, mine = (swapped(shard, name, when) for shard in BOTH)
    assert theirs[1] != []
    assert mine == theirs


class Scaling(Group):
    """Notes by which operations it is to reduce, factors included."""

    def reduce_scatter_single(self, output: Any, whole: Any, options: Any = None) -> None:
        super().reduce_scatter_single(output, whole)
        self.calls.append(repr(options.reduceOp.__getstate__()))

    def allreduce(self, tensors: list[Any], options: Any = None) -> None:
        super().allreduce(tensors)
        self.calls.append(repr(options.reduceOp.__getstate__()))


DIVISIONS: dict[str, Callable[[Any], Any]] = {
    "by the ranks": lambda module: None,
    "by a factor": lambda module: module.set_gradient_divide_factor(3.0),
    "by the group's size": lambda module: module.set_gradient_divide_factor(4.0),
    "by forced sums": lambda module: module.set_force_sum_reduction_for_comms(True),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("how", DIVISIONS)
def test_groups_of_unknown_backends_are_given_the_operations_that_torch_gives(
    fake_group: int, how: str, dtype: torch.dtype
) -> None:
    """torch never asks whether they know a premultiplied sum."""
    found = []
    for shard in BOTH:
        calls: list[str] = []
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("r", "s"))
        model = build(shard, mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        for group in groups(model):
            group.mesh_info.shard_process_group = Scaling(4, calls, "shard")
            group.mesh_info.replicate_process_group = Scaling(2, calls, "replicate")
        for module in (model[0], model):
            DIVISIONS[how](module)
        found.append((step(model), calls))
    assert found[1] == found[0]
    assert ("0.333" in str(calls)) == (how == "by a factor" and dtype != torch.float16)


def test_replicas_may_come_and_go(fake_group: int) -> None:
    found = []
    for shard in BOTH:
        calls: list[str] = []
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("r", "s"))
        model = build(shard, mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        elastic = Elastic(2, calls, "elastic")
        for group in groups(model):
            group.mesh_info.replicate_process_group = elastic
        steps = [step(model)]
        elastic.ranks = 1
        steps.append(step(model))
        found.append((steps, calls))
    assert found[1] == found[0]
    assert found[0][0][0] != found[0][0][1]


@pytest.mark.parametrize("ranks, rank", [(8, 0), (2, 0), (4, 1)])
def test_a_group_that_the_parameters_do_not_fit_is_refused(
    fake_group: int, ranks: int, rank: int
) -> None:
    """torch goes on with buffers of other sizes, or rows in another order."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("r", "s"))
    model = build(ours, mesh)
    expected = step(model)
    info = groups(model)[1].mesh_info
    before = info.shard_process_group
    with pytest.raises(ValueError, match=f"has rank {rank} of {ranks}, but .* rank 0 of 4"):
        info.shard_process_group = Group(ranks, [], "other", rank)
    assert info.shard_process_group is before
    assert step(model) == expected


@pytest.mark.parametrize("hsdp", [False, True])
def test_mesh_infos_without_a_group_for_reduce_scatters_shard_and_train(
    fake_group: int, monkeypatch: pytest.MonkeyPatch, hsdp: bool
) -> None:
    """Those of torch 2.11 have no such attribute."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("r", "s"))
    expected = step(build(ours, mesh if hsdp else mesh["s"]))
    post_init = FSDPMeshInfo.__post_init__

    def older(self: Any) -> None:
        post_init(self)
        del self.reduce_scatter_process_group

    monkeypatch.setattr(FSDPMeshInfo, "__post_init__", older)
    model = build(ours, mesh if hsdp else mesh["s"])
    assert not any(hasattr(g.mesh_info, "reduce_scatter_process_group") for g in groups(model))
    assert step(model) == expected


def test_mesh_infos_stay_what_they_are(fake_group: int) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("r", "s"))
    [group, root] = groups(build(ours, mesh))
    info = group.mesh_info
    assert isinstance(info, HSDPMeshInfo) and isinstance(info, FSDPMeshInfo)
    assert info == root.mesh_info and type(info).__name__ == "HSDPMeshInfo"
    assert repr(info) == repr(HSDPMeshInfo(mesh, 1, 0))
    root.post_forward_mesh_info = HSDPMeshInfo(mesh, 1, 0)  # one that says the same
    assert not root._use_post_forward_mesh


def test_what_is_no_process_group_of_torch_is_called_by_torch(fake_group: int) -> None:
    """One that only behaves like a group."""

    class Wrapper:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    found = []
    for shard in BOTH:
        calls: list[str] = []
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("r", "s"))
        model = build(shard, mesh)
        for group in groups(model):
            group.mesh_info.shard_process_group = Wrapper(Group(4, calls, "wrapped"))
        found.append((step(model), step(model), calls))
    assert found[1] == found[0]
