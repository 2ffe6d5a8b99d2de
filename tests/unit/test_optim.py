"""Accelerated optimizer steps give parameters, states and checkpoints bit-equal to torch."""

from __future__ import annotations

import copy
import importlib
import io
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import Mock

import numpy
import pytest
import releases
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st
from recorded_operators import RecordedOperators
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate

import fsdp_c
from fsdp_c import optim

pytestmark = pytest.mark.usefixtures("fake_group")

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

KINDS: dict[str, MakeOptimizer] = {
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
# torch cannot run these on DTensors (Rprop: before 2.15).
ONLY_ACCELERATED: dict[str, MakeOptimizer] = {
    "SGD fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adagrad fused": lambda p: torch.optim.Adagrad(p, fused=True),
    "Rprop": lambda p: torch.optim.Rprop(p),
}
# An optimizer of torch, and an accelerated one.
ADAMW: list[MakeOptimizer] = [KINDS["AdamW"], lambda p: optim.accelerate(KINDS["AdamW"](p))]


@pytest.fixture(autouse=True)
def restore_optimizers() -> Iterator[None]:
    """Removes the acceleration of all optimizers after each test."""
    yield
    optim.restore_all()


def make_model(plain: bool = False) -> nn.Module:
    """Returns a sharded model. With ``plain``, one of its parameters is an ignored plain tensor."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(9, 11), nn.Linear(11, 8, bias=False))
    ignored = {model[0].bias} if plain else set()
    return fsdp_c.fully_shard(model, ignored_params=ignored)


def make_params(plain: bool = False) -> list[nn.Parameter]:
    return list(make_model(plain).parameters())


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


def is_equal(left: Any, right: Any) -> bool:
    """Compares types and bits, recursively in containers. DTensors also compare their specs."""
    if type(left) is not type(right):
        return False
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(is_equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(is_equal, left, right))
    if isinstance(left, torch.Tensor):
        specs_equal = getattr(left, "_spec", None) == getattr(right, "_spec", None)
        return specs_equal and torch.equal(local_of(left), local_of(right))
    return bool(left == right)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_accelerated_optimizer_step_gives_parameters_and_states_of_torch(
    kind: str, plain: bool
) -> None:
    results = []
    for accelerated in (False, True):
        params = make_params(plain)
        optimizer = KINDS[kind](params)
        if accelerated:
            assert optim.accelerate(optimizer) is optimizer
        try:
            train(optimizer, params)
        except RuntimeError as error:  # torch mixes both kinds in one foreach operator
            assert plain and not accelerated and "mixed torch.Tensor and DTensor" in str(error)
            params = [nn.Parameter(local_of(param).clone()) for param in make_params(plain)]
            optimizer = KINDS[kind](params)
            train(optimizer, params)
        results.append((params, optimizer.state_dict()))
    (expected, expected_state), (params, state) = results
    if any(isinstance(param, DTensor) for param in expected):
        assert all(map(is_equal, params, expected))
        assert is_equal(state, expected_state)
    else:
        assert all(map(torch.equal, map(local_of, params), expected))


@pytest.mark.parametrize("devices", [["cuda"], ["cpu", "cuda"]])
@pytest.mark.parametrize("kind", KINDS)
def test_step_after_accelerate_uses_foreach_only_where_torch_does(
    kind: str, devices: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On devices with foreach kernels, such as CUDA, these are torch's default for DTensors. Their
    last bits differ from those of the for-loop."""
    optimizers = importlib.import_module("torch.optim.optimizer")
    monkeypatch.setattr(optimizers, "_get_foreach_kernels_supported_devices", lambda: devices)
    foreach, results = [], []
    for accelerated in (False, True):
        params = make_params()
        optimizer = KINDS[kind](params)
        if accelerated:
            optim.accelerate(optimizer)
        with RecordedOperators() as calls:
            train(optimizer, params)
        foreach.append(any("_foreach_" in name for name in calls.names))
        results.append((params, optimizer.state_dict()))
    assert foreach[0] == foreach[1]
    assert foreach[0] or "cpu" not in devices or "fused" in kind or "tensor lr" in kind
    assert all(map(is_equal, *(params for params, _ in results)))
    assert is_equal(*(state for _, state in results))


@pytest.mark.parametrize("kind", ONLY_ACCELERATED)
def test_accelerated_step_unsupported_by_dtensor_equals_step_on_local_shards(kind: str) -> None:
    params = make_params()
    if kind != "Rprop" or not releases.has("2.15"):
        with pytest.raises((NotImplementedError, RuntimeError)):
            train(ONLY_ACCELERATED[kind](params), params)
    params = make_params()
    shards = [nn.Parameter(local_of(param).clone()) for param in params]
    train(optim.accelerate(ONLY_ACCELERATED[kind](params)), params)
    train(ONLY_ACCELERATED[kind](shards), shards)
    assert all(torch.equal(local_of(param), shard) for param, shard in zip(params, shards))


@pytest.mark.parametrize("make", ADAMW, ids=["torch", "accelerated"])
def test_backward_of_graph_from_before_a_step_raises(make: MakeOptimizer) -> None:
    """The graph of a penalty has saved the sharded parameters, which the step then writes."""
    params = make_params()
    optimizer = make(params)
    for _ in range(2):  # the second accelerated step uses the recipe of the first
        set_gradients(params, 3)
        penalties = [param.square().to_local().sum() for param in params]
        optimizer.step()
        for penalty in penalties:
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                penalty.backward()


def record_dtensor_operators(
    optimizer: torch.optim.Optimizer, params: list[nn.Parameter]
) -> list[str]:
    """Runs a step. Returns the names of the operators that received a DTensor."""
    operators = []

    class RecordDTensorOperators(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            if any(issubclass(kind, DTensor) for kind in types):
                operators.append(str(func))
            return func(*args, **(kwargs or {}))

    set_gradients(params, 9)
    with RecordDTensorOperators():
        optimizer.step()
    return operators


@pytest.mark.parametrize("kind", ["SGD momentum", "AdamW", "AdamW foreach"])
def test_accelerated_step_runs_no_operator_on_dtensors(kind: str) -> None:
    params = make_params()
    optimizer = KINDS[kind](params)
    train(optimizer, params)
    assert record_dtensor_operators(optimizer, params) != []
    optim.accelerate(optimizer)
    assert record_dtensor_operators(optimizer, params) == []
    optim.restore(optimizer)
    assert record_dtensor_operators(optimizer, params) != []


@pytest.mark.parametrize("kind", ["SGD momentum", "AdamW", "Adagrad"])
@pytest.mark.parametrize("first", [False, True])
def test_checkpoint_moves_between_accelerated_and_torch_optimizer(kind: str, first: bool) -> None:
    """With ``first`` the accelerated optimizer saves, otherwise it loads."""
    results = []
    for accelerated in (False, True):
        params = make_params()
        saver = KINDS[kind](params)
        if first and accelerated:
            optim.accelerate(saver)
        train(saver, params)
        file = io.BytesIO()
        torch.save(saver.state_dict(), file)
        loader = KINDS[kind](params)
        if not first and accelerated:
            optim.accelerate(loader)
        loader.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=False))
        train(loader, params, first=3)
        results.append(([local_of(param) for param in params], loader.state_dict()))
    assert is_equal(*results)


