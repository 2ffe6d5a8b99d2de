"""torch's types, lookups, memory tracker, fake tensors and torch.compile work with fsdp_c."""

from __future__ import annotations

import importlib
import itertools
from abc import ABC
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed._composable.replicate_with_fsdp as torch_replicate
import torch.distributed.fsdp as public
import torch.distributed.fsdp._fully_shard._fully_shard as torch_fully_shard
import torch.nn as nn
from releases import has
from torch._dynamo import compiled_autograd
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode, is_fake
from torch.distributed._composable_state import _get_module_state
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import (
    FSDPState,
    FSDPStateContext,
    _get_module_fsdp_state,
)
from toy_models import MLPBlock

import fsdp_c
from fsdp_c import _C

ShardFunction = Callable[..., Any]
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SHARD_FUNCTIONS: list[ShardFunction] = [public.fully_shard, fsdp_c.fully_shard]


def model_of(shard: ShardFunction, **kwargs: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(MLPBlock(16, 64), MLPBlock(16, 64))
    for block in model:
        shard(block, **kwargs)
    return shard(model, **kwargs)


@pytest.fixture(autouse=True)
def world(fake_group: int) -> int:
    return fake_group


# ---- types and lookups ---------------------------------------------------------------------------


def test_fsdp_c_objects_are_instances_of_torch_classes() -> None:
    model = model_of(fsdp_c.fully_shard)
    model(torch.ones(2, 16))
    state = model[0]._get_fsdp_state()
    group = state._fsdp_param_group
    assert isinstance(model, FSDPModule) and type(model).__name__ == "FSDPSequential"
    assert isinstance(state, FSDPState) and isinstance(group, FSDPParamGroup)
    assert isinstance(group.fsdp_params[0], FSDPParam)
    assert isinstance(group.comm_ctx, FSDPCommContext)
    assert isinstance(state._state_ctx, FSDPStateContext)
    for looked_up in (
        public.fully_shard.state(model[0]),
        fsdp_c.fully_shard.state(model[0]),
        _get_module_fsdp_state(model[0]),
        _get_module_state(model[0]),
    ):
        assert looked_up is state
    assert torch_fully_shard.get_cls_to_fsdp_cls()[MLPBlock] is type(model[0])
    assert type(model[0]).__mro__[1:3] == (FSDPModule, MLPBlock)
    assert type(model[:1]) is nn.Sequential


def test_replicated_module_is_instance_of_replicate_classes() -> None:
    module = fsdp_c.replicate(nn.Linear(4, 4))
    state = module._get_fsdp_state()
    assert isinstance(module, torch_replicate.ReplicateModule)
    assert type(module).__name__ == "ReplicateLinear"
    assert type(module).__mro__[1:4] == (torch_replicate.ReplicateModule, FSDPModule, nn.Linear)
    assert isinstance(state, torch_replicate._ReplicateState)
    assert isinstance(state._state_ctx, torch_replicate._ReplicateStateContext)
    assert torch_replicate._get_module_replicate_state(module) is state
    assert torch_replicate.replicate.state(module) is state is fsdp_c.replicate.state(module)
    assert public.fully_shard.state(module) is None
    assert state._get_state_for_module(fsdp_c.fully_shard(nn.Linear(4, 4))) is None


def test_fully_shard_uses_fsdp_module_class_replaced_in_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class ReplacedFSDPModule(FSDPModule, ABC):
        """A subclass that a library puts in place of torch's class."""

    class NewLinear(nn.Linear):
        """A class for which torch has not cached a sharded class yet."""

    monkeypatch.setattr(torch_fully_shard, "FSDPModule", ReplacedFSDPModule)
    module = fsdp_c.fully_shard(NewLinear(4, 4))
    assert isinstance(module, ReplacedFSDPModule)


# ---- memory tracker ------------------------------------------------------------------------------

EARLY_FREED = {"All Gather", "Reduce Scatter"}  # kinds of buffers that fsdp_c frees before torch


def track_memory(shard: ShardFunction, **kwargs: Any) -> tuple[list[Any], int, dict[Any, Any]]:
    """Returns the tracker's updates during two steps, the peak, and the memory held at the end."""
    model = model_of(shard, **kwargs)
    optimizer = torch.optim.AdamW(model.parameters())
    x = torch.randn(4, 16)
    tracker = FSDPMemTracker(model, optimizer)
    tracker.track_inputs((x,))
    updates: list[Any] = []
    update_snap = tracker._update_snap

    def recording_update_snap(kind: Any, info: Any, *args: Any, **kw: Any) -> None:
        updates.append((kind.name, info.reftype.value, info.mem_consumed))
        update_snap(kind, info, *args, **kw)

    tracker._update_snap = recording_update_snap
    with tracker:
        for _ in range(2):
            model(x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            tracker.reset_mod_stats()
    # The tracker has restored the methods that it replaced, and the model still trains.
    if shard is fsdp_c.fully_shard:
        groups = [module._get_fsdp_state()._fsdp_param_group for module in model]
        assert not any(map(_C._testing.overrides, groups))
    model(x).sum().backward()
    cpu = torch.device("cpu")
    peak = tracker.get_tracker_snapshot("peak")[cpu]["Total"]
    return updates, peak, tracker.get_tracker_snapshot("current")[cpu]


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), MIXED], ids=["fp32", "mixed"])
def test_memory_tracker_records_same_updates_as_with_torch(policy: MixedPrecisionPolicy) -> None:
    # The first run fills DTensor's caches, which would be recorded.
    track_memory(SHARD_FUNCTIONS[0], mp_policy=policy)
    (torch_updates, torch_peak, torch_end), (updates, peak, end) = (
        track_memory(shard, mp_policy=policy) for shard in SHARD_FUNCTIONS
    )

    def of_parameters(updates: list[Any]) -> list[Any]:
        return [update for update in updates if update[1] in ("Unsharded Param", "Sharded Param")]

    def without_early_frees(updates: list[Any]) -> list[Any]:
        return [update for update in updates if update[0] != "DEL" or update[1] not in EARLY_FREED]

    assert of_parameters(updates) == of_parameters(torch_updates)
    assert sum(kind == "SIZE" for kind, *_ in updates) > 10  # unshard and reshard resize storages
    assert without_early_frees(updates) == without_early_frees(torch_updates)
    assert end == torch_end
    assert peak <= torch_peak


