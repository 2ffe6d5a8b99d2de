"""A second thread in a model raises before it changes anything, and the first thread continues."""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, TrainingState
from torch.utils.checkpoint import checkpoint

from fsdp_c import fully_shard
from fsdp_c._compat import zero_grad
from fsdp_c._runtime import meshes

TIMEOUT = 30  # seconds that a thread waits for another


class Gate(nn.Module):
    """Blocks one forward, or backward, after ``armed`` is set, until ``open`` is set.

    ``reached`` is set when a thread is blocked.
    """

    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.reached, self.open, self.armed = threading.Event(), threading.Event(), False
        self.in_backward = backward

    def block_if_armed(self, *unused: Any) -> None:
        if self.armed:
            self.armed = False
            self.reached.set()
            assert self.open.wait(TIMEOUT)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.in_backward:
            self.block_if_armed()
        elif x.requires_grad:
            x.register_hook(self.block_if_armed)
        return x


def make_model(backward: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Gate(backward), nn.Linear(4, 4))


def make_sharded_model(backward: bool = False, group: bool = False) -> Any:
    """Shards both layers, as one unit if ``group``, and the root."""
    model = make_model(backward)
    if group:
        fully_shard([model[0], model[2]])
    else:
        fully_shard(model[0])
        fully_shard(model[2])
    return fully_shard(model)


def loss_of(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(2, 4)).square().sum()
    return loss


def step(model: nn.Module) -> None:
    loss_of(model).backward()


def evaluate(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return loss_of(model)


def assert_gradients_of_steps(model: nn.Module, steps: int) -> None:
    """Asserts that the gradients are the sum of this number of steps."""
    reference = make_model()
    for _ in range(steps):
        step(reference)
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(param.grad.to_local(), expected.grad)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as executor:
        yield executor


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("call", [step, evaluate])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_second_thread_during_forward_or_backward_raises(
    single_group: int,
    pool: ThreadPoolExecutor,
    backward: bool,
    call: Callable[..., Any],
    used: bool,
    group: bool,
) -> None:
    model = make_sharded_model(backward, group)
    if used:
        step(model)
    model[1].armed = True
    first = pool.submit(step, model)
    assert model[1].reached.wait(TIMEOUT)
    pass_name = "backward" if backward else "forward"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"thread is in the {pass_name} of the root module"):
            call(model)
    model[1].open.set()
    first.result(TIMEOUT)
    assert_gradients_of_steps(model, 2 if used else 1)
    call(model)  # the first thread has finished
    assert_gradients_of_steps(model, (2 if used else 1) + (call is step))


def test_second_thread_during_lazy_init_raises(single_group: int, pool: ThreadPoolExecutor) -> None:
    model = make_sharded_model()
    state = model._get_fsdp_state()
    lazy_init, gate = state._lazy_init, Gate(False)
    gate.armed = True

    def blocking_lazy_init() -> None:
        gate.block_if_armed()
        lazy_init()

    state._lazy_init = blocking_lazy_init
    first = pool.submit(step, model)
    assert gate.reached.wait(TIMEOUT)
    with pytest.raises(RuntimeError, match="in the forward of"):
        step(model)
    gate.open.set()
    first.result(TIMEOUT)
    assert_gradients_of_steps(model, 1)


@pytest.mark.parametrize("other", ["forward", "backward"])
def test_backward_during_pass_of_another_thread_raises(
    single_group: int, pool: ThreadPoolExecutor, other: str
) -> None:
    model = make_sharded_model(other == "backward")
    loss = loss_of(model)
    other_pass = functools.partial(evaluate, model)
    if other == "backward":
        other_pass = loss_of(model).backward
    model[1].armed = True
    first = pool.submit(other_pass)
    assert model[1].reached.wait(TIMEOUT)
    with pytest.raises(RuntimeError, match=f"another thread is in the {other} of"):
        loss.backward()
    model[1].open.set()
    result = first.result(TIMEOUT)
    if other == "forward":
        assert torch.equal(result, evaluate(make_model()))
    else:
        assert_gradients_of_steps(model, 1)
    model.reset_iter_state()
    model.zero_grad()
    step(model)
    assert_gradients_of_steps(model, 1)


def test_steps_in_alternating_threads_train(single_group: int, pool: ThreadPoolExecutor) -> None:
    """Forward and backward of one step may also run in different threads."""
    model = make_sharded_model()
    step(model)
    pool.submit(step, model).result(TIMEOUT)
    pool.submit(loss_of(model).backward).result(TIMEOUT)
    pool.submit(loss_of, model).result(TIMEOUT).backward()
    assert_gradients_of_steps(model, 4)


