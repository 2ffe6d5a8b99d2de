"""What trains nothing, silently, is said once and by name, and not as a Python warning."""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import releases
import torch
import torch.distributed as dist
import torch.nn as nn
from test_explain import Block, Model, sharded, step
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import fsdp_c
from fsdp_c import fully_shard, suspicions

LOGGER = "torch.distributed.fsdp.fully_shard"
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16)


@pytest.fixture
def said(
    fake_group: int, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[], list[str]]]:
    """What was said in this test; Python warnings are errors meanwhile."""
    monkeypatch.setattr(suspicions, "_said", set())
    monkeypatch.setattr(suspicions, "_registered", {})  # other tests' models may still be there

    def lines() -> list[str]:
        return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]

    with caplog.at_level(logging.WARNING, LOGGER), warnings.catch_warnings():
        warnings.simplefilter("error")
        yield lines


Said = Callable[[], list[str]]


def train(model: Any, optimizer: torch.optim.Optimizer) -> None:
    step(model)
    optimizer.step()
    optimizer.zero_grad()


def test_a_model_without_mistakes_is_nobodys_concern(said: Said) -> None:
    model = sharded(mp_policy=MIXED)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    for _ in range(2):
        train(model, optimizer)
    model.load_state_dict(model.state_dict(), assign=True)
    train(model, torch.optim.SGD(model.parameters()))
    assert said() == []


