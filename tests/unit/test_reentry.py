"""User code called by fsdp_c that resets the iteration, raises, or changes returned lists."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fsdp_c import MixedPrecisionPolicy, fully_shard
from fsdp_c._runtime.mixed_precision import REDUCES_IN_PARAM_DTYPE

ROOT = Path(__file__).resolve().parents[2]


class StepSkipped(Exception):
    """Raised by user code to stop a forward or backward."""


def make_model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def make_sharded_model() -> Any:
    model = make_model()
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def loss_of(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(2, 4)).square().sum()
    return loss


@pytest.mark.parametrize("raises", [True, False])
def test_reset_iter_state_in_gradient_hook_lets_next_step_train(
    single_group: int, raises: bool
) -> None:
    """Users call ``reset_iter_state`` in a hook to skip a step whose gradients are not finite."""
    model = make_sharded_model()

    def reset(param: nn.Parameter) -> None:
        model.reset_iter_state()
        if raises:
            raise StepSkipped

    handles = [p.register_post_accumulate_grad_hook(reset) for p in model.parameters()]
    if raises:
        with pytest.raises(StepSkipped):
            loss_of(model).backward()
    else:
        loss_of(model).backward()
    for handle in handles:
        handle.remove()
    for layer in model:
        [group] = layer._get_fsdp_state()._fsdp_param_groups
        assert group._training_state.name == "IDLE"
    model.zero_grad()
    reference = make_model()
    loss_of(reference).backward()
    loss_of(model).backward()
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(param.grad.to_local(), expected.grad)


def test_lists_of_states_groups_and_params_are_copies(single_group: int) -> None:
    model = make_sharded_model()
    loss_of(model).backward()
    state = model._get_fsdp_state()
    for owner, name in (
        (state, "_fsdp_param_groups"),
        (state._state_ctx, "all_states"),
        (model[0]._get_fsdp_state()._fsdp_param_groups[0], "fsdp_params"),
    ):
        before = list(getattr(owner, name))
        getattr(owner, name).clear()
        assert getattr(owner, name) == before
    loss_of(model).backward()


@pytest.mark.parametrize("drops", [True, False])
def test_reset_iter_state_drops_reduced_gradients_of_all_groups_since_torch_2_15(
    single_group: int, drops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fsdp_c._runtime.state.REDUCES_IN_PARAM_DTYPE", drops)
    model = make_sharded_model()
    loss_of(model).backward()
    assert all(param.grad is not None for param in model.parameters())
    model.reset_iter_state()
    assert {param.grad is None for param in model.parameters()} == {drops}


def test_exception_of_gradient_setter_ends_drop_of_gradients(single_group: int) -> None:
    model = make_sharded_model()
    [group] = model[0]._get_fsdp_state()._fsdp_param_groups
    loss_of(model).backward()

    class Refusing(DTensor):
        grad = property(lambda self: None, raise_step_skipped)

    first, *others = group.fsdp_params
    first.sharded_param.__class__ = Refusing
    with pytest.raises(StepSkipped):
        group._drop_sharded_grads()
    first.sharded_param.__class__ = type(others[0].sharded_param)
    assert all(param.grad is not None for param in model.parameters())


def raise_step_skipped(*unused: Any) -> None:
    raise StepSkipped


@pytest.mark.parametrize("outer", ["unused", "used"])
def test_reset_iter_state_resets_nested_units_that_are_roots(single_group: int, outer: str) -> None:
    """A nested unit that ran before its parent, or was added later, is a root itself."""
    model = make_model()
    inner: Any = fully_shard(model[0])
    if outer == "unused":
        root: Any = fully_shard(model)
    else:
        inner._get_fsdp_state()._lazy_init()
        root = fully_shard(nn.ModuleDict({"head": nn.Linear(4, 4)}).head)
        root(torch.ones(2, 4))
        root.inner = inner
    handle = inner.register_forward_pre_hook(raise_step_skipped)
    with pytest.raises(StepSkipped):
        inner(torch.ones(2, 4))
    handle.remove()
    [group] = inner._get_fsdp_state()._fsdp_param_groups
    assert group.is_unsharded
    root.reset_iter_state()
    assert group.is_sharded
    assert inner._get_fsdp_state()._state_ctx.iter_forward_root is None


# zero_grad() runs inside of the addition to an accumulated gradient. malloc fills new memory.
ZERO_GRAD_IN_ADDITION = """
import torch, torch.distributed as dist, torch.nn as nn
from torch.utils._python_dispatch import TorchDispatchMode
from fsdp_c import MixedPrecisionPolicy, fully_shard
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
model = fully_shard(nn.Linear(64, 64), mp_policy=policy)
model.set_requires_gradient_sync(False)
x = torch.ones(2, 64)
model(x).sum().backward()
class ZeroGradAfterAddition(TorchDispatchMode):
    additions = 0
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.add_.Tensor:
            self.additions += 1
            model.zero_grad()
            reuses_freed_memory = [torch.zeros(3) for _ in range(200)]
        return result
loss = model(x).sum()
with ZeroGradAfterAddition() as mode:
    loss.backward()
