"""Random programs over the extension's types: invalid arguments, uninitialized objects, re-entry.

``test_fuzz.py`` runs this script in its own process, with a debugging allocator. hypothesis
generates the programs. Each program runs in a forked process and may raise any exception. If the
process crashes, the program is shortened and printed.

    PYTHONMALLOC=debug python fuzz.py 2000        # number of programs; an optional second: the seed
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import os
import signal
import sys
import tempfile
import time
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import hypothesis
import torch
import torch.distributed as dist
import torch.nn as nn
from hypothesis import strategies as st
from torch.distributed.fsdp import FSDPModule
from torch.testing._internal.distributed.fake_pg import FakeStore

import fsdp_c
from fsdp_c import _C
from fsdp_c._runtime import comm_context, param, param_group, state
from fsdp_c._runtime.bindings import BOUND_OBJECTS

TIMEOUT_SECONDS = 10
"""Time limit of a program. A longer run counts as a hang."""
SHORTEN_SECONDS = 15
"""Seconds spent on shortening a failing program."""
MAX_DEPTH = 3
"""Maximum depth of re-entry: steps that run inside a call of another step."""
TYPES = (
    _C.Param,
    _C.ParamGroup,
    _C.State,
    _C.CommContext,
    _C.IterationContext,
    param.Param,
    param_group.ParamGroup,
    state.State,
    comm_context.CommContext,
    state.IterationContext,
)
BASES = TYPES[:5]
"""The types that C defines. The others inherit from them."""
FUNCTIONS = (
    _C.clip_collect,
    _C.clip_norm,
    _C.clip_scale,
    _C.bump_shard_versions,
    _C._testing.overrides,
    _C.bind,
    _C.guard_bind,
    _C.Hook,
    _C._testing.fault_arm,
)
TP_CLEAR = 192
"""Offset in bytes of tp_clear in PyTypeObject (64 bit; CPython 3.10 to 3.13)."""


def list_members(cls: type) -> tuple[list[str], list[str]]:
    """Returns the names of the non-dunder attributes and methods that the C type defines."""
    names = [n for n in vars(cls) if not n.startswith("__")]
    methods = [n for n in names if callable(vars(cls)[n])]
    return [n for n in names if n not in methods], methods


NAMES = {cls: list_members(cls) for cls in BASES}


def base_of(obj: Any) -> type | None:
    return next((cls for cls in BASES if isinstance(obj, cls)), None)


class ReentrantError(Exception):
    """Raised by Reentrant objects."""


class World:
    """The objects of one program and its remaining steps."""

    def __init__(self, steps: list[tuple[int, ...]], models: list[Any]) -> None:
        self.steps = list(steps)
        self.depth = 0
        self.models = models
        install_reentrant_hooks(self, models[1])
        self.objects: list[Any] = []
        for model in self.models:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    self.add_state(module._get_fsdp_state())
        self.objects += [allocate(cls) for cls in TYPES]
        self.values = values_of(self)

    def add_state(self, state_object: Any) -> None:
        """Adds a state, its contexts, groups and parameters, and the hooks of its first module."""
        self.objects += [state_object, state_object._state_ctx, state_object._comm_ctx]
        for group in state_object._fsdp_param_groups:
            self.objects += [group, *group.fsdp_params]
        module = state_object._modules[0]
        self.objects += [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]

    def run(self) -> None:
        while self.steps:
            self.step()

    def step(self) -> None:
        """Runs one step and ignores its exception: any exception is allowed."""
        numbers = self.steps.pop(0)
        step_function = STEPS[numbers[0] % len(STEPS)]
        with contextlib.suppress(Exception):
            step_function(self, *numbers[1:])

    def reenter(self) -> None:
        """Runs the next step inside the current one. Reentrant objects call it in every method."""
        if self.depth < MAX_DEPTH and self.steps:
            self.depth += 1
            try:
                self.step()
            finally:
                self.depth -= 1

    def object(self, number: int) -> Any:
        return self.objects[number % len(self.objects)]

    def value(self, number: int) -> Any:
        """Returns the value that ``number`` selects; about half are objects or lists of objects."""
        number, kind = divmod(number, 4)
        if kind == 0:
            return self.object(number)
        if kind == 1:
            return [self.object(number + i * 7) for i in range(number % 3)]
        value = self.values[number % len(self.values)]
        return value() if callable(value) else value


class Reentrant:
    """Every special method runs the next step of the program. If ``index`` is 0, it then raises.

    ``index`` is also the value of ``__index__``.
    """

    def __init__(self, world: World, index: int) -> None:
        self.__dict__.update(world=weakref.ref(world), index=index)

    def reenter(self, result: Any) -> Any:
        """Runs the next step. Returns ``result`` or raises."""
        world = self.__dict__["world"]()
        if world is not None:
            world.reenter()
        if self.__dict__["index"] == 0:
            raise ReentrantError
        return result

    def __eq__(self, other: object) -> bool:
        return bool(self.reenter(True))

    def __hash__(self) -> int:
        return int(self.reenter(1))

    def __index__(self) -> int:
        return int(self.reenter(self.__dict__["index"]))

    def __float__(self) -> float:
        return float(self.reenter(0.5))

    def __bool__(self) -> bool:
        return bool(self.reenter(True))

    def __len__(self) -> int:
        return int(self.reenter(2))

    def __iter__(self) -> Any:
        return iter(self.reenter((1, 2)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.reenter(args[0] if args else None)

    def __getattr__(self, name: str) -> Any:
        return self.reenter(None)

    def __setattr__(self, name: str, value: Any) -> None:
        self.reenter(None)

    def __delattr__(self, name: str) -> None:
        self.reenter(None)

    def __del__(self) -> None:
        self.reenter(None)

    def __repr__(self) -> str:
        return str(self.reenter("Reentrant"))


class ReentrantLinear(nn.Linear):
    """Runs the next step of the program before and after a parameter is assigned."""

    world: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        world = type(self).world() if type(self).world is not None else None
        if world is not None and name in ("weight", "bias"):
            world.reenter()
        super().__setattr__(name, value)
        if world is not None and name == "bias":
            world.reenter()


def build_model(linear_type: type[nn.Linear]) -> Any:
    model: Any = nn.Sequential(linear_type(2, 2), linear_type(2, 2))
    for block in model:
        fsdp_c.fully_shard(block)
    fsdp_c.fully_shard(model)
    model(torch.ones(1, 2)).sum().backward()
    return model


def install_reentrant_hooks(world: World, model: Any) -> None:
    ReentrantLinear.world = weakref.ref(world)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(Reentrant(world, 1))
    model[0].register_forward_hook(Reentrant(world, 2))


def allocate(cls: type) -> Any:
    """Returns an object whose ``__init__`` has not run."""
    if issubclass(cls, _C.CommContext):
        return cls.__new__(cls, torch.device("cpu"))
    return cls.__new__(cls)


def values_of(world: World) -> list[Any]:
    """Returns constants, and functions that create the values that must be new on each use."""
    linear = nn.Linear(2, 2)
    return [
        None, True, False, 0, 1, 2, -1, 2**31, 2**63, -(2**63), 1.5, float("nan"), "", "shard",
        "scatter", "post_forward", "replicate", "weight", "0", b"x", (), (2, 2), (1, 0), [], [True],
        {}, torch.float32, torch.bfloat16, torch.int64, torch.device("cpu"), torch.device("meta"),
        torch.device("cuda:0"), linear, linear.weight, [(linear, "weight")], dist.group.WORLD,
        lambda: torch.ones(4), lambda: torch.ones(2, 2), lambda: torch.ones(0),
        lambda: torch.ones(4, device="meta"), lambda: torch.ones(2, 2).to_sparse(),
        lambda: torch.ones(4, dtype=torch.int64), lambda: torch.ones(8)[::2],
        lambda: torch.ones(1).expand(4), lambda: nn.Parameter(torch.ones(2, 2)),
        lambda: Reentrant(world, 0), lambda: Reentrant(world, 1), lambda: Reentrant(world, 2),
        lambda: [Reentrant(world, 1)], lambda: (Reentrant(world, 1), "weight"),
        lambda: [(Reentrant(world, 1), "weight"), (Reentrant(world, 1), "bias")],
        lambda: {Reentrant(world, 1): 1}, lambda: list(world.models[0].parameters()),
    ]  # fmt: skip


# ---- steps: functions of the world and of numbers that select objects, names and values ----
# A step that does not fit its object raises, which World.step ignores: hooks have no attributes.


def get(world: World, index: int, name: int, *unused: int) -> None:
    obj = world.object(index)
    attributes, _ = NAMES[base_of(obj)]  # type: ignore[index]
    repr(getattr(obj, attributes[name % len(attributes)]))


def put(world: World, index: int, name: int, value: int, *unused: int) -> None:
    obj = world.object(index)
    attributes, _ = NAMES[base_of(obj)]  # type: ignore[index]
    setattr(obj, attributes[name % len(attributes)], world.value(value))


def remove(world: World, index: int, name: int, *unused: int) -> None:
    obj = world.object(index)
    attributes, _ = NAMES[base_of(obj)]  # type: ignore[index]
    delattr(obj, attributes[name % len(attributes)])


def call(world: World, index: int, name: int, *numbers: int) -> None:
    """Calls a method with 0, 1, ... arguments, so that one call has a valid argument count."""
    obj = world.object(index)
    base = base_of(obj)
    if base is None:
        obj(*(world.value(n) for n in numbers[:3]))  # a hook
        return
    _, methods = NAMES[base]
    method = getattr(base, methods[name % len(methods)])
    args = [world.value(n) for n in numbers]
    for count in range(len(args) + 1):
        with contextlib.suppress(TypeError):
            method(obj, *args[:count])


def initialize(world: World, index: int, *numbers: int) -> None:
    obj = world.object(index)
    args = [world.value(n) for n in numbers]
    if isinstance(obj, _C.Param):
        _C.Param.__init__(obj, (2, 2), 0, *args[:3])
    elif isinstance(obj, _C.ParamGroup):
        device = torch.device("cpu")
        _C.ParamGroup.__init__(obj, args[0], args[1], device, args[2], 1, 0, 1)
    else:
        type(obj).__init__(obj, *args)


def function(world: World, index: int, *numbers: int) -> None:
    args = [world.value(n) for n in numbers]
    target: Callable[..., Any] = FUNCTIONS[index % len(FUNCTIONS)]
    for count in range(len(args) + 1):
        with contextlib.suppress(TypeError):
            target(*args[:count])


def bind(world: World, index: int, value: int, *unused: int) -> None:
    names = sorted(BOUND_OBJECTS)
    _C.bind(**{**BOUND_OBJECTS, names[index % len(names)]: world.value(value)})


def new(world: World, index: int, *unused: int) -> None:
    world.objects.append(allocate(TYPES[index % len(TYPES)]))


def drop(world: World, index: int, *unused: int) -> None:
    if len(world.objects) > 1:
        world.objects.pop(index % len(world.objects))


def drop_most(world: World, *unused: int) -> None:
    """Drops all models but one and all objects but the last 12."""
    world.models = world.models[:1]
    world.objects = world.objects[-12:]


def clear(world: World, index: int, *unused: int) -> None:
    """Calls tp_clear of a reachable object, as the garbage collector does for objects in cycles.

    Only at depth 0, where no method of the object runs.
    """
    obj = world.object(index)
    if world.depth > 0:
        return
    slot = ctypes.c_void_p.from_address(id(base_of(obj) or type(obj)) + TP_CLEAR).value
    if slot is not None:
        ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object)(slot)(obj)


def collect(world: World, *unused: int) -> None:
    gc.collect()


def forward(world: World, index: int, grad: int, *unused: int) -> None:
    model = world.models[index % len(world.models)]
    loss = model(torch.ones(1, 2)).sum()
    if grad % 4:
        loss.backward()


def reset(world: World, index: int, *unused: int) -> None:
    world.models[index % len(world.models)].reset_iter_state()


STEPS = (
    *(get, put, put, put, remove, call, call, call, initialize, function, bind, new, drop),
    *(drop_most, clear, collect, forward, forward, reset),
)


# ---- running programs ----


def run_in_fork(steps: list[tuple[int, ...]], log: Any) -> int:
    """Runs the program in a forked process. Returns its exit code; ``log`` receives the stacks."""
    log.seek(0)
    log.truncate()
    child = os.fork()
    if child == 0:
        os.dup2(log.fileno(), 2)
        faulthandler.enable(log)
        signal.alarm(TIMEOUT_SECONDS)
        world = World(steps, MODELS)
        world.run()
        _C.bind(**BOUND_OBJECTS)
        MODELS.clear()
        del world
        gc.collect()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def shorten(steps: list[tuple[int, ...]], log: Any) -> list[tuple[int, ...]]:
    """Returns a shorter program that still fails, by removing steps one at a time."""
    end = time.monotonic() + SHORTEN_SECONDS
    position = len(steps)
    while position > 0 and time.monotonic() < end:
        position -= 1
        candidate = steps[:position] + steps[position + 1 :]
        if run_in_fork(candidate, log) != 0:
            steps = candidate
    return steps


def format_steps(steps: list[tuple[int, ...]]) -> str:
    return "\n".join(f"  {STEPS[s[0] % len(STEPS)].__name__}{s[1:]}" for s in steps)


def explore(examples: int, seed: int | None, log: Any) -> None:
    numbers = st.integers(0, 400)
    step = st.tuples(st.integers(0, len(STEPS) - 1), *[numbers] * 5)

    @hypothesis.settings(
        max_examples=examples,
        derandomize=seed is None,
        database=None,
        deadline=None,
        report_multiple_bugs=False,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(st.lists(step, min_size=12, max_size=40))
    def survives(steps: list[tuple[int, ...]]) -> None:
        if run_in_fork(steps, log) != 0:
            steps = shorten(steps, log)
            code = run_in_fork(steps, log)
            log.seek(0)
            text = log.read()
            raise AssertionError(f"exit code {code} after\n{format_steps(steps)}\n{text[-6000:]}")

    (survives if seed is None else hypothesis.seed(seed)(survives))()


MODELS: list[Any] = []


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    gc.collect()
    gc.freeze()  # collections in the forked processes skip the objects that exist here
    MODELS.extend(build_model(linear_type) for linear_type in (nn.Linear, ReentrantLinear))
    with tempfile.TemporaryFile("w+") as log:
        explore(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None, log)


if __name__ == "__main__":
    main()
