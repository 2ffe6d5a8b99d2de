"""Process groups that replace those of a mesh info, as fault-tolerance libraries replace them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo

import fsdp_c._C as _C
from fsdp_c import fully_shard

pytestmark = pytest.mark.torch("2.13")
SHARD_FUNCTIONS = (torch_fully_shard, fully_shard)


class Group(dist.ProcessGroup):
    """A process group in Python, not registered with torch, that appends its calls to ``calls``.

    Its collectives act as if all ranks held the tensors of this one.
    """

    def __init__(self, ranks: int, calls: list[str], label: str, rank: int = 0) -> None:
        super().__init__(rank, ranks)
        self.ranks, self.calls, self.label, self.own_rank = ranks, calls, label, rank

    def getBackendName(self) -> str:
        return "python"

    def rank(self) -> int:
        return self.own_rank

    def all_gather_single(self, output: Any, shard: Any, options: Any = None) -> None:
        self.calls.append(f"{self.label} gather")
        output.copy_(shard.clone().repeat(self.ranks))

    def reduce_scatter_single(self, output: Any, input_tensor: Any, options: Any = None) -> None:
        self.calls.append(f"{self.label} reduce")
        output.copy_(input_tensor.view(self.ranks, -1).sum(0))

    def allreduce(self, tensors: list[Any], options: Any = None) -> None:
        self.calls.append(f"{self.label} all-reduce")
        for tensor in tensors:
            tensor.mul_(self.ranks)


class ElasticGroup(Group):
    """A group whose size changes with the attribute ``ranks``."""

    def size(self) -> int:
        return self.ranks


def step(model: Any) -> list[Any]:
    model.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    return [param.grad.to_local().tolist() for param in model.parameters()]


def param_groups_of(model: Any) -> list[Any]:
    """Returns the FSDPParamGroups of the first layer and of the root."""
    groups = []
    for module in (model[0], model):
        groups += module._get_fsdp_state()._fsdp_param_groups
    return groups


def build(shard: Callable[..., Any], mesh: Any, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    shard(model[0], mesh=mesh, **kwargs)
    return shard(model, mesh=mesh, **kwargs)


def replace_shard_group(model: Any, calls: list[str]) -> None:
    for group in param_groups_of(model):
        group.mesh_info.shard_process_group = Group(4, calls, "shard")


def replace_replicate_group(model: Any, calls: list[str]) -> None:
    for group in param_groups_of(model):
        group.mesh_info.replicate_process_group = Group(2, calls, "replicate")


def replace_replicate_group_by_larger(model: Any, calls: list[str]) -> None:
    """The number of replicas changes the divisor of the gradients."""
    for group in param_groups_of(model):
        group.mesh_info.replicate_process_group = Group(4, calls, "replicate")


def replace_reduce_scatter_group(model: Any, calls: list[str]) -> None:
    for group in param_groups_of(model):
        group.mesh_info.reduce_scatter_process_group = Group(4, calls, "reduce-scatter")


def replace_mesh_info(model: Any, calls: list[str]) -> None:
    for group in param_groups_of(model):
        old = group.mesh_info
        info = type(old)(old.mesh, old.shard_mesh_dim, old.replicate_mesh_dim)
        info.shard_process_group = Group(4, calls, "shard of new info")
        group.mesh_info = info


def replace_post_forward_group(model: Any, calls: list[str]) -> None:
    for group in param_groups_of(model):
        if group.post_forward_mesh_info is not None:
            group.post_forward_mesh_info.shard_process_group = Group(2, calls, "post-forward")


REPLACEMENTS = {
    "shard": replace_shard_group,
    "replicate": replace_replicate_group,
    "more replicas": replace_replicate_group_by_larger,
    "reduce-scatter": replace_reduce_scatter_group,
    "mesh info": replace_mesh_info,
    "post-forward": replace_post_forward_group,
}


def train_with_replacement(shard: Callable[..., Any], name: str, when: str) -> list[Any]:
    """Returns the gradients of each step, and the calls of the new groups."""
    calls: list[str] = []
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("r", "s"))
    kwargs = {"reshard_after_forward": 2} if name == "post-forward" else {}
    model = build(shard, mesh, **kwargs)
    grads = []
    if when == "after a step":
        grads.append(step(model))
    if when == "between forward and backward":
        output = model(torch.ones(2, 8)).sum()
        REPLACEMENTS[name](model, calls)
        output.backward()
    else:
        REPLACEMENTS[name](model, calls)
    grads += [step(model), step(model)]
    return [grads, calls]


@pytest.mark.parametrize(
    "when", ["before the first step", "after a step", "between forward and backward"]
)
@pytest.mark.parametrize("name", REPLACEMENTS)
def test_replaced_group_of_mesh_info_is_called_as_by_torch(
    fake_group: int, name: str, when: str
) -> None:
    expected, actual = (train_with_replacement(shard, name, when) for shard in SHARD_FUNCTIONS)
    assert expected[1] != []
    assert actual == expected


class ReduceOpRecorder(Group):
    """A group that records the reduce operations that it receives, with their factors."""

    def reduce_scatter_single(self, output: Any, input_tensor: Any, options: Any = None) -> None:
        super().reduce_scatter_single(output, input_tensor)
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
def test_group_of_unknown_backend_receives_reduce_ops_of_torch(
    fake_group: int, how: str, dtype: torch.dtype
) -> None:
    """torch does not check whether such a backend supports PREMUL_SUM."""
    results = []
    for shard in SHARD_FUNCTIONS:
        calls: list[str] = []
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("r", "s"))
        model = build(shard, mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype))
        for group in param_groups_of(model):
            group.mesh_info.shard_process_group = ReduceOpRecorder(4, calls, "shard")
            group.mesh_info.replicate_process_group = ReduceOpRecorder(2, calls, "replicate")
        for module in (model[0], model):
            DIVISIONS[how](module)
        results.append((step(model), calls))
    assert results[1] == results[0]
    assert ("0.333" in str(calls)) == (how == "by a factor" and dtype != torch.float16)


def test_replicate_group_of_changing_size_gives_gradients_of_torch(fake_group: int) -> None:
    results = []
    for shard in SHARD_FUNCTIONS:
        calls: list[str] = []
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("r", "s"))
        model = build(shard, mesh, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        elastic = ElasticGroup(2, calls, "elastic")
        for group in param_groups_of(model):
            group.mesh_info.replicate_process_group = elastic
        steps = [step(model)]
        elastic.ranks = 1
        steps.append(step(model))
        results.append((steps, calls))
    assert results[1] == results[0]
    torch_steps, _ = results[0]
    assert torch_steps[0] != torch_steps[1]


@pytest.mark.parametrize("ranks, rank", [(8, 0), (2, 0), (4, 1)])
def test_replacement_group_of_other_size_or_rank_raises(
    fake_group: int, ranks: int, rank: int
) -> None:
    """torch accepts it and computes with wrong buffer sizes or shards in the wrong order."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("r", "s"))
    model = build(fully_shard, mesh)
    expected = step(model)
    info = param_groups_of(model)[1].mesh_info
    original = info.shard_process_group
    with pytest.raises(ValueError, match=f"has rank {rank} of {ranks}, but .* rank 0 of 4"):
        info.shard_process_group = Group(ranks, [], "other", rank)
    assert info.shard_process_group is original
    assert step(model) == expected