def test_exception_in_closure_leaves_state_dict_of_accelerated_optimizer_unchanged() -> None:
    params = make_params()
    optimizer = optim.accelerate(torch.optim.SGD(params, 0.1, momentum=0.9))
    train(optimizer, params)
    expected = copy.deepcopy(optimizer.state_dict())

    def fail() -> float:
        raise ValueError("no loss")

    with pytest.raises(ValueError, match="no loss"):
        optimizer.step(fail)
    assert is_equal(optimizer.state_dict(), expected)


def test_accelerated_optimizer_trains_after_a_step_that_failed() -> None:
    params = make_params()
    optimizer = optim.accelerate(torch.optim.SGD(params, 0.1, momentum=0.9))
    train(optimizer, params)
    optimizer.param_groups[0]["lr"] = "much"
    with pytest.raises((TypeError, RuntimeError)):
        optimizer.step()
    optimizer.param_groups[0]["lr"] = 0.1
    train(optimizer, params)
    assert set(optimizer.state) == set(params)
    assert optimizer.param_groups[0]["foreach"] is None


@pytest.mark.torch("2.13")  # the fake group of older releases does not write reduced tensors
def test_gradient_with_other_placement_is_redistributed_by_torch() -> None:
    results = []
    for accelerated in (False, True):
        torch.manual_seed(0)
        (param,) = fsdp_c.fully_shard(nn.Linear(8, 8, bias=False)).parameters()
        optimizer = torch.optim.SGD([param], lr=1.0)
        if accelerated:
            optim.accelerate(optimizer)
        mesh = param.device_mesh
        for placement in (Replicate(), Partial()):
            local = torch.ones(8, 8)
            param.grad = DTensor.from_local(local, mesh, [placement], run_check=False)
            optimizer.step()
        results.append(param._local_tensor.clone())
    assert results[0].shape == (1, 8)
    assert torch.equal(*results)