# ---- fake tensors --------------------------------------------------------------------------------


def test_training_on_fake_tensors_gives_gradient_shapes_of_torch() -> None:
    mesh = init_device_mesh("cpu", (8,))
    shapes = []
    for shard in SHARD_FUNCTIONS:
        with FakeTensorMode():
            model = model_of(shard, mesh=mesh, mp_policy=MIXED)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                loss = model(torch.randn(4, 16)).sum()
                loss.backward()
                grads = [parameter.grad for parameter in model.parameters()]
                optimizer.step()
                optimizer.zero_grad()
        assert is_fake(loss) and all(map(is_fake, grads))
        shapes.append([(grad.shape, grad.dtype, grad.to_local().shape) for grad in grads])
    assert shapes[0] == shapes[1]


# ---- process groups written in Python ------------------------------------------------------------

_group_numbers = itertools.count()


def python_mesh(calls: list[str]) -> DeviceMesh:
    """Returns a mesh of 4 ranks over a process group in Python, which appends to ``calls``.

    Its collectives act as if all ranks held the tensors of this one.
    """
    name = f"python {next(_group_numbers)}"

    class Group(dist.ProcessGroup):
        def __init__(self) -> None:
            super().__init__(0, 4)

        group_name = property(lambda self: name)

        def getBackendName(self) -> str:
            return "python"

        def rank(self) -> int:
            return 0

        def size(self) -> int:
            return 4

        def all_gather_single(self, output: Any, shard: Any, options: Any = None) -> None:
            calls.append("gather")
            output.copy_(shard.clone().repeat(4))

        def reduce_scatter_single(
            self, output: Any, input_tensor: Any, options: Any = None
        ) -> None:
            calls.append("reduce")
            output.copy_(input_tensor.view(4, -1).sum(0))

        if not has("2.13"):
            _allgather_base, _reduce_scatter_base = all_gather_single, reduce_scatter_single

    group = Group()
    c10d = dist.distributed_c10d
    c10d._register_process_group(name, group)
    c10d._world.pg_map[group] = ("fake", None)  # type: ignore[assignment]
    c10d._world.pg_names[group] = name
    c10d._world.pg_group_ranks[group] = {rank: rank for rank in range(4)}
    return DeviceMesh.from_group(group, "cpu")


