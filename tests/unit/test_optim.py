"""Optimizer steps on shards: parameters, states and checkpoints are torch's, bit for bit."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import releases
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import fsdp_c
from fsdp_c import optim

pytestmark = pytest.mark.usefixtures("fake_group")

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

KINDS: dict[str, Make] = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "SGD momentum": lambda p: torch.optim.SGD(
        p, 0.1, momentum=0.9, dampening=0.1, weight_decay=0.1
    ),
    "SGD nesterov foreach": lambda p: torch.optim.SGD(
        p, 0.1, momentum=0.9, nesterov=True, foreach=True
    ),
    "Adam amsgrad": lambda p: torch.optim.Adam(p, amsgrad=True, weight_decay=0.1, maximize=True),
    "AdamW": lambda p: torch.optim.AdamW(p),
    "AdamW foreach": lambda p: torch.optim.AdamW(p, foreach=True),
    "AdamW fused": lambda p: torch.optim.AdamW(p, fused=True),
    "AdamW tensor lr": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01)),
    "NAdam": lambda p: torch.optim.NAdam(p, decoupled_weight_decay=True, weight_decay=0.1),
    "RAdam": lambda p: torch.optim.RAdam(p),
    "Adamax": lambda p: torch.optim.Adamax(p),
    "Adadelta": lambda p: torch.optim.Adadelta(p),
    "Adagrad": lambda p: torch.optim.Adagrad(p, initial_accumulator_value=0.5, lr_decay=0.1),
    "RMSprop": lambda p: torch.optim.RMSprop(p, momentum=0.9, centered=True),
    "ASGD": lambda p: torch.optim.ASGD(p),
}
ONLY_ACCELERATED: dict[str, Make] = {
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Rprop": lambda p: torch.optim.Rprop(p),
}
"""torch has no way of doing these with DTensors (Rprop: before 2.15)."""


@pytest.fixture(autouse=True)
def nothing_by_itself() -> Iterator[None]:
    yield
    optim.restore_all()


def model(plain: bool = False) -> nn.Module:
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(9, 11), nn.Linear(11, 8, bias=False))
    ignored = {whole[0].bias} if plain else set()
    return fsdp_c.fully_shard(whole, ignored_params=ignored)


def set_gradients(params: list[nn.Parameter], seed: int) -> None:
    torch.manual_seed(seed)
    for param in params:
        if isinstance(param, DTensor):
            local = torch.randn_like(param._local_tensor)
            param.grad = DTensor(local, param._spec, requires_grad=False)
        else:
            param.grad = torch.randn_like(param)


def local_of(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value


def train(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], first: int = 0) -> None:
    for step in range(first, first + 3):
        set_gradients(params, step)
        optimizer.step()


def same(one: Any, other: Any) -> bool:
    """Equal in kind and bits, containers too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, torch.Tensor):
        specs = getattr(one, "_spec", None) == getattr(other, "_spec", None)
        return specs and torch.equal(local_of(one), local_of(other))
    return bool(one == other)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_states_and_checkpoints_are_torchs(kind: str, plain: bool) -> None:
    found = []
    for accelerated in (False, True):
        params = list(model(plain).parameters())
        optimizer = KINDS[kind](params)
        if accelerated:
            assert optim.accelerate(optimizer) is optimizer
        try:
            train(optimizer, params)
        except RuntimeError as error:  # one operator for DTensors and tensors
            assert plain and not accelerated and "mixed torch.Tensor and DTensor" in str(error)
            return
        found.append((params, optimizer.state_dict()))
    (expected, expected_state), (params, state) = found
    assert all(map(same, params, expected))
    assert same(state, expected_state)


@pytest.mark.parametrize("kind", ONLY_ACCELERATED)
def test_what_torch_cannot_do_with_dtensors_is_what_it_does_with_shards(kind: str) -> None:
    params = list(model().parameters())
    if kind != "Rprop" or not releases.has("2.15"):
        with pytest.raises((NotImplementedError, RuntimeError)):
            train(ONLY_ACCELERATED[kind](params), params)
    params = list(model().parameters())
    shards = [nn.Parameter(local_of(param).clone()) for param in params]
    train(optim.accelerate(ONLY_ACCELERATED[kind](params)), params)
    train(ONLY_ACCELERATED[kind](shards), shards)
    assert all(torch.equal(local_of(param), shard) for param, shard in zip(params, shards))


