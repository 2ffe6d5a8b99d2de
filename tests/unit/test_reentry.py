"""User code that reaches back into what has called it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn as nn

from fsdp_c import fully_shard


class Skipped(Exception):
    """A user's own way out of a backward."""


def two_layers() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))


def sharded() -> Any:
    model = two_layers()
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def loss_of(model: nn.Module) -> torch.Tensor:
    loss: torch.Tensor = model(torch.ones(2, 4)).square().sum()
    return loss


@pytest.mark.parametrize("raises", [True, False])
def test_a_gradient_hook_may_reset_the_iteration(single_group: int, raises: bool) -> None:
    """As one does who has seen a bad gradient."""
    model = sharded()

    def give_up(param: nn.Parameter) -> None:
        model.reset_iter_state()
        if raises:
            raise Skipped

    handles = [p.register_post_accumulate_grad_hook(give_up) for p in model.parameters()]
    if raises:
        with pytest.raises(Skipped):
            loss_of(model).backward()
    else:
        loss_of(model).backward()
    for handle in handles:
        handle.remove()
    model.reset_iter_state()
    model.zero_grad()
    reference = two_layers()
    loss_of(reference).backward()
    loss_of(model).backward()
    for ours, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad.to_local(), expected.grad)


def test_lists_that_are_handed_out_are_copies(single_group: int) -> None:
    model = sharded()
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


def fail(*unused: Any) -> None:
    raise Skipped


@pytest.mark.parametrize("outer", ["unused", "used"])
def test_a_reset_reaches_units_that_are_roots_of_their_own(single_group: int, outer: str) -> None:
    """They have run by themselves; the module around them, if at all, without them."""
    model = two_layers()
    inner: Any = fully_shard(model[0])
    if outer == "unused":
        root: Any = fully_shard(model)
    else:
        inner._get_fsdp_state()._lazy_init()
        root = fully_shard(nn.ModuleDict({"head": nn.Linear(4, 4)}).head)
        root(torch.ones(2, 4))
        root.inner = inner
    handle = inner.register_forward_pre_hook(fail)
    with pytest.raises(Skipped):
        inner(torch.ones(2, 4))
    handle.remove()
    [group] = inner._get_fsdp_state()._fsdp_param_groups
    assert group.is_unsharded
    root.reset_iter_state()
    assert group.is_sharded
    assert inner._get_fsdp_state()._state_ctx.iter_forward_root is None