def test_methods_of_python_process_group_are_called_as_by_torch() -> None:
    results = []
    for shard in SHARD_FUNCTIONS:
        calls: list[str] = []
        module = shard(nn.Linear(8, 8), mesh=python_mesh(calls), reshard_after_forward=True)
        nn.init.ones_(module.weight)
        module(torch.ones(2, 8)).sum().backward()
        results.append((calls, module.weight.grad.to_local().tolist()))
    assert results[0] == results[1]
    assert results[1][0] == ["gather", "gather", "reduce"]


# ---- torch.compile -------------------------------------------------------------------------------


@pytest.mark.torch("2.13")  # the fake group of older releases does not write gathered tensors
@pytest.mark.parametrize("hooks", ["original", "registered again"])
@pytest.mark.parametrize("shard", SHARD_FUNCTIONS, ids=["torch", "fsdp_c"])
def test_dynamo_compiles_code_between_hooks(shard: ShardFunction, hooks: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    graphs: list[int] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(len(graph.graph.nodes))
        return graph.forward

    model = model_of(shard)
    eager = model_of(shard)
    if hooks == "registered again":
        for module in (model, *model):
            state = module._get_fsdp_state()
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()
            module.register_forward_pre_hook(state._pre_forward, prepend=True, with_kwargs=True)
            module.register_forward_hook(state._post_forward)
    compiled = torch.compile(model, backend=backend)
    x = torch.ones(2, 16)
    for _ in range(3):
        compiled(x).sum().backward()
        eager(x).sum().backward()
    assert graphs and sum(counters["graph_break"].values()) >= 1
    for param, eager_param in zip(model.parameters(), eager.parameters()):
        assert torch.equal(param.grad.to_local(), eager_param.grad.to_local())
    torch._dynamo.reset()


@pytest.mark.torch("2.13")
def test_backward_under_compiled_autograd_raises() -> None:
    """A compiled backward does not call FSDP2's final callback: under torch it reduces nothing."""
    x = torch.ones(2, 8)
    torch_module, module, eager = (
        shard(nn.Linear(8, 8)) for shard in (public.fully_shard, *2 * [fsdp_c.fully_shard])
    )
    torch_weight = torch_module.weight
    with compiled_autograd._enable(torch.compile(backend="eager")):
        torch_module(x).sum().backward()
        with pytest.raises(NotImplementedError, match="compiled autograd cannot run") as refusal:
            module(x).sum().backward()
    torch._dynamo.reset()
    assert torch_weight.grad is None
    assert "frame #" not in str(refusal.value)
    module.reset_iter_state()
    for trained in (module, eager):
        trained(x).sum().backward()
    assert torch.equal(module.bias.grad.to_local(), eager.bias.grad.to_local())


def test_submodules_with_name_of_their_function_are_importable() -> None:
    assert importlib.import_module("fsdp_c.explain").explain is fsdp_c.explain
    assert importlib.import_module("fsdp_c.fully_shard").fully_shard is fsdp_c.fully_shard
