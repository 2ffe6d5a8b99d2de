"""Random programs over the extension's types: wrong arguments, unfinished objects, re-entry.

Run by ``test_fuzz.py`` in a process of its own, with a debugging allocator. hypothesis makes the
programs; each runs in a fork: one that crashes is a failed example, is shortened and shown.
A program may get any exception, but the process has to live.

    PYTHONMALLOC=debug python fuzz.py 2000        # as many examples; a second number is the seed
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
from fsdp_c import _C, comm_context, param, param_group, state
from fsdp_c.bind import BOUND

SECONDS = 10
"""After which a program hangs."""
SHORTEN = 15
"""Seconds for making one that fails shorter."""
DEPTH = 3
"""How often a program is entered again from within what it calls."""
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
FUNCTIONS = (
    _C.clip_collect,
    _C.clip_norm,
    _C.clip_scale,
    _C.count_step,
    _C._testing.overrides,
    _C.bind,
    _C.guard_bind,
    _C.Hook,
    _C._testing.fault_arm,
)
TP_CLEAR = 192
"""Where a type's tp_clear is, in bytes (64 bit; CPython 3.10 to 3.13)."""


def public(cls: type) -> tuple[list[str], list[str]]:
    """Attributes and methods that the C type has."""
    names = [n for n in vars(cls) if not n.startswith("__")]
    methods = [n for n in names if callable(vars(cls)[n])]
    return [n for n in names if n not in methods], methods


NAMES = {cls: public(cls) for cls in BASES}


def base_of(obj: Any) -> type | None:
    return next((cls for cls in BASES if isinstance(obj, cls)), None)


class Odd(Exception):
    """What evil objects raise."""


class World:
    """The objects of one program, and the steps that are left of it."""

    def __init__(self, steps: list[tuple[int, ...]], models: list[Any]) -> None:
        self.steps = list(steps)
        self.depth = 0
        self.models = models
        make_evil(self, models[1])
        self.objects: list[Any] = []
        for model in self.models:
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    self.add(module._get_fsdp_state())
        self.objects += [make(cls) for cls in TYPES]
        self.values = values_of(self)

    def add(self, found: Any) -> None:
        self.objects += [found, found._state_ctx, found._comm_ctx]
        for group in found._fsdp_param_groups:
            self.objects += [group, *group.fsdp_params]
        module = found._modules[0]
        self.objects += [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]

    def run(self) -> None:
        while self.steps:
            self.step()

    def step(self) -> None:
        """One step; whatever it raises is right."""
        numbers = self.steps.pop(0)
        what = STEPS[numbers[0] % len(STEPS)]
        with contextlib.suppress(Exception):
            what(self, *numbers[1:])

    def reenter(self) -> None:
        """What evil objects do wherever they are asked anything."""
        if self.depth < DEPTH and self.steps:
            self.depth += 1
            try:
                self.step()
            finally:
                self.depth -= 1

    def object(self, number: int) -> Any:
        return self.objects[number % len(self.objects)]

    def value(self, number: int) -> Any:
        """A value; every other one is an object, or a list of them."""
        number, kind = divmod(number, 4)
        if kind == 0:
            return self.object(number)
        if kind == 1:
            return [self.object(number + i * 7) for i in range(number % 3)]
        value = self.values[number % len(self.values)]
        return value() if callable(value) else value


class Evil:
    """Answers every question by going on with the program, and then often with an exception."""

    def __init__(self, world: World, mood: int) -> None:
        self.__dict__.update(world=weakref.ref(world), mood=mood)

    def act(self, answer: Any) -> Any:
        world = self.__dict__["world"]()
        if world is not None:
            world.reenter()
        if self.__dict__["mood"] == 0:
            raise Odd
        return answer

    def __eq__(self, other: object) -> bool:
        return bool(self.act(True))

    def __hash__(self) -> int:
        return int(self.act(1))

    def __index__(self) -> int:
        return int(self.act(self.__dict__["mood"]))

    def __float__(self) -> float:
        return float(self.act(0.5))

    def __bool__(self) -> bool:
        return bool(self.act(True))

    def __len__(self) -> int:
        return int(self.act(2))

    def __iter__(self) -> Any:
        return iter(self.act((1, 2)))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.act(args[0] if args else None)

    def __getattr__(self, name: str) -> Any:
        return self.act(None)

    def __setattr__(self, name: str, value: Any) -> None:
        self.act(None)

    def __delattr__(self, name: str) -> None:
        self.act(None)

    def __del__(self) -> None:
        self.act(None)

    def __repr__(self) -> str:
        return str(self.act("Evil"))


class EvilLinear(nn.Linear):
    """Goes on with the program whenever a parameter is registered, before or after."""

    world: Any = None

    def __setattr__(self, name: str, value: Any) -> None:
        world = type(self).world() if type(self).world is not None else None
        if world is not None and name in ("weight", "bias"):
            world.reenter()
        super().__setattr__(name, value)
        if world is not None and name == "bias":
            world.reenter()


def model_of(made: type[nn.Linear]) -> Any:
    model: Any = nn.Sequential(made(2, 2), made(2, 2))
    for block in model:
        fsdp_c.fully_shard(block)
    fsdp_c.fully_shard(model)
    model(torch.ones(1, 2)).sum().backward()
    return model


def make_evil(world: World, model: Any) -> None:
    EvilLinear.world = weakref.ref(world)
    for one in model.parameters():
        one.register_post_accumulate_grad_hook(Evil(world, 1))
    model[0].register_forward_hook(Evil(world, 2))


def make(cls: type) -> Any:
    """An object without its ``__init__``."""
    if issubclass(cls, _C.CommContext):
        return cls.__new__(cls, torch.device("cpu"))
    return cls.__new__(cls)


