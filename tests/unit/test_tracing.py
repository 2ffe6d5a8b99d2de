"""Tracers and fake tensors that would corrupt a sharded model raise, and the model stays usable."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.proxy import TraceError

from fsdp_c import MixedPrecisionPolicy, fully_shard

X = torch.ones(2, 4)


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def make_sharded_model(used: bool = False) -> Any:
    """Returns a sharded model, after one step if ``used``."""
    model = make_model()
    fully_shard(model[0])
    fully_shard(model[2])
    fully_shard(model)
    if used:
        model(X).sum().backward()
        model.zero_grad()
    return model


def assert_trains(model: nn.Module) -> None:
    """Asserts that a step gives the output and gradients of the unsharded model."""
    reference = make_model()
    output, expected = model(X), reference(X)
    assert type(output) is torch.Tensor and torch.equal(output, expected)
    output.sum().backward()
    expected.sum().backward()
    for param, expected_param in zip(model.parameters(), reference.parameters(), strict=True):
        local = param.grad.to_local()  # type: ignore[union-attr]
        assert type(local) is torch.Tensor and torch.equal(local, expected_param.grad)


def forward_fake_tensor(model: nn.Module) -> Any:
    with FakeTensorMode(allow_non_fake_inputs=True):
        return model(torch.ones(2, 4))


TRACERS: dict[str, Callable[[nn.Module], Any]] = {
    "export": lambda model: torch.export.export(model, (X,), strict=False),
    "make_fx": lambda model: make_fx(model, tracing_mode="fake")(X),
    "symbolic make_fx": lambda model: make_fx(model, tracing_mode="symbolic")(X),
    "aot": lambda model: aot_export_module(model, (X,), trace_joint=False),
    "jit": lambda model: torch.jit.trace(model, X),
}


@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("name", TRACERS)
def test_tracing_of_sharded_model_raises(single_group: int, name: str, used: bool) -> None:
    model = make_sharded_model(used)
    with pytest.raises(RuntimeError, match="FSDPSequential cannot be exported or traced after"):
        TRACERS[name](model)
    assert_trains(model)


@pytest.mark.parametrize("used", [False, True])
def test_strict_export_raises_in_dynamo(single_group: int, used: bool) -> None:
    model = make_sharded_model(used)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.export.export(model, (X,), strict=True)
    assert_trains(model)


def test_symbolic_trace_before_first_forward_raises_and_model_trains(single_group: int) -> None:
    model = nn.Sequential(make_model())
    fully_shard(model[0])
    with pytest.raises(TraceError, match="symbolically traced variables") as caught:
        torch.fx.symbolic_trace(model)
    message = "".join(traceback.format_exception_only(caught.value))  # with notes
    assert "Trace the model before fully_shard" in message
    assert_trains(model)


def test_first_forward_on_fake_tensors_raises(single_group: int) -> None:
    """torch's FSDP2 would keep the fake parameters."""
    model = make_sharded_model()
    with pytest.raises(RuntimeError, match="first forward of FSDPSequential cannot run on fake"):
        forward_fake_tensor(model)
    assert_trains(model)


def test_later_forward_on_fake_tensors_returns_fake_tensor_and_model_trains(
    single_group: int,
) -> None:
    model = make_sharded_model(True)
    assert isinstance(forward_fake_tensor(model), FakeTensor)
    assert_trains(model)


def test_forward_on_fake_tensors_raises_for_parameters_of_several_ranks(fake_group: int) -> None:
    """torch's FSDP2 writes fake data into the unsharded parameters that it keeps."""
    model = make_sharded_model()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="real parameters from 8 ranks"):
            forward_fake_tensor(model)
        model(X).sum().backward()


def test_forward_of_model_of_fake_tensors_returns_fake_tensor(single_group: int) -> None:
    mesh = init_device_mesh("cpu", (1,))
    with FakeTensorMode():
        model = fully_shard(make_model(), mesh=mesh)
        assert isinstance(model(torch.ones(2, 4)), FakeTensor)


def test_make_fx_on_real_tensors_runs_model(single_group: int) -> None:
    model = make_sharded_model()
    make_fx(model)(X)
    assert_trains(model)


def train_with_mutation_allowed(model: nn.Module, steps: int = 3) -> None:
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        for _ in range(steps):
            model(X).sum().backward()


def test_allow_mutation_on_saved_tensors_with_reshard_raises(fake_group: int) -> None:
    """The context would clone freed parameters. torch's FSDP2 raises another message."""
    model = make_sharded_model()
    with pytest.raises(RuntimeError, match="Linear is resharded after forward, and allow_mutation"):
        train_with_mutation_allowed(model)
    model(X).sum().backward()


def test_allow_mutation_on_saved_tensors_without_reshard_trains(fake_group: int) -> None:
    root_only = fully_shard(make_model())  # a root is not resharded after forward
    blocks = make_model()
    fully_shard(blocks[0], reshard_after_forward=False)
    fully_shard(blocks)
    for model in (root_only, blocks):
        train_with_mutation_allowed(model)
        assert all(param.grad is not None for param in model.parameters())


@pytest.mark.parametrize("has_replicas", [False, True])
def test_allow_mutation_on_saved_tensors_trains_shards_of_one_rank(
    fake_group: int, has_replicas: bool
) -> None:
    """The unsharded parameters are the memory of the shards, which is not freed.

    torch's FSDP2 also trains, but sometimes on clones of freed memory.
    """
    mesh = init_device_mesh("cpu", (8, 1), mesh_dim_names=("replicate", "shard"))
    mesh = mesh if has_replicas else mesh["shard"]
    model, reference = make_model(), make_model()
    for module in (model[0], model[2], model):
        fully_shard(module, mesh=mesh)
    for trained in (model, reference):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.5)
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            for _ in range(3):
                trained(X).square().sum().backward()
                optimizer.step()
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), expected)  # type: ignore[attr-defined]


@pytest.mark.parametrize("param_dtype", [torch.bfloat16, torch.float32])
def test_allow_mutation_on_saved_tensors_with_cast_of_shard_of_one_rank_raises(
    single_group: int, param_dtype: torch.dtype
) -> None:
    blocks = make_model()
    policy = MixedPrecisionPolicy(param_dtype=param_dtype)
    for module in (blocks[0], blocks):
        fully_shard(module, mp_policy=policy)
    if param_dtype == torch.float32:
        state = {name: value.bfloat16() for name, value in blocks.state_dict().items()}
        blocks.load_state_dict(state, assign=True)
    with pytest.raises(RuntimeError, match="Linear is resharded after forward"):
        train_with_mutation_allowed(blocks)