@pytest.mark.parametrize("hsdp", [False, True])
def test_mesh_info_without_reduce_scatter_group_trains(
    fake_group: int, monkeypatch: pytest.MonkeyPatch, hsdp: bool
) -> None:
    """In torch 2.11 mesh infos have no ``reduce_scatter_process_group``."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("r", "s"))
    expected = step(build(fully_shard, mesh if hsdp else mesh["s"]))
    post_init = FSDPMeshInfo.__post_init__

    def post_init_of_2_11(self: Any) -> None:
        post_init(self)
        del self.reduce_scatter_process_group

    monkeypatch.setattr(FSDPMeshInfo, "__post_init__", post_init_of_2_11)
    model = build(fully_shard, mesh if hsdp else mesh["s"])
    assert not any(
        hasattr(g.mesh_info, "reduce_scatter_process_group") for g in param_groups_of(model)
    )
    assert step(model) == expected


def list_boundary_calls(action: Callable[[], object]) -> list[str]:
    """Returns the names of the fallible functions of the bridge that ``action`` calls.

    Makes each of them fail in turn.
    """
    names: list[str] = []
    while True:
        _C._testing.fault_arm(len(names) + 1)
        try:
            action()
            return names
        except RuntimeError as error:
            names.append(str(error))
            assert len(names) < 1000, error
        finally:
            _C._testing.fault_arm(0)


def test_parameter_group_is_counted_once_per_process_group(fake_group: int) -> None:
    """Each count makes gloo, not shared memory, move one more of the first gathers."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("r", "s"))

    calls = list_boundary_calls(lambda: build(fully_shard, mesh, reshard_after_forward=2))
    kinds, groups = 3, 2  # shard, replicate and post-forward
    assert sum("fct_pg_register_user" in call for call in calls) == kinds * groups