def test_accelerate_of_optimizer_that_is_not_element_wise_raises() -> None:
    params = make_params()
    for kind in (torch.optim.Adafactor, torch.optim.LBFGS):
        with pytest.raises(TypeError, match=f"{kind.__name__} is not one of torch's element-wise"):
            optim.accelerate(kind(params))


def test_accelerate_accepts_only_subclasses_that_do_not_override_step() -> None:
    class OverridesStep(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            return super().step(closure)

    class OverridesNothing(torch.optim.AdamW):
        pass

    params = make_params()
    with pytest.raises(TypeError, match="OverridesStep"):
        optim.accelerate(OverridesStep(params))
    optim.accelerate(OverridesNothing(params))


def test_install_accelerates_optimizers_of_sharded_parameters_unless_switched_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params, plain = make_params(), [nn.Parameter(torch.ones(3))]
    for value, uses_dtensors in (("1", False), ("0", True)):
        monkeypatch.setenv(optim.ENVIRONMENT_SWITCH, value)
        optimizers = [torch.optim.AdamW(params), torch.optim.AdamW(plain)]
        fsdp_c.install()
        try:
            for optimizer, optimized in zip(optimizers, (params, plain)):
                train(optimizer, optimized)
            operators = record_dtensor_operators(optimizers[0], params)
            assert bool(operators) == uses_dtensors
            assert (optimizers[0] in optim._accelerated) == (not uses_dtensors)
            assert optimizers[1] not in optim._accelerated
        finally:
            fsdp_c.uninstall()
        assert record_dtensor_operators(optimizers[0], params) != []
        assert len(optim._accelerated) == 0


def test_optimizer_restored_after_install_steps_dtensors_until_it_is_accelerated() -> None:
    params = make_params()
    fsdp_c.install()
    try:
        optimizer = torch.optim.AdamW(params)
        train(optimizer, params)
        optim.restore(optimizer)
        assert record_dtensor_operators(optimizer, params) != []
        optim.accelerate(optimizer)
        assert record_dtensor_operators(optimizer, params) == []
        optim.restore(optimizer)
        fsdp_c.uninstall()
        fsdp_c.install()
        assert record_dtensor_operators(optimizer, params) == []
    finally:
        fsdp_c.uninstall()


def test_init_group_of_instance_is_called_in_each_accelerated_step() -> None:
    params = make_params()
    optimizer = optim.accelerate(torch.optim.AdamW(params))
    train(optimizer, params)
    wrapper = Mock(wraps=optimizer._init_group)
    optimizer._init_group = wrapper  # type: ignore[method-assign]
    train(optimizer, params)
    assert wrapper.call_count == 3
    assert vars(optimizer)["_init_group"] is wrapper
    del optimizer._init_group
    assert record_dtensor_operators(optimizer, params) == []


def test_scheduled_copy_of_accelerated_optimizer_trains_as_that_of_torch() -> None:
    results = []
    for make in ADAMW:
        params = make_params()
        optimizer = make(params)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        train(optimizer, params)
        scheduler.step()
        copied = copy.deepcopy(optimizer)
        train(copied, copied.param_groups[0]["params"], 3)
        results.append(copied.state_dict() | copied.param_groups[0])
    assert is_equal(*results) and results[0]["lr"] == 0.0005


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(KINDS)),
    st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=4),
)
def test_accelerated_steps_with_missing_gradients_equal_torch(
    kind: str, steps: list[list[bool]]
) -> None:
    """A parameter without a gradient is not in the tensor lists of the step."""
    results = []
    for accelerated in (False, True):
        params = make_params()
        optimizer = KINDS[kind](params)
        if accelerated:
            optim.accelerate(optimizer)
        for number, present in enumerate(steps):
            set_gradients(params, number)
            for param, has_grad in zip(params, present):
                param.grad = param.grad if has_grad else None
            optimizer.step()
        results.append((params, optimizer.state_dict()))
        optim.restore(optimizer)
    assert is_equal(results[0][0], results[1][0])
    assert is_equal(results[0][1], results[1][1])


def test_accelerated_step_on_two_dimensional_mesh_equals_torch(fake_group: int) -> None:
    results = []
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    for make in ADAMW:
        torch.manual_seed(0)
        params = list(fsdp_c.fully_shard(nn.Linear(8, 8), mesh=mesh).parameters())
        optimizer = make(params)
        train(optimizer, params)
        results.append((params, optimizer.state_dict()))
    assert is_equal(*results)


# ---- cached tensor lists, which replace calls of torch's _init_group ----------------------------


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
    params += make_params()
    optimizer.add_param_group({"params": params[-2:], "lr": 0.5})


