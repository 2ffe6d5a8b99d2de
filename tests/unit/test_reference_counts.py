"""Reference counts free a deleted model: no part of fsdp_c keeps it until a garbage collection.

Modules own their FSDP state, and the state has weak references to them. A state leaves the lists of
the other states when its modules are freed. Then neither a copy of a module nor an autograd graph
has its hooks.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import gc
import random
import weakref
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
from garbage_collection import no_garbage_collection
from lifetime import weak_references
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_managed_modules

import fsdp_c
from fsdp_c._runtime import init

X = torch.ones(2, 4)


@pytest.fixture(autouse=True)
def collector_off() -> Iterator[None]:
    gc.collect()
    with no_garbage_collection():
        yield


def make_blocks() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)))


def shard(**kwargs: Any) -> Any:
    model = make_blocks()
    for block in model:
        fsdp_c.fully_shard(block, **kwargs)
    return fsdp_c.fully_shard(model, **kwargs)


def shard_list() -> Any:
    model = make_blocks()
    fsdp_c.fully_shard([model[0], model[2]])
    return fsdp_c.fully_shard(model)


def shard_replicas() -> Any:
    return shard(mesh=init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicas", "shards")))


def shard_with_prefetches() -> Any:
    model = shard()
    model[0].set_modules_to_forward_prefetch([model[1], model[2]])
    model[2].set_modules_to_backward_prefetch([model[0], model[1]])
    model[1].set_modules_to_backward_prefetch([model[0]])
    return model


def shard_tied() -> Any:
    model = make_blocks()
    model[2][0].weight = model[0][0].weight
    return fsdp_c.fully_shard(model)


class OwnSetattr(nn.Linear):
    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)


def shard_with_own_setattr() -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(OwnSetattr(4, 4), nn.Linear(4, 4))
    fsdp_c.fully_shard(model[0])
    return fsdp_c.fully_shard(model)


MODELS: dict[str, Callable[[], Any]] = {
    "blocks": shard,
    "list of modules": shard_list,
    "replicas": shard_replicas,
    "prefetches": shard_with_prefetches,
    "tied": shard_tied,
    "own __setattr__": shard_with_own_setattr,
    "replicate": lambda: fsdp_c.replicate(make_blocks()),
    "mixed precision": lambda: shard(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)),
    "checkpointed": lambda: fsdp_c.fully_shard(checkpoint_wrapper(make_blocks())),
}


def without(kind: str, parts: dict[str, weakref.ref[Any]]) -> dict[str, weakref.ref[Any]]:
    return {name: part for name, part in parts.items() if not name.startswith(kind)}


def alive(parts: dict[str, weakref.ref[Any]]) -> list[str]:
    return [name for name, part in parts.items() if part() is not None]


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("kind", MODELS)
def test_deleted_model_is_freed_at_once(fake_group: int, kind: str, steps: int) -> None:
    model = MODELS[kind]()
    for _ in range(steps):
        model(X).sum().backward()
    parts = weak_references(model)
    assert len(parts) > 8
    del model
    assert alive(parts) == []


def train_with_optimizer(model: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    model(X).sum().backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def save_and_load(model: Any) -> None:
    model.load_state_dict(model.state_dict())


def raise_value_error(*unused: Any) -> None:
    raise ValueError


def fail_in_forward(model: Any) -> None:
    model[1].register_forward_hook(raise_value_error)
    with contextlib.suppress(ValueError):
        model(X)


def evaluate_after_unshard(model: Any) -> None:
    with torch.no_grad():
        model[0].unshard()
        model(X)
    model.reset_iter_state()


USES: dict[str, Callable[[Any], Any]] = {
    "optimizer": train_with_optimizer,
    "state dict": save_and_load,
    "failed forward": fail_in_forward,
    "evaluation": evaluate_after_unshard,
    "handle": lambda model: model[0].unshard(async_op=True),
    "accumulation": lambda model: (
        model.set_requires_gradient_sync(False),
        model(X).sum().backward(),
    ),
}


@pytest.mark.parametrize("use", USES)
def test_model_is_freed_at_once_after_use(fake_group: int, use: str) -> None:
    model = shard()
    USES[use](model)
    parts = weak_references(model)
    del model
    assert alive(parts) == []


def gradients_of(params: list[Any]) -> list[torch.Tensor]:
    return [param.grad.to_local() for param in params]


@pytest.mark.parametrize("kind", ["blocks", "list of modules", "prefetches", "own __setattr__"])
def test_backward_after_deletion_gives_the_gradients_and_then_frees(
    single_group: int, kind: str
) -> None:
    model = MODELS[kind]()
    model(X).sum().backward()
    expected = gradients_of(list(model.parameters()))

    model = MODELS[kind]()
    params = list(model.parameters())
    parts = without("shard", weak_references(model))
    loss = model(X).sum()
    del model
    assert not [name for name in alive(parts) if name.startswith("module")]
    assert [name for name in alive(parts) if name.startswith("state")]
    loss.backward()
    for gradient, value in zip(gradients_of(params), expected, strict=True):
        assert torch.equal(gradient, value)
    del loss
    assert alive(parts) == []


def test_second_backward_through_a_retained_graph_works_after_deletion(single_group: int) -> None:
    model = shard()
    params = list(model.parameters())
    loss = model(X).sum()
    loss.backward(retain_graph=True)
    once = [gradient.clone() for gradient in gradients_of(params)]
    del model
    loss.backward()
    for gradient, first in zip(gradients_of(params), once, strict=True):
        assert torch.equal(gradient, 2 * first)


def test_child_that_outlives_its_root_trains_alone(single_group: int) -> None:
    model = shard()
    model(X).sum().backward()
    parts = without("context", weak_references(model))
    child = model[1]  # shares its context with the root
    del model
    assert set(alive(parts)) == {name for name in parts if name.split()[-1].startswith("1")}
    state = child._get_fsdp_state()
    assert state._state_ctx.all_states == [state]
    child.zero_grad()
    child(X).sum().backward()
    first = gradients_of(list(child.parameters()))
    assert all(torch.isfinite(gradient).all() for gradient in first)
    assert not state._fsdp_param_groups[0].is_unsharded


def test_copy_that_outlives_its_model_trains(single_group: int) -> None:
    model = shard()
    model(X).sum().backward()
    expected = gradients_of(list(model.parameters()))
    model.zero_grad()
    copied = copy.copy(model)
    parts = weak_references(model)
    del model
    copied[0] = copy.copy(copied[0])
    copied(X).sum().backward()
    for gradient, value in zip(gradients_of(list(copied.parameters())), expected, strict=True):
        assert torch.equal(gradient, value)
    del copied
    assert alive(parts) == []


def test_replaced_unit_leaves_the_lists_of_the_other_states(fake_group: int) -> None:
    model = shard_with_prefetches()
    model(X).sum().backward()
    parts = without("context", weak_references(model[1]))  # units share it
    model[1] = nn.Identity()
    assert alive(parts) == []
    states = [module._get_fsdp_state() for module in (model, model[0], model[2])]
    assert states[0]._state_ctx.all_states == states
    assert states[1]._states_to_forward_prefetch == [states[2]]
    assert states[2]._states_to_backward_prefetch == [states[1]]
    model(X).sum().backward()


def test_state_of_a_list_is_freed_with_the_last_module(fake_group: int) -> None:
    modules = list(make_blocks())
    fsdp_c.fully_shard(modules)
    state = weakref.ref(modules[0]._get_fsdp_state())
    group = state()._fsdp_param_groups[0]
    modules.pop()
    assert state()._modules == group.modules == tuple(modules)
    info = group.fsdp_params[-1]._module_info
    assert not list(info.module.parameters())
    assert dataclasses.replace(group.fsdp_params[0]._module_info).module is modules[0][0]
    modules.clear()
    assert state() is None and group.modules == ()


def test_removed_hooks_do_not_free_the_state_of_a_live_module(fake_group: int) -> None:
    model = shard()
    state = weakref.ref(model[1]._get_fsdp_state())
    model(X)
    model.reset_iter_state()
    model[1]._forward_hooks.clear()
    model[1]._forward_pre_hooks.clear()
    assert state() is not None and state() in model._get_fsdp_state()._state_ctx.all_states


def make_random_tree(rng: random.Random) -> nn.Module:
    """Returns a module with shared modules, and lists of modules."""
    pool: list[nn.Module] = [nn.Linear(2, 2) for _ in range(4)]
    for _ in range(8):
        children = rng.choices(pool, k=rng.randint(1, 3))
        pool.append(rng.choice((nn.Sequential, lambda *parts: nn.ModuleList(parts)))(*children))
    return pool[-1]


@pytest.mark.parametrize("seed", range(30))
def test_managed_modules_are_those_of_torch(seed: int) -> None:
    rng = random.Random(seed)
    roots = (make_random_tree(rng), make_random_tree(rng))
    modules = list(nn.ModuleList(roots).modules())[1:]
    sharded = {*rng.sample(modules, len(modules) // 4), roots[0]}
    refusing = {*rng.sample(modules, len(modules) // 6)} - {roots[0]}
    params = [param for module in modules for param in module.parameters()]
    ignored = {*rng.sample(params, len(params) // 2)} if rng.random() < 0.5 else None
    api: Any = SimpleNamespace(
        is_composable=lambda module: module not in refusing,
        state_of=lambda module: module if module in sharded else None,
    )
    expected = _get_managed_modules(roots, ignored, api.is_composable, api.state_of)
    assert init._list_managed_modules(api, roots, ignored) == expected