def test_mesh_info_keeps_class_repr_and_equality_of_torch(fake_group: int) -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("r", "s"))
    [group, root] = param_groups_of(build(fully_shard, mesh))
    info = group.mesh_info
    assert isinstance(info, HSDPMeshInfo) and isinstance(info, FSDPMeshInfo)
    assert info == root.mesh_info and type(info).__name__ == "HSDPMeshInfo"
    assert repr(info) == repr(HSDPMeshInfo(mesh, 1, 0))
    root.post_forward_mesh_info = HSDPMeshInfo(mesh, 1, 0)  # equal to mesh_info
    assert not root._use_post_forward_mesh


def test_object_with_interface_of_process_group_is_called_as_by_torch(fake_group: int) -> None:
    class Wrapper:
        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def __getattr__(self, name: str) -> Any:
            return getattr(self.inner, name)

    results = []
    for shard in SHARD_FUNCTIONS:
        calls: list[str] = []
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("r", "s"))
        model = build(shard, mesh)
        for group in param_groups_of(model):
            group.mesh_info.shard_process_group = Wrapper(Group(4, calls, "wrapped"))
        results.append((step(model), step(model), calls))
    assert results[1] == results[0]


@pytest.mark.parametrize(
    "call",
    [
        _C.shm_group,
        lambda group: _C.enter_shm(group, 0, 0),
        lambda group: _C.pause_shm(group, True),
    ],
)
def test_none_in_place_of_process_group_raises_type_error(call: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="expected a process group, not None"):
        call(None)


def test_enter_shm_with_negative_size_raises_value_error(fake_group: int) -> None:
    assert dist.group.WORLD is not None
    with pytest.raises(ValueError, match="nbytes of at least 0, got -8"):
        _C.enter_shm(dist.group.WORLD, 0, -8)


def build_over(group_class: type[Group]) -> Any:
    """Returns a model that is sharded over a group of this class."""
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("r", "s"))["s"]
    model = build(fully_shard, mesh)
    for group in param_groups_of(model):
        group.mesh_info.shard_process_group = group_class(4, [], "shard")
    return model


class PendingWork(dist.Work):
    """A work that does not complete."""

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: Any = None) -> bool:
        return True


class PendingGroup(Group):
    """A group with all-gathers that do not complete."""

    def all_gather_single(self, output: Any, shard: Any, options: Any = None) -> PendingWork:  # type: ignore[override]
        super().all_gather_single(output, shard)
        return PendingWork()


def test_exception_is_kept_when_it_frees_a_group_with_a_pending_gather(fake_group: int) -> None:
    models = [build_over(PendingGroup)]
    step(models[0])
    models[0].unshard(async_op=True)
    with pytest.raises(ZeroDivisionError):
        # The exception frees the model, which is on the stack of the interpreter.
        print(models.pop(), 1 / 0)


class GroupError(RuntimeError):
    """An error of a backend, with an attribute as in torch.AcceleratorError."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.text = message


class FailingGroup(Group):
    def all_gather_single(self, output: Any, shard: Any, options: Any = None) -> None:
        error = GroupError("link down")
        error.code = 7  # type: ignore[attr-defined]
        raise error


def test_error_of_a_collective_keeps_its_attributes(fake_group: int) -> None:
    with pytest.raises(GroupError, match=r"link down$") as raised:
        step(build_over(FailingGroup))
    assert raised.value.code == 7  # type: ignore[attr-defined]
    assert raised.value.text == str(raised.value)