def extend_group(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    params += make_params()
    optimizer.param_groups[0]["params"] += params[-2:]


def reverse_group(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
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
    "a group reversed": ("SGD momentum", reverse_group),
    "another lr": ("AdamW", set_option("lr", 0.25)),
    "a tensor lr": ("AdamW", set_option("lr", torch.tensor(0.25))),
    "a tensor lr, refused": ("AdamW foreach", set_option("lr", torch.tensor(0.25))),
    "no momentum": ("SGD momentum", set_option("momentum", 0)),
    "momentum": ("SGD", set_option("momentum", 0.5)),
    "amsgrad": ("AdamW", set_option("amsgrad", True)),
    "no foreach": ("AdamW foreach", set_option("foreach", False)),
}


@pytest.mark.parametrize("name", CHANGES)
def test_optimizer_changed_between_accelerated_steps_equals_torch(name: str) -> None:
    kind, change = CHANGES[name]
    results = []
    for accelerated in (False, True):
        params = make_params()
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
        results.append([raised, params, optimizer.state_dict()])
    assert is_equal(*results)


@pytest.mark.parametrize(
    ("kind", "name", "off", "on"),
    [
        ("SGD", "momentum", numpy.float64(0), numpy.float64(0.5)),
        ("SGD", "momentum", torch.tensor(0.0), torch.tensor(0.5)),
        ("AdamW", "amsgrad", numpy.False_, numpy.True_),
    ],
    ids=["float64", "tensor", "bool"],
)
def test_accelerated_step_after_option_changes_from_off_to_on_matches_torch(
    kind: str, name: str, off: Any, on: Any
) -> None:
    results = []
    for accelerated in (False, True):
        params = make_params()
        optimizer = KINDS[kind](params)
        set_option(name, off)(optimizer, params)
        if accelerated:
            optim.accelerate(optimizer)
        train(optimizer, params)
        set_option(name, on)(optimizer, params)
        raised = None
        try:
            train(optimizer, params, 3)
        except KeyError as error:  # torch does not add the state of amsgrad to existing states
            raised = repr(error)
        results.append([raised, params, optimizer.state_dict()])
    assert is_equal(*results)


@pytest.mark.parametrize("kind", KINDS)
def test_init_group_is_called_only_until_lists_are_cached(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = make_params()
    optimizer = optim.accelerate(KINDS[kind](params))
    acceleration, calls = optim._accelerated[optimizer], 0
    init_group = acceleration._init_group

    def counting_init_group(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return init_group(*args)

    monkeypatch.setattr(acceleration, "_init_group", counting_init_group)
    train(optimizer, params)
    train(optimizer, params, 3)
    assert calls == (2 if "momentum" in kind or "nesterov" in kind else 1)


def test_accelerated_step_with_sparse_gradient_raises_as_in_torch() -> None:
    errors = []
    for make in ADAMW:
        params = make_params(plain=True)
        optimizer = make(params)
        train(optimizer, params)
        plain = next(param for param in params if not isinstance(param, DTensor))
        plain.grad = torch.ones_like(plain).to_sparse()
        with pytest.raises(RuntimeError, match="does not support sparse gradients") as caught:
            optimizer.step()
        errors.append(str(caught.value))
    assert errors[0] == errors[1]


@pytest.mark.parametrize("kind", ["SGD momentum", "SGD nesterov foreach", "AdamW"])
def test_step_hooks_observe_same_optimizer_as_in_torch(kind: str) -> None:
    results = []
    for accelerated in (False, True):
        params = make_params()
        optimizer = KINDS[kind](params)
        records: list[Any] = []

        def record(hooked: torch.optim.Optimizer, *_: Any, records: list[Any] = records) -> None:
            flags = [group["foreach"] for group in hooked.param_groups]
            records.append((len(hooked.state), flags, copy.deepcopy(hooked.state_dict())))

        optimizer.register_step_pre_hook(record)
        optimizer.register_step_post_hook(record)
        if accelerated:
            optim.accelerate(optimizer)
        train(optimizer, params)
        results.append(records)
    assert is_equal(*results)


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("kind", ["SGD momentum", "SGD nesterov foreach"])
def test_state_dict_after_failed_accelerated_step_equals_torch(kind: str, steps: int) -> None:
    results = []
    for accelerated in (False, True):
        params = make_params()
        optimizer = KINDS[kind](params)
        if accelerated:
            optim.accelerate(optimizer)
        if steps > 0:
            train(optimizer, params)
        optimizer.param_groups[0]["lr"] = "no number"
        with pytest.raises(TypeError):
            train(optimizer, params)
        results.append(copy.deepcopy(optimizer.state_dict()))
    assert is_equal(*results)