def step_calls(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> list[str]:
    """The operators that a step runs on DTensors."""
    seen = []

    class Mode(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if any(issubclass(kind, DTensor) for kind in types):
                seen.append(str(func))
            return func(*args, **(kwargs or {}))

    set_gradients(params, 9)
    with Mode():
        optimizer.step()
    return seen


@pytest.mark.parametrize("kind", ["SGD momentum", "AdamW", "AdamW foreach"])
def test_no_operator_sees_a_dtensor(kind: str) -> None:
    params = list(model().parameters())
    optimizer = KINDS[kind](params)
    train(optimizer, params)
    assert step_calls(optimizer, params) != []
    optim.accelerate(optimizer)
    assert step_calls(optimizer, params) == []
    optim.restore(optimizer)
    assert step_calls(optimizer, params) != []


@pytest.mark.parametrize("kind", ["SGD momentum", "AdamW", "Adagrad"])
@pytest.mark.parametrize("first", [False, True])
def test_a_checkpoint_goes_from_one_to_the_other(kind: str, first: bool) -> None:
    """Saved by one, loaded by the other, both ways."""
    results = []
    for switch in (False, True):
        params = list(model().parameters())
        saver = KINDS[kind](params)
        if first and switch:
            optim.accelerate(saver)
        train(saver, params)
        file = io.BytesIO()
        torch.save(saver.state_dict(), file)
        loader = KINDS[kind](params)
        if not first and switch:
            optim.accelerate(loader)
        loader.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=False))
        train(loader, params, first=3)
        results.append(([local_of(param) for param in params], loader.state_dict()))
    assert same(*results)


def test_a_step_that_fails_leaves_nothing_behind() -> None:
    params = list(model().parameters())
    optimizer = optim.accelerate(torch.optim.SGD(params, 0.1, momentum=0.9))
    train(optimizer, params)
    expected = copy.deepcopy(optimizer.state_dict())

    def fail() -> float:
        raise ValueError("no loss")

    with pytest.raises(ValueError, match="no loss"):
        optimizer.step(fail)
    assert same(optimizer.state_dict(), expected)
    optimizer.param_groups[0]["lr"] = "much"
    with pytest.raises((TypeError, RuntimeError)):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    train(optimizer, params)
    assert set(optimizer.state) == set(params)
    assert optimizer.param_groups[0]["foreach"] is None


@pytest.mark.torch("2.13")  # fake groups of before leave what is reduced unwritten
def test_layouts_that_differ_are_torchs_business() -> None:
    """A gradient that is laid out otherwise: torch redistributes it."""
    found = []
    for accelerated in (False, True):
        torch.manual_seed(0)
        (param,) = fsdp_c.fully_shard(nn.Linear(8, 8, bias=False)).parameters()
        optimizer = torch.optim.SGD([param], lr=1.0)
        if accelerated:
            optim.accelerate(optimizer)
        mesh = param.device_mesh
        for placement in (Replicate(), Partial()):
            whole = torch.ones(8, 8)
            param.grad = DTensor.from_local(whole, mesh, [placement], run_check=False)
            optimizer.step()
        found.append(param._local_tensor.clone())
    assert found[0].shape == (1, 8)
    assert torch.equal(*found)


def test_optimizers_that_mix_elements_are_refused() -> None:
    params = list(model().parameters())
    for kind in (torch.optim.Adafactor, torch.optim.LBFGS):
        with pytest.raises(TypeError, match=f"{kind.__name__} is not one of torch's element-wise"):
            optim.accelerate(kind(params))

    class OwnStep(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    with pytest.raises(TypeError, match="OwnStep"):
        optim.accelerate(OwnStep(params))

    class OwnName(torch.optim.AdamW):
        pass

    optim.accelerate(OwnName(params))


def test_install_accelerates_what_holds_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    params, plain = list(model().parameters()), [nn.Parameter(torch.ones(3))]
    for switch, expected in (("1", []), ("0", ["DTensors"])):
        monkeypatch.setenv(optim.ENVIRONMENT_SWITCH, switch)
        optimizers = [torch.optim.AdamW(params), torch.optim.AdamW(plain)]
        fsdp_c.install()
        try:
            for optimizer, held in zip(optimizers, (params, plain)):
                train(optimizer, held)
            seen = step_calls(optimizers[0], params)
            assert bool(seen) == bool(expected)
            assert "_init_group" not in vars(optimizers[1])
        finally:
            fsdp_c.uninstall()
        assert step_calls(optimizers[0], params) != []
        assert all("_init_group" not in vars(optimizer) for optimizer in optimizers)


def test_schedulers_scalers_and_copies_work_as_before() -> None:
    params = list(model().parameters())
    optimizer = optim.accelerate(torch.optim.AdamW(params, lr=0.1, fused=True))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    train(optimizer, params)
    scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.05
    again = copy.deepcopy(optimizer)
    assert "_init_group" not in vars(again)
    train(again, [p for group in again.param_groups for p in group["params"]])


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(sorted(KINDS)),
    st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=4),
)
def test_gradients_may_come_and_go(kind: str, steps: list[list[bool]]) -> None:
    """Parameters without a gradient are not in the lists."""
    found = []
    for accelerated in (False, True):
        params = list(model().parameters())
        optimizer = KINDS[kind](params)
        if accelerated:
            optim.accelerate(optimizer)
        for number, present in enumerate(steps):
            set_gradients(params, number)
            for param, kept in zip(params, present):
                param.grad = param.grad if kept else None
            optimizer.step()
        found.append((params, optimizer.state_dict()))
        optim.restore(optimizer)
    assert same(found[0][0], found[1][0])
    assert same(found[0][1], found[1][1])