def test_step_after_reset_iter_state_in_another_thread_trains(
    single_group: int, pool: ThreadPoolExecutor
) -> None:
    model = make_sharded_model()

    def fail(*unused: Any) -> None:
        raise ValueError

    handle = model[1].register_forward_hook(fail)
    with pytest.raises(ValueError):
        pool.submit(step, model).result(TIMEOUT)
    handle.remove()
    with pytest.raises(RuntimeError, match="call reset_iter_state"):
        step(model)
    model.reset_iter_state()
    step(model)
    assert_gradients_of_steps(model, 1)


def test_step_after_failed_backward_of_another_thread_trains(
    single_group: int, pool: ThreadPoolExecutor
) -> None:
    model = make_sharded_model(backward=True)

    def fail(unused: Any) -> None:
        raise ValueError

    model[1].block_if_armed = fail
    with pytest.raises(ValueError):
        pool.submit(step, model).result(TIMEOUT)
    del model[1].block_if_armed
    model.zero_grad()
    step(model)
    assert_gradients_of_steps(model, 1)


def test_wrong_training_state_from_another_thread_changes_nothing(
    single_group: int, pool: ThreadPoolExecutor
) -> None:
    model = make_sharded_model()
    step(model)
    state = model._get_fsdp_state()
    state._training_state = TrainingState.FORWARD
    with pytest.raises(TypeError, match="expected a TrainingState"):
        pool.submit(setattr, state, "_training_state", 1).result(TIMEOUT)
    with pytest.raises(RuntimeError, match="another thread is in the forward"):
        pool.submit(loss_of, model).result(TIMEOUT)


class RunsUnitsInThreads(nn.Module):
    """Calls each of its units in a new thread, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:
            return torch.stack([pool.submit(part, x).result() for part in self.parts]).sum(0)


def test_units_called_in_threads_of_one_forward_train(single_group: int) -> None:
    reference, model = RunsUnitsInThreads(), RunsUnitsInThreads()
    for part in model.parts:
        fully_shard(part)
    fully_shard(model)
    for trained in (model, reference):
        step(trained)
        step(trained)
    for param, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(param.grad.to_local(), expected.grad)  # type: ignore[union-attr]


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_recomputation_in_backward_thread_trains(
    single_group: int, pool: ThreadPoolExecutor, reentrant: bool
) -> None:
    model = make_sharded_model()
    x = torch.ones(2, 4, requires_grad=True)

    output = checkpoint(model, x, use_reentrant=reentrant)
    loss: torch.Tensor = output.square().sum()
    pool.submit(loss.backward).result(TIMEOUT)
    assert_gradients_of_steps(model, 1)


def test_two_concurrent_threads_give_right_output_or_raise(
    single_group: int, pool: ThreadPoolExecutor
) -> None:
    model = make_sharded_model()
    expected = evaluate(make_model())
    switch_interval = sys.getswitchinterval()
    outputs: list[torch.Tensor] = []

    def evaluate_repeatedly() -> None:
        for _ in range(60):
            try:
                outputs.append(evaluate(model))
            except RuntimeError as error:
                assert "another thread" in str(error)

    sys.setswitchinterval(1e-6)
    try:
        for thread in [pool.submit(evaluate_repeatedly) for _ in range(2)]:
            thread.result(TIMEOUT)
    finally:
        sys.setswitchinterval(switch_interval)
    assert outputs and all(torch.equal(output, expected) for output in outputs)


@pytest.mark.parametrize("subject", ["zero_grad", "mesh info"])
def test_groups_that_another_thread_registers_do_not_fail_iteration(
    single_group: int, pool: ThreadPoolExecutor, subject: str
) -> None:
    class Group:
        _deferred = False

        def _refresh_process_groups(self) -> None: ...

    info = FSDPMeshInfo(init_device_mesh("cpu", (1,)), shard_mesh_dim=0)
    optimizer = torch.optim.SGD([torch.ones(1, requires_grad=True)])
    done = threading.Event()

    def register(group: Group) -> None:
        if subject == "zero_grad":
            zero_grad.register_group(group)
        else:
            meshes.subscribe(info, group)

    def register_repeatedly() -> None:
        while not done.is_set():
            register(Group())

    model = make_sharded_model()  # wraps Optimizer.zero_grad
    kept = [Group() for _ in range(1000)]
    for group in kept:
        register(group)
    switch_interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    thread = pool.submit(register_repeatedly)
    try:
        for i in range(400):
            if subject == "mesh info":
                info.shard_mesh_size = i
            elif i < 20:
                optimizer.zero_grad()
    finally:
        done.set()
        thread.result(TIMEOUT)
        sys.setswitchinterval(switch_interval)
    del model
