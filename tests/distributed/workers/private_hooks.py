"""Scenarios in which a program recognizes and replaces the forward hooks of FSDP2.

docs/private-surface.md has one row for each scenario, with the scenario's name. A scenario returns
only values that must be equal under torch and fsdp_c.
"""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import types
import weakref
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from behavior import Api, batch, blocks_and_head, grads, scenario, shard, train, weights
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from toy_models import ResidualBlock

HOOKS = ("_forward_pre_hooks", "_forward_hooks")


def hooks_of(module: nn.Module) -> list[Any]:
    """Returns the pre-forward and the post-forward hooks of a module, in order."""
    return [hook for name in HOOKS for hook in getattr(module, name).values()]


def state_of(module: Any) -> Any:
    return module._get_fsdp_state()


def sharded_list(api: Api) -> nn.Sequential:
    """Returns a root whose first two blocks share one state."""
    model = blocks_and_head()
    api.fully_shard([model[0], model[1]])
    return api.fully_shard(model)


def replicated(api: Api) -> Any:
    mesh = init_device_mesh("cpu", (api.world,), mesh_dim_names=("replicate",))
    return api.replicate(blocks_and_head(1), mesh=mesh)


def modules_of_each_kind(api: Api) -> list[Any]:
    """Returns a sharded module, two modules that share one state, and a replicated module."""
    listed = sharded_list(api)
    return [shard(api, blocks_and_head(1))[0], listed[0], listed[1], replicated(api)]


def error_type(run: Callable[[], Any]) -> str:
    try:
        run()
    except Exception as error:
        return type(error).__name__
    return "no exception"


# ---- properties of hooks ----


@scenario()
def hook_names(api: Api) -> list[Any]:
    names = ("__module__", "__name__", "__qualname__", "__doc__", "__annotations__")
    return [
        [str(getattr(hook, name)) for name in names] + sorted(vars(hook))
        for module in modules_of_each_kind(api)
        for hook in hooks_of(module)
    ]


@scenario()
def hook_owners(api: Api) -> list[Any]:
    """Records the objects that hooks are bound to, and their functions."""
    observed: list[Any] = []
    for module in modules_of_each_kind(api):
        state = state_of(module)
        for hook in hooks_of(module):
            owner = getattr(hook, "__self__", None)
            function = getattr(hook, "__func__", None)
            observed.append(
                [
                    owner is state,
                    isinstance(owner, FSDPState),
                    function in (FSDPState._pre_forward, FSDPState._post_forward),
                    isinstance(hook, types.MethodType),
                    isinstance(hook, types.FunctionType),
                    inspect.ismethod(hook),
                    inspect.isfunction(hook),
                    inspect.isroutine(hook),
                    hasattr(hook, "__code__"),
                    hasattr(hook, "__closure__"),
                    hasattr(hook, "state"),
                    hasattr(hook, "__get__"),
                ]
            )
    return observed


@scenario()
def hook_equality(api: Api) -> list[Any]:
    """Compares hooks with the state's methods that they wrap, in both orders."""
    observed: list[Any] = []
    for module in modules_of_each_kind(api):
        state = state_of(module)
        for hook, method in zip(hooks_of(module), (state._pre_forward, state._post_forward)):
            observed.append([hook == method, method == hook, hook != method, hook == hook])
            observed.append([hash(hook) == hash(method), method in hooks_of(module), hook == 3])
    first, second = sharded_list(api)[:2]
    observed.append([a == b for a, b in zip(hooks_of(first), hooks_of(second))])
    observed.append([a is b for a, b in zip(hooks_of(first), hooks_of(second))])
    return observed


@scenario()
def hook_signatures(api: Api) -> list[Any]:
    return [
        [
            str(inspect.signature(hook)),
            inspect.unwrap(hook).__qualname__,
            inspect.unwrap(hook).__code__.co_name,
            hook.__wrapped__.__name__,
            repr(hook).split(" of ")[0].split(" at ")[0],
            callable(hook),
            inspect.iscoroutinefunction(hook),
            error_type(hook),
        ]
        for module in modules_of_each_kind(api)
        for hook in hooks_of(module)
    ]


