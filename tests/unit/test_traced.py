"""Tracers and fake tensors: refused where they would spoil the model, which stays usable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch._functorch.aot_autograd import aot_export_module
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.fx.experimental.proxy_tensor import make_fx

from fsdp_c import fully_shard

X = torch.ones(2, 4)


def plain() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def sharded(used: bool = False) -> Any:
    model = plain()
    fully_shard(model[0])
    fully_shard(model[2])
    fully_shard(model)
    if used:
        model(X).sum().backward()
        model.zero_grad()
    return model


def expect_usable(model: nn.Module) -> None:
    """A step has the plain model's numbers."""
    reference = plain()
    output, expected = model(X), reference(X)
    assert type(output) is torch.Tensor and torch.equal(output, expected)
    output.sum().backward()
    expected.sum().backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        local = ours.grad.to_local()  # type: ignore[union-attr]
        assert type(local) is torch.Tensor and torch.equal(local, theirs.grad)


def on_fake_tensors(model: nn.Module) -> Any:
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
def test_a_graph_is_refused(single_group: int, name: str, used: bool) -> None:
    model = sharded(used)
    with pytest.raises(RuntimeError, match="FSDPSequential cannot be exported or traced after"):
        TRACERS[name](model)
    expect_usable(model)


@pytest.mark.parametrize("used", [False, True])
def test_strict_export_is_refused_by_dynamo(single_group: int, used: bool) -> None:
    model = sharded(used)
    with pytest.raises(torch._dynamo.exc.Unsupported):
        torch.export.export(model, (X,), strict=True)
    expect_usable(model)


def test_the_first_forward_is_not_on_fake_tensors(single_group: int) -> None:
    """torch's keeps the fake parameters for good."""
    model = sharded()
    with pytest.raises(RuntimeError, match="first forward of FSDPSequential cannot run on fake"):
        on_fake_tensors(model)
    expect_usable(model)


def test_a_later_forward_may_be(single_group: int) -> None:
    model = sharded(True)
    assert isinstance(on_fake_tensors(model), FakeTensor)
    expect_usable(model)


def test_a_model_of_fake_tensors_is_traced_as_before(single_group: int) -> None:
    mesh = init_device_mesh("cpu", (1,))
    with FakeTensorMode():
        model = fully_shard(plain(), mesh=mesh)
        assert isinstance(model(torch.ones(2, 4)), FakeTensor)


def test_real_make_fx_runs_the_model(single_group: int) -> None:
    model = sharded()
    make_fx(model)(X)
    expect_usable(model)


def under_mutations(model: nn.Module, steps: int = 3) -> None:
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        for _ in range(steps):
            model(X).sum().backward()


def test_a_context_that_would_clone_freed_memory_is_refused(fake_group: int) -> None:
    """It ended the process; torch's FSDP2 fails in it, too, in other words."""
    model = sharded()
    with pytest.raises(RuntimeError, match="Linear is resharded after forward, and allow_mutation"):
        under_mutations(model)
    model(X).sum().backward()


def test_the_same_where_nothing_is_freed(fake_group: int) -> None:
    model = fully_shard(plain())  # a root stays unsharded
    under_mutations(model)
    blocks = plain()
    fully_shard(blocks[0], reshard_after_forward=False)
    fully_shard(blocks)
    under_mutations(blocks)