def test_transport_with_unknown_value_is_reported(
    said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FSDP_C_TRANSPORT", "gloo")
    step(sharded())
    assert said() == []
    monkeypatch.setenv("FSDP_C_TRANSPORT", "sockets")
    step(sharded())
    (line,) = said()
    assert "FSDP_C_TRANSPORT=sockets" in line and '"direct"' in line and '"gloo"' in line


# ---- backwards that raise ------------------------------------------------------------------------


def test_a_backward_that_raised_and_the_forward_after_it(said: Said) -> None:
    model = sharded()
    output = model(torch.ones(2, 8))
    model.embed.register_full_backward_pre_hook(lambda *unused: 1 / 0)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            model(torch.ones(2, 8)).sum().backward()
    (line,) = said()
    assert "the backward before this forward of FSDPModel did not come to its end" in line
    assert "zero_grad()" in line
    assert output.grad_fn is not None


@pytest.mark.parametrize("reentrant", [False, True])
def test_forwards_within_a_backward_follow_none_that_raised(said: Said, reentrant: bool) -> None:
    model = sharded()
    step(model)
    x = torch.ones(2, 8, requires_grad=True)
    for _ in range(2):
        y = x
        for block in model.blocks:
            y = checkpoint(block, y, use_reentrant=reentrant)
        checkpoint(model, y, use_reentrant=reentrant).sum().backward()
        assert model.head.weight.grad is not None
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    torch.autograd.grad(loss, x, retain_graph=True)
    model(x)
    loss.backward()
    model(x)
    assert said() == []


def test_a_backward_from_within_a_backward(said: Said) -> None:
    model, inner = sharded(), sharded()

    def nested(grad: torch.Tensor) -> None:
        with torch.enable_grad():
            model(torch.ones(2, 8)).sum().backward()
            inner(torch.ones(2, 8)).sum().backward()

    for _ in range(2):
        output = model(torch.ones(2, 8))
        output.register_hook(nested)
        output.sum().backward()
        step(model)
    assert said() == []


def test_an_end_of_a_backward_that_fails(said: Said) -> None:
    """The call-back itself raises: the next forward starts over."""
    model = sharded()
    with pytest.MonkeyPatch.context() as patch:
        group = releases.groups_of(model._get_fsdp_state())[0]
        patch.setattr(type(group), "finalize_backward", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            step(model)
    step(model)
    (line,) = said()
    assert "did not come to its end" in line
    assert model._get_fsdp_state()._state_ctx.post_backward_final_callback_queued is False


# ---- optimizers ----------------------------------------------------------------------------------


def test_an_optimizer_made_before_sharding(said: Said) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sharded(model)
    for _ in range(2):
        train(model, optimizer)
    (line,) = said()
    assert "SGD holds 15 of 15 parameters as they were before sharding ('embed.weight', " in line
    assert line.endswith("Build it after the last fully_shard")


def test_an_optimizer_of_parts_made_before_and_after(said: Said) -> None:
    model = Model()
    before = model.head.weight
    sharded(model)
    train(model, torch.optim.SGD([before, model.embed.weight], lr=0.1))
    assert "SGD holds 1 of 2 parameters as they were before sharding ('head.weight')" in said()[0]


def test_an_optimizer_whose_parameters_were_exchanged_in_time(said: Said) -> None:
    """As accelerate does it."""
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.param_groups[0]["params"] = list(sharded(model).parameters())
    train(model, optimizer)
    assert said() == []


def test_an_optimizer_of_a_refused_sharding(said: Said) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model.scale = nn.Parameter(torch.tensor(1.0))
    with pytest.raises(ValueError, match="scalar"):
        fully_shard(model)
    train(model, optimizer)
    assert said() == []


def test_replicas_are_watched_too(said: Said) -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fsdp_c.replicate(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, about views
        train(model, optimizer)
    assert "SGD holds 15 of 15 parameters" in said()[0]


# ---- parameters ----------------------------------------------------------------------------------


def test_a_parameter_replaced_after_the_first_step(said: Said) -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    model.head.weight = nn.Parameter(torch.zeros(8, 8))
    for _ in range(2):
        train(model, optimizer)
    (line,) = said()
    assert line.startswith("fsdp_c: 'head.weight' were replaced after sharding")


def test_parameters_of_other_modules_may_be_replaced(said: Said) -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    other = nn.Linear(8, 8)
    other.weight = nn.Parameter(torch.zeros(8, 8))
    model.head.extra = nn.Parameter(torch.zeros(8))
    train(model, optimizer)
    assert said() == []


# ---- units ---------------------------------------------------------------------------------------


def test_blocks_left_in_the_root(said: Said) -> None:
    model = fully_shard(Model())
    step(model)  # type: ignore[arg-type]
    (line,) = said()
    assert line.startswith("fsdp_c: 'blocks.0', 'blocks.1', 'blocks.2' are repeated layers but no")


def test_a_policy_on_blocks_but_not_on_the_root(said: Said) -> None:
    class Casts(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).float()

    model = Model()
    model.blocks = nn.ModuleList(Casts() for _ in range(3))
    for block in model.blocks:
        fully_shard(block, mp_policy=MIXED)
    step(fully_shard(model))  # type: ignore[arg-type]
    (line,) = said()
    assert "the blocks compute in bfloat16, but 'embed.weight', 'embed.bias', 'head.weight'" in line


def test_a_unit_several_times_larger_than_the_median(
    said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    def model() -> Any:
        found = Model()
        found.head = nn.Linear(8, 4096)
        return sharded(found)

    step(model())
    assert said() == []  # small models are nobody's concern
    monkeypatch.setattr(suspicions, "_LARGE", 64 * 2**10)
    step(model())
    (line,) = said()
    size = 4 * (72 + 8 * 4096 + 4096)
    assert line.startswith(
        f"fsdp_c: the unit '(root)' gathers 0 MiB, {size / 1120:.1f} times what the median unit "
        "does, mostly 'head.weight', 'head.bias'"
    )


def test_data_parallel_inside(said: Said) -> None:
    model = Model()
    model.head = DistributedDataParallel(model.head)  # type: ignore[assignment]
    step(sharded(model))
    assert said()[0].startswith("fsdp_c: 'head' are DistributedDataParallel")


# ---- arguments -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"offload_policy": True}, "offload_policy=True offloads nothing"),
        ({"mp_policy": MixedPrecisionPolicy}, "the class MixedPrecisionPolicy: pass an object"),
        ({"ignored_params": {"head.weight"}}, "ignored_params has a str in it"),
        ({"ignored_params": {nn.Linear(1, 1)}}, "ignored_params has a Linear in it"),
    ],
)
def test_arguments_that_do_nothing(said: Said, arguments: dict[str, Any], match: str) -> None:
    if "mp_policy" in arguments and releases.has("2.15"):
        with pytest.raises(TypeError):  # in torch, too
            fully_shard(nn.Linear(8, 8), **arguments)
        return
    fully_shard(nn.Linear(8, 8), **arguments)
    (line,) = said()
    assert match in line
    fully_shard(nn.Linear(8, 8), offload_policy=None, ignored_params=set())  # type: ignore[call-overload]
    assert len(said()) == 1


# ---- how it is said ------------------------------------------------------------------------------


def test_each_is_said_once(said: Said) -> None:
    for _ in range(2):
        step(fully_shard(Model()))  # type: ignore[arg-type]
    assert len(said()) == 1


def test_only_rank_0_speaks(said: Said) -> None:
    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=8)
    step(fully_shard(Model()))  # type: ignore[arg-type]
    assert said() == []


def test_a_failure_of_the_search_fails_nothing(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: Any) -> None:
        raise OSError("odd module")

    monkeypatch.setattr(suspicions, "blocks_in_root", fails)
    step(fully_shard(Model()))  # type: ignore[arg-type]
    assert said() == []


def test_models_and_optimizers_are_not_kept(said: Said) -> None:
    import gc
    import weakref

    model = sharded()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train(model, optimizer)
    model.head.weight = nn.Parameter(torch.zeros(8, 8))
    found = [weakref.ref(model), weakref.ref(optimizer), weakref.ref(model.head)]
    del model, optimizer
    gc.collect()
    assert [one() for one in found] == [None, None, None]


def test_no_parameter_has_a_weak_reference(fake_group: int) -> None:
    """torch.utils.swap_tensors, and so module.to() and load_state_dict(), refuses those."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    originals = list(model.parameters())
    fully_shard(model)
    model[0].weight = nn.Parameter(torch.ones(8, 8))
    everything = [*originals, *model.parameters()]
    assert [weakref.getweakrefcount(param) for param in everything] == [0] * len(everything)