@scenario()
def hook_copies(api: Api) -> list[Any]:
    """Copies, references and pickles hooks, and sets attributes of hooks."""
    observed: list[Any] = []
    for module in modules_of_each_kind(api):
        for hook in hooks_of(module):
            observed.append([copy.copy(hook) == hook, weakref.ref(hook)() is hook])
            observed.append(error_type(functools.partial(setattr, hook, "note", 1)))
            observed.append(getattr(hook, "note", None))
            observed.append(error_type(functools.partial(copy.deepcopy, hook)))
            if isinstance(hook, types.FunctionType):
                observed.append(error_type(functools.partial(pickle.dumps, hook)))
            wrapper = functools.wraps(hook)(lambda *args: None)
            observed.append([wrapper.__qualname__, wrapper.__wrapped__ is hook])
    return observed


@scenario()
def hook_registration(api: Api) -> list[Any]:
    """Records the order of FSDP2's and users' hooks, and the flags of a module's hooks."""
    models = [blocks_and_head(1), blocks_and_head(2), blocks_and_head(1)]
    for model in models:
        for block in list(model)[:-1]:
            block.register_forward_pre_hook(lambda *args: None)
            block.register_forward_hook(lambda *args: None)
    mesh = init_device_mesh("cpu", (api.world,), mesh_dim_names=("replicate",))
    api.fully_shard(models[0][0])
    api.fully_shard([models[1][0], models[1][1]])
    api.replicate(models[2][0], mesh=mesh)
    flags = (
        "_forward_pre_hooks_with_kwargs",
        "_forward_hooks_with_kwargs",
        "_forward_hooks_always_called",
    )
    observed: list[Any] = []
    for block in [models[0][0], models[1][0], models[1][1], models[2][0]]:
        observed.append([hook.__name__ for hook in hooks_of(block)])
        positions: dict[int, int] = {}  # key of a hook -> its position in hooks_of(block)
        for name in HOOKS:
            for key in getattr(block, name):
                positions[key] = len(positions)
        observed.append(
            [[(positions[k], v) for k, v in getattr(block, name).items()] for name in flags]
        )
        observed.append([type(getattr(block, name)).__name__ for name in HOOKS])
    return observed


# ---- hooks that are removed, wrapped or called ----


def is_fsdp_hook(hook: Any) -> bool:
    return getattr(hook, "__module__", "").startswith("torch.distributed.fsdp")


@scenario()
def hooks_removed_by_module_name(api: Api) -> list[Any]:
    """Removes the hooks whose ``__module__`` is FSDP2's, writes weights, and restores the hooks."""
    observed: list[Any] = []
    for build in (lambda: shard(api, blocks_and_head()), lambda: sharded_list(api)):
        model: Any = build()
        model(batch(api.rank)).square().mean().backward()
        model.zero_grad()
        removed: list[tuple[nn.Module, str, Any]] = []
        for module in model.modules():
            if not isinstance(module, FSDPModule):
                continue
            module.unshard()
            for name in HOOKS:
                hooks = getattr(module, name)
                removed.append((module, name, hooks))
                rest = OrderedDict((k, h) for k, h in hooks.items() if not is_fsdp_hook(h))
                observed.append([len(hooks), len(rest)])
                setattr(module, name, rest)
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(2)
            observed.append([type(param).__name__ for param in model.parameters()])
            observed.append(model(batch(api.rank, 1)))
            observed.append([type(param).__name__ for param in model.parameters()])
            for param in model.parameters():
                param.add_(1)
            observed.append(model(batch(api.rank, 2)))
        for module, name, hooks in removed:
            setattr(module, name, hooks)
            module.reshard()
        observed += [weights(model), train(model, api.rank, 2)]
    return observed