def test_a_mesh_of_two_dimensions(fake_group: int) -> None:
    found = []
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    for accelerated in (False, True):
        torch.manual_seed(0)
        params = list(fsdp_c.fully_shard(nn.Linear(8, 8), mesh=mesh).parameters())
        optimizer = torch.optim.AdamW(params)
        if accelerated:
            optim.accelerate(optimizer)
        train(optimizer, params)
        found.append((params, optimizer.state_dict()))
    assert same(*found)


# ---- recipes: lists that are made without torch's _init_group -----------------------------------


def drop_state(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    del optimizer.state[params[1]]


def empty_state(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    optimizer.state[params[0]].clear()


def replace_states(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    for state in optimizer.state.values():
        state.update({name: value.clone() for name, value in state.items()})


def reload(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def add_group(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    params += list(model().parameters())
    optimizer.add_param_group({"params": params[-2:], "lr": 0.5})


def extend_group(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    params += list(model().parameters())
    optimizer.param_groups[0]["params"] += params[-2:]


def reverse(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["params"].reverse()


def set_option(name: str, value: Any) -> Any:
    def change(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
        assert name in optimizer.param_groups[0]
        optimizer.param_groups[0][name] = value

    return change


CHANGES: dict[str, tuple[str, Any]] = {
    "a state dropped": ("AdamW", drop_state),
    "a state emptied": ("AdamW foreach", empty_state),
    "a momentum emptied": ("SGD momentum", empty_state),
    "states replaced": ("AdamW", replace_states),
    "a checkpoint loaded": ("AdamW fused", reload),
    "a group added": ("AdamW", add_group),
    "a group extended": ("AdamW foreach", extend_group),
    "a group reversed": ("SGD momentum", reverse),
    "another lr": ("AdamW", set_option("lr", 0.25)),
    "a tensor lr": ("AdamW", set_option("lr", torch.tensor(0.25))),
    "a tensor lr, refused": ("AdamW foreach", set_option("lr", torch.tensor(0.25))),
    "no momentum": ("SGD momentum", set_option("momentum", 0)),
    "momentum": ("SGD", set_option("momentum", 0.5)),
    "amsgrad": ("AdamW", set_option("amsgrad", True)),
    "no foreach": ("AdamW foreach", set_option("foreach", False)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_between_steps_is_seen(name: str) -> None:
    kind, change = CHANGES[name]
    found = []
    for accelerated in (False, True):
        params = list(model().parameters())
        optimizer = KINDS[kind](params)
        if accelerated:
            optim.accelerate(optimizer)
        train(optimizer, params)
        change(optimizer, params)
        try:
            train(optimizer, params, 3)
            raised = None
        except (KeyError, RuntimeError) as error:
            raised = repr(error)
        found.append([raised, params, optimizer.state_dict()])
    assert same(*found)


@pytest.mark.parametrize("kind", KINDS)
def test_torch_makes_the_lists_until_they_are_known(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = list(model().parameters())
    optimizer = optim.accelerate(KINDS[kind](params))
    acceleration, calls = optim._accelerated[optimizer], 0
    torchs = acceleration._init_group

    def counting(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return torchs(*args)

    monkeypatch.setattr(acceleration, "_init_group", counting)
    train(optimizer, params)
    train(optimizer, params, 3)
    assert calls == (2 if "momentum" in kind or "nesterov" in kind else 1)


def test_gradients_that_are_sparse_or_laid_out_otherwise_are_torchs() -> None:
    params = list(model(plain=True).parameters())
    optimizer = optim.accelerate(torch.optim.AdamW(params))
    train(optimizer, params)
    plain = next(param for param in params if not isinstance(param, DTensor))
    plain.grad = torch.ones_like(plain).to_sparse()
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        optimizer.step()


@pytest.mark.parametrize("kind", ["SGD momentum", "SGD nesterov foreach", "AdamW"])
def test_hooks_of_a_step_that_came_first_see_what_torch_leaves(kind: str) -> None:
    found = []
    for accelerated in (False, True):
        params = list(model().parameters())
        optimizer = KINDS[kind](params)
        seen: list[Any] = []

        def look(of: torch.optim.Optimizer, *_: Any, seen: list[Any] = seen) -> None:
            flags = [group["foreach"] for group in of.param_groups]
            seen.append((len(of.state), flags, copy.deepcopy(of.state_dict())))

        optimizer.register_step_pre_hook(look)
        optimizer.register_step_post_hook(look)
        if accelerated:
            optim.accelerate(optimizer)
        train(optimizer, params)
        found.append(seen)
    assert same(*found)


def test_a_checkpoint_after_a_step_that_failed_is_torchs() -> None:
    found = []
    for accelerated in (False, True):
        params = list(model().parameters())
        optimizer = KINDS["SGD momentum"](params)
        if accelerated:
            optim.accelerate(optimizer)
        train(optimizer, params)
        optimizer.param_groups[0]["lr"] = "no number"
        with pytest.raises(TypeError):
            train(optimizer, params)
        found.append(optimizer.state_dict()["param_groups"])
    assert same(*found)
