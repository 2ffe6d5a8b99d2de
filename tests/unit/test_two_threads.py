"""A second thread in a model is refused before it changes anything; the first is unharmed."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from fsdp_c import fully_shard

SECONDS = 30
"""After which a thread that waits for another gives up."""


class Gate(nn.Module):
    """Where a forward (or a backward) stops until it is let through; open at first."""

    def __init__(self, backward: bool) -> None:
        super().__init__()
        self.reached, self.open, self.armed = threading.Event(), threading.Event(), False
        self.in_backward = backward

    def stop(self, *unused: Any) -> None:
        if self.armed:
            self.armed = False
            self.reached.set()
            assert self.open.wait(SECONDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.in_backward:
            self.stop()
        elif x.requires_grad:
            x.register_hook(self.stop)
        return x


def plain(backward: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Gate(backward), nn.Linear(4, 4))


def sharded(backward: bool = False, group: bool = False) -> Any:
    model = plain(backward)
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


def expect_steps(model: nn.Module, steps: int) -> None:
    """The gradients are those of so many steps."""
    reference = plain()
    for _ in range(steps):
        step(reference)
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad.to_local(), expected.grad)


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(2) as found:
        yield found


@pytest.mark.parametrize("group", [False, True])
@pytest.mark.parametrize("used", [False, True])
@pytest.mark.parametrize("call", [step, evaluate])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_while_one_thread_is_in_it(
    single_group: int,
    pool: ThreadPoolExecutor,
    backward: bool,
    call: Callable[..., Any],
    used: bool,
    group: bool,
) -> None:
    model = sharded(backward, group)
    if used:
        step(model)
    model[1].armed = True
    first = pool.submit(step, model)
    assert model[1].reached.wait(SECONDS)
    pass_name = "backward" if backward else "forward"
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"thread is in the {pass_name} of the root module"):
            call(model)
    model[1].open.set()
    first.result(SECONDS)
    expect_steps(model, 2 if used else 1)
    call(model)  # now it is alone
    expect_steps(model, (2 if used else 1) + (call is step))


def test_in_lazy_init(single_group: int, pool: ThreadPoolExecutor) -> None:
    model = sharded()
    state = model._get_fsdp_state()
    lazy_init, gate = state._lazy_init, Gate(False)
    gate.armed = True

    def slow() -> None:
        gate.stop()
        lazy_init()

    state._lazy_init = slow
    first = pool.submit(step, model)
    assert gate.reached.wait(SECONDS)
    with pytest.raises(RuntimeError, match="in the forward of"):
        step(model)
    gate.open.set()
    first.result(SECONDS)
    expect_steps(model, 1)


@pytest.mark.parametrize("other", ["forward", "backward"])
def test_a_backward_while_another_thread_runs(
    single_group: int, pool: ThreadPoolExecutor, other: str
) -> None:
    model = sharded(other == "backward")
    loss = loss_of(model)
    model[1].armed = True
    run = evaluate if other == "forward" else step
    if other == "backward":
        model[1].armed = False
        second = loss_of(model)
        model[1].armed = True
        first = pool.submit(second.backward)
    else:
        first = pool.submit(run, model)
    assert model[1].reached.wait(SECONDS)
    with pytest.raises(RuntimeError, match=f"another thread is in the {other} of"):
        loss.backward()
    model[1].open.set()
    result = first.result(SECONDS)
    if other == "forward":
        assert torch.equal(result, evaluate(plain()))
    else:
        expect_steps(model, 1)
    model.reset_iter_state()
    model.zero_grad()
    step(model)
    expect_steps(model, 1)


def test_threads_that_take_turns(single_group: int, pool: ThreadPoolExecutor) -> None:
    """Also with the forward in one and the backward in the other."""
    model = sharded()
    step(model)
    pool.submit(step, model).result(SECONDS)
    pool.submit(loss_of(model).backward).result(SECONDS)
    pool.submit(loss_of, model).result(SECONDS).backward()
    expect_steps(model, 4)


def test_a_reset_lets_another_thread_in(single_group: int, pool: ThreadPoolExecutor) -> None:
    model = sharded()

    def fail(*unused: Any) -> None:
        raise ValueError

    handle = model[1].register_forward_hook(fail)
    with pytest.raises(ValueError):
        pool.submit(step, model).result(SECONDS)
    handle.remove()
    with pytest.raises(RuntimeError, match="call reset_iter_state"):
        step(model)
    model.reset_iter_state()
    step(model)
    expect_steps(model, 1)


class Branches(nn.Module):
    """Runs its units in threads of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with ThreadPoolExecutor(1) as pool:
            return torch.stack([pool.submit(part, x).result() for part in self.parts]).sum(0)


def test_units_in_threads_of_one_forward(single_group: int) -> None:
    reference, model = Branches(), Branches()
    for part in model.parts:
        fully_shard(part)
    fully_shard(model)
    for each in (model, reference):
        step(each)
        step(each)
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad.to_local(), expected.grad)  # type: ignore[union-attr]


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_is_no_other_thread(
    single_group: int, pool: ThreadPoolExecutor, reentrant: bool
) -> None:
    model = sharded()
    x = torch.ones(2, 4, requires_grad=True)

    def run() -> torch.Tensor:
        inner = checkpoint(model, x, use_reentrant=reentrant)
        loss: torch.Tensor = inner.square().sum()
        return loss

    pool.submit(run().backward).result(SECONDS)
    expect_steps(model, 1)


def test_two_threads_at_once_are_right_or_refused(single_group: int) -> None:
    model = sharded()
    expected = evaluate(plain())
    before = sys.getswitchinterval()
    wrong: list[Any] = []

    def run() -> None:
        for _ in range(60):
            try:
                if not torch.equal(evaluate(model), expected):
                    wrong.append("output")
            except RuntimeError as error:
                if "another thread" not in str(error):
                    wrong.append(error)

    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
    finally:
        sys.setswitchinterval(before)
    assert wrong == []