def values_of(world: World) -> list[Any]:
    """Constants, and functions that make what is to be new each time."""
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
        lambda: Evil(world, 0), lambda: Evil(world, 1), lambda: Evil(world, 2),
        lambda: [Evil(world, 1)], lambda: (Evil(world, 1), "weight"),
        lambda: [(Evil(world, 1), "weight"), (Evil(world, 1), "bias")],
        lambda: {Evil(world, 1): 1}, lambda: list(world.models[0].parameters()),
    ]  # fmt: skip


# ---- steps: the world, then numbers that choose ----


def get(world: World, which: int, name: int, *unused: int) -> None:
    obj = world.object(which)
    attributes, _ = NAMES[base_of(obj)]  # type: ignore[index]
    repr(getattr(obj, attributes[name % len(attributes)]))


def put(world: World, which: int, name: int, value: int, *unused: int) -> None:
    obj = world.object(which)
    attributes, _ = NAMES[base_of(obj)]  # type: ignore[index]
    setattr(obj, attributes[name % len(attributes)], world.value(value))


def remove(world: World, which: int, name: int, *unused: int) -> None:
    obj = world.object(which)
    attributes, _ = NAMES[base_of(obj)]  # type: ignore[index]
    delattr(obj, attributes[name % len(attributes)])


def call(world: World, which: int, name: int, *numbers: int) -> None:
    """A method, with as many arguments as it takes to get beyond their number being wrong."""
    obj = world.object(which)
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


def initialise(world: World, which: int, *numbers: int) -> None:
    obj = world.object(which)
    args = [world.value(n) for n in numbers]
    if isinstance(obj, _C.Param):
        _C.Param.__init__(obj, (2, 2), 0, *args[:3])
    elif isinstance(obj, _C.ParamGroup):
        device = torch.device("cpu")
        _C.ParamGroup.__init__(obj, args[0], args[1], device, args[2], 1, 0, 1)
    else:
        type(obj).__init__(obj, *args)


def function(world: World, which: int, *numbers: int) -> None:
    args = [world.value(n) for n in numbers]
    called: Callable[..., Any] = FUNCTIONS[which % len(FUNCTIONS)]
    for count in range(len(args) + 1):
        with contextlib.suppress(TypeError):
            called(*args[:count])


def bind(world: World, which: int, value: int, *unused: int) -> None:
    names = sorted(BOUND)
    _C.bind(**{**BOUND, names[which % len(names)]: world.value(value)})


def new(world: World, which: int, *unused: int) -> None:
    world.objects.append(make(TYPES[which % len(TYPES)]))


def drop(world: World, which: int, *unused: int) -> None:
    if len(world.objects) > 1:
        world.objects.pop(which % len(world.objects))


def forget(world: World, *unused: int) -> None:
    """All but a few of the objects die, models too."""
    world.models = world.models[:1]
    world.objects = world.objects[-12:]


def clear(world: World, which: int, *unused: int) -> None:
    """What the collector does to an object of a cycle, while it can be reached; no call is under
    way then."""
    obj = world.object(which)
    if world.depth > 0:
        return
    slot = ctypes.c_void_p.from_address(id(base_of(obj) or type(obj)) + TP_CLEAR).value
    if slot is not None:
        ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.py_object)(slot)(obj)


def collect(world: World, *unused: int) -> None:
    gc.collect()


def forward(world: World, which: int, grad: int, *unused: int) -> None:
    model = world.models[which % len(world.models)]
    loss = model(torch.ones(1, 2)).sum()
    if grad % 4:
        loss.backward()


def reset(world: World, which: int, *unused: int) -> None:
    world.models[which % len(world.models)].reset_iter_state()


STEPS = (
    *(get, put, put, put, remove, call, call, call, initialise, function, bind, new, drop),
    *(forget, clear, collect, forward, forward, reset),
)


# ---- running programs ----


def run_in_fork(steps: list[tuple[int, ...]], log: Any) -> int:
    """The exit code of a process that runs the program; its stacks are in ``log``."""
    log.seek(0)
    log.truncate()
    child = os.fork()
    if child == 0:
        os.dup2(log.fileno(), 2)
        faulthandler.enable(log)
        signal.alarm(SECONDS)
        world = World(steps, MODELS)
        world.run()
        _C.bind(**BOUND)
        MODELS.clear()
        del world
        gc.collect()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def shortened(steps: list[tuple[int, ...]], log: Any) -> list[tuple[int, ...]]:
    """A part of a program that fails, without what is not needed for that."""
    end = time.monotonic() + SHORTEN
    at = len(steps)
    while at > 0 and time.monotonic() < end:
        at -= 1
        less = steps[:at] + steps[at + 1 :]
        if run_in_fork(less, log) != 0:
            steps = less
    return steps


def show(steps: list[tuple[int, ...]]) -> str:
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
    def lives(steps: list[tuple[int, ...]]) -> None:
        if run_in_fork(steps, log) != 0:
            steps = shortened(steps, log)
            code = run_in_fork(steps, log)
            log.seek(0)
            text = log.read()
            raise AssertionError(f"exit code {code} after\n{show(steps)}\n{text[-6000:]}")

    (lives if seed is None else hypothesis.seed(seed)(lives))()


MODELS: list[Any] = []


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    gc.collect()
    gc.freeze()  # what is there already need not be looked at in each fork
    MODELS.extend(model_of(made) for made in (nn.Linear, EvilLinear))
    with tempfile.TemporaryFile("w+") as log:
        explore(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None, log)


if __name__ == "__main__":
    main()