@scenario()
def hook_handles_removed(api: Api) -> list[Any]:
    """Removes the hooks by their handles, and registers wrapped methods of the state instead."""
    model = shard(api, blocks_and_head())
    calls: list[str] = []

    def counted(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def call(*args: Any) -> Any:
            calls.append(method.__name__)
            return method(*args)

        return call

    observed: list[Any] = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            state = state_of(module)
            state._pre_forward_hook_handle.remove()
            state._post_forward_hook_handle.remove()
            observed.append(len(hooks_of(module)))
            state._pre_forward_hook_handle = module.register_forward_pre_hook(
                counted(state._pre_forward), prepend=True, with_kwargs=True
            )
            state._post_forward_hook_handle = module.register_forward_hook(
                counted(state._post_forward)
            )
    return [*observed, train(model, api.rank, 2), calls]


@scenario()
def hooks_wrapped_in_place(api: Api) -> list[Any]:
    """Replaces each hook, in the module's dict, by a function that calls the hook."""
    observed: list[Any] = []
    for model in (shard(api, blocks_and_head()), sharded_list(api)):
        calls: list[str] = []

        def counted(hook: Any, calls: list[str] = calls) -> Callable[..., Any]:
            def call(*args: Any) -> Any:
                calls.append(hook.__name__)
                return hook(*args)

            return call

        for module in model.modules():
            for name in HOOKS:
                for key, hook in getattr(module, name).items():
                    getattr(module, name)[key] = counted(hook)
        observed += [train(model, api.rank, 2), calls]
    return observed


@scenario()
def hooks_called_directly(api: Api) -> list[Any]:
    """Calls hooks with keyword arguments, and as functions with the owner as first argument."""
    block = api.fully_shard(ResidualBlock())
    x = batch(api.rank)
    pre, post = hooks_of(block)
    args, kwargs = pre.__func__(pre.__self__, block, (x,), {}) or ((x,), {})
    output = block.forward(*args, **kwargs)
    result = post.__func__(post.__self__, block, args, output)
    observed: list[Any] = [result.detach().clone(), [type(p).__name__ for p in block.parameters()]]
    found = pre(module=block, args=(x,), kwargs={})
    observed.append([type(p).__name__ for p in block.parameters()])
    output = block.forward(*found[0])
    result = post(module=block, input=found[0], output=output)
    observed.append([type(p).__name__ for p in block.parameters()])
    result.square().mean().backward()
    return [*observed, grads(block)]


@scenario()
def hooks_of_state_dicts(api: Api) -> list[Any]:
    """Records type, ``__module__`` and ``__qualname__`` of state-dict and backward hooks.

    Records them before and after the first forward.
    """
    model = shard(api, blocks_and_head(1))
    names = (
        "_state_dict_hooks",
        "_state_dict_pre_hooks",
        "_load_state_dict_pre_hooks",
        "_load_state_dict_post_hooks",
        "_backward_hooks",
        "_backward_pre_hooks",
    )

    def read_hooks() -> list[Any]:
        return [
            [
                (type(hook).__name__, hook.__module__, hook.__qualname__)
                for hook in getattr(module, name).values()
            ]
            for module in model.modules()
            for name in names
        ]

    before = read_hooks()
    model(batch(api.rank))
    return [before, read_hooks()]


@scenario()
def memory_tracker(api: Api) -> list[Any]:
    """``FSDPMemTracker`` replaces module hooks and group methods, and restores the originals."""
    model = shard(api, blocks_and_head())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = FSDPMemTracker(model, optimizer)
    with tracker:
        model(batch(api.rank)).square().mean().backward()
        optimizer.step()
    observed: list[Any] = [grads(model), weights(model)]
    observed.append([hook.__qualname__ for hook in hooks_of(model)])
    return [*observed, train(model, api.rank, 1)]