assert mode.additions > 0
"""


def test_zero_grad_during_addition_to_accumulated_gradient_does_not_crash() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", ZERO_GRAD_IN_ADDITION],
        env={**os.environ, "MALLOC_PERTURB_": "165", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    if REDUCES_IN_PARAM_DTYPE:  # autograd accumulates in .grad, and raises in its own addition
        assert ran.returncode == 0 or "undefined Tensor" in ran.stderr, ran.stderr[-4000:]
    else:
        assert ran.returncode == 0, ran.stderr[-4000:]


class AddsInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, **others: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.linear(x) + sum(others.values())
        return total


def hand_over_kwargs(module: nn.Module, kwargs: dict[str, torch.Tensor]) -> None:
    """Makes the hooks of ``fully_shard`` receive the dict ``kwargs``, which the test can change."""

    def replace(unused: nn.Module, args: Any, forward_kwargs: Any) -> Any:
        kwargs.update(forward_kwargs)
        return args, kwargs

    module.register_forward_pre_hook(replace, prepend=True, with_kwargs=True)


class CallsOnView(TorchFunctionMode):
    """Calls ``action`` once, in the second view of a forward's inputs."""

    def __init__(self, action: Any) -> None:
        super().__init__()
        self.action, self.views = action, 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.view_as:
            self.views += 1
            if self.views == 2:
                self.action()
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("change", ["off", "on", "clear"])
def test_inputs_changed_during_insertion_of_the_backward_node_stay_in_place(
    single_group: int, change: str
) -> None:
    """torch chooses the inputs once, and replaces them by their position."""
    module, kwargs = AddsInputs(), dict[str, torch.Tensor]()
    reference = copy.deepcopy(module.linear)
    fully_shard(module)
    hand_over_kwargs(module, kwargs)
    x = torch.ones(2, 4, requires_grad=True)
    b = torch.full((2, 4), 2.0, requires_grad=True)
    plain = torch.full((2, 4), 4.0)
    actions = {
        "off": lambda: x.requires_grad_(False),
        "on": lambda: plain.requires_grad_(True),
        "clear": kwargs.clear,
    }
    with CallsOnView(actions[change]) as mode:
        output = module(x, plain=plain, b=b)
    assert mode.views == 2
    assert torch.equal(output, reference(x) + plain + b)


@pytest.mark.parametrize("change", ["floating", "clear"])
def test_inputs_changed_during_casts_stay_in_place(single_group: int, change: str) -> None:
    module, kwargs = AddsInputs(), dict[str, torch.Tensor]()

    class ChangesInput(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kw: Any = None) -> Any:
            if kwargs and change == "clear":
                kwargs.clear()
            elif kwargs and x.dtype == torch.float32:
                x.data = x.data.to(torch.bfloat16)
            return func(*args, **(kw or {}))

    nn.init.zeros_(module.linear.weight)
    nn.init.zeros_(module.linear.bias)
    fully_shard(module, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    hand_over_kwargs(module, kwargs)
    x, b = torch.ones(2, 4), torch.full((2, 4), 2.0)
    module(x)
    with ChangesInput():
        output = module(x, b=b)
    assert torch.equal(output, b.to(torch.bfloat16))


def test_parameter_that_is_released_during_its_gather_raises(fake_group: int) -> None:
    """A conversion releases unsharded parameters. A finalizer may run it at any allocation."""
    model = make_sharded_model()
    [group] = model[0]._get_fsdp_state()._fsdp_param_groups
    first, second = group.fsdp_params

    def release_second(flat: torch.Tensor) -> nn.Parameter:
        second._release_unsharded()
        return type(first)._make_unsharded(first, flat)

    first._make_unsharded = release_second
    with pytest.raises(AssertionError, match="were changed while they were gathered"):
        loss_of(model)
    del first._make_unsharded
    model.reset_iter_state()
    loss_of(model).backward()
    assert all(param.grad is not None for param in model.parameters())


def test_groups_replaced_in_a_gradient_hook_are_not_visited(single_group: int) -> None:
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(4)])
    for layer in model:
        fully_shard(layer)
    root: Any = fully_shard(model)
    loss_of(root).backward()
    states = [layer._get_fsdp_state() for layer in model]  # type: ignore[operator]
    groups = [state._fsdp_param_groups[0] for state in states]
    for state in states:
        state._fsdp_param_groups = []
    root._get_fsdp_state()._fsdp_param_groups = groups

    def replace(unused: nn.Parameter) -> None:
        root._get_fsdp_state()._fsdp_param_groups = groups[:1]

    groups[3].fsdp_params[0].sharded_param.register_post_accumulate_grad_hook(replace)
    loss_of(root).backward()
    assert root._get_fsdp_state()._fsdp_param_groups == groups[:1]


def test_forward_after_failed_move_of_inputs_moves_inputs(
    single_group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_sharded_model()
    loss_of(model).backward()
    state = model._get_fsdp_state()
    state._moves_inputs = True
    monkeypatch.setattr(type(state), "_inputs_to_device", raise_step_skipped)
    with pytest.raises(StepSkipped):
        loss_of(model)
    assert state._state_ctx.iter_forward_root is None
    calls = []

    def move(self: Any, args: Any, kwargs: Any) -> Any:
        calls.append(args)
        return args, kwargs

    monkeypatch.setattr(type(state), "_inputs_to_device", move)
    loss_of(model).backward()
    assert len(calls) == 1


@pytest.mark.parametrize("owner", ["group", "state"])
def test_attribute_name_that_cannot_be_compared_does_not_fail_the_step(
    single_group: int, owner: str
) -> None:
    """The name has the hash of a method, so each lookup of the method compares them."""

    class Incomparable:
        def __init__(self, name: str) -> None:
            self.name = name

        def __hash__(self) -> int:
            return hash(self.name)

        def __eq__(self, other: object) -> bool:
            raise StepSkipped

    model = make_sharded_model()
    state = model[0]._get_fsdp_state()
    [group] = state._fsdp_param_groups
    obj, name = (group, "unshard") if owner == "group" else (state, "_pre_backward")
    vars(obj)[Incomparable(name)] = 1
    loss_of(model).backward()
    assert all(param.grad is not None for param in model.parameters())
