"""Undo: torch is unchanged after import, training and uninstall(), once the last model is freed.

The tests compare torch's classes, functions and hook lists. The scenarios that compare snapshots of
torch run in processes of their own, because the first snapshot precedes the import of fsdp_c.
"""

from __future__ import annotations

import gc
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest
from garbage_collection import no_garbage_collection

from fsdp_c._compat import patches
from fsdp_c_autoload import redirect

pytestmark = pytest.mark.xdist_group("undo")  # the tests share one process
ROOT = Path(__file__).resolve().parents[2]

FAKE = "torch._subclasses.fake_tensor.FakeTensorMode.cache torch.utils._stats:simple_call_counter"
IGNORED = ("torch.utils.hooks.RemovableHandle.next_id", *FAKE.split())
"""torch counts all hooks, and DTensors of torch 2.11 use the caches of fake tensors."""

SNAPSHOT = (
    f"IGNORED = {IGNORED!r}"
    + '''
import atexit, gc, os, sys, traceback, types, warnings
warnings.simplefilter("ignore")
import torch, torch.distributed as dist, torch.nn as nn
import torch.distributed.fsdp, torch.distributed.pipelining
import torch.distributed._composable.replicate_with_fsdp as with_replicate
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook, register_optimizer_step_pre_hook
)
from torch.testing._internal.distributed.fake_pg import FakeStore

exit_handlers = []
register, unregister = atexit.register, atexit.unregister
atexit.register = lambda f, *args: (exit_handlers.append(f), register(f, *args))[1]
atexit.unregister = lambda f: (exit_handlers.remove(f), unregister(f))[1]

PACKAGES = ("torch.nn", "torch.optim", "torch.distributed", "torch.utils")
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)


def train(fully_shard, replicate):
    """Trains for two steps, with every public function that makes fsdp_c patch torch."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    other = replicate(nn.Linear(4, 4))
    optimizer = torch.optim.AdamW([*model.parameters(), *other.parameters()])
    for _ in range(2):
        optimizer.zero_grad()
        (model(torch.ones(2, 4)).sum() + other(torch.ones(2, 4)).sum()).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        model.zero_grad()
    model.state_dict()
    return model, other, optimizer


class Held:
    """Compares by identity, and keeps the object so that its address is not used again."""

    def __init__(self, value):
        self.value = value

    def __eq__(self, other):
        return isinstance(other, Held) and self.value is other.value

    def __repr__(self):
        return repr(self.value)[:100]


def functions_within(value):
    """Yields the functions of an attribute: itself, and those inside of its decorators."""
    while value is not None and not isinstance(value, type):
        if isinstance(value, types.FunctionType):
            yield value
        names = ("__func__", "fget", "__wrapped__")
        value = next((getattr(value, n) for n in names if hasattr(value, n)), None)


def add_facts(path, value, found):
    found[path] = Held(value)
    if isinstance(value, (dict, list, set)) and not path.endswith("__warningregistry__"):
        entries = value.items() if isinstance(value, dict) else enumerate(value)
        for key, entry in list(entries):
            found[f"{path}[{key!r:.60}]"] = Held(entry)
    for depth, function in enumerate(functions_within(value)):
        found[f"{path}{'.__wrapped__' * depth}.__code__"] = Held(function.__code__)
        found[f"{path}{'.__wrapped__' * depth}.__dict__"] = dict(function.__dict__)


def snapshot():
    """Maps the paths of torch's attributes to their values."""
    found = {}
    for name, module in sorted(sys.modules.items()):
        if not name.startswith(PACKAGES) or not isinstance(module, types.ModuleType):
            continue
        for attribute, value in list(vars(module).items()):
            if attribute == "__builtins__":
                continue
            add_facts(f"{name}:{attribute}", value, found)
            if isinstance(value, type) and value.__module__.startswith("torch"):
                for inner, of_class in list(vars(value).items()):
                    add_facts(f"{value.__module__}.{value.__qualname__}.{inner}", of_class, found)
    for cls in (*fully_sharded.values(), *replicated.values()):
        for inner, of_class in list(vars(cls).items()):
            add_facts(f"{cls.__qualname__}.{inner}", of_class, found)
    found["sys.meta_path"] = list(sys.meta_path)
    found["gc.callbacks"] = list(gc.callbacks)
    found["atexit"] = list(exit_handlers)
    return found


def differences(before):
    """Returns one line for each attribute that differs from the snapshot."""
    after = snapshot()
    return sorted(
        f"{path}: {before.get(path)!r:.80} -> {after.get(path)!r:.80}"
        for path in {*before, *after}
        if not path.startswith(IGNORED) and before.get(path) != after.get(path)
    )


def check_unchanged():
    found = differences(before)
    assert not found, "\\n".join(found)
'''
)
"""Defines the functions of a scenario. Runs no backward."""

BASELINE = """
fully_sharded = torch.distributed.fsdp._fully_shard._fully_shard.cls_to_fsdp_cls
group = torch.distributed.fsdp._fully_shard._fsdp_param_group.FSDPParamGroup
UNSHARD = f"FSDPParamGroup.unshard{'.__wrapped__' * hasattr(group.unshard, '__wrapped__')}.__code__"
replicated = with_replicate.cls_to_replicate_cls
TORCH = (torch.distributed.fsdp.fully_shard, with_replicate.replicate)
for _ in range(2):  # fills torch's caches
    train(*TORCH)
gc.collect()
before = snapshot()
train(*TORCH)
gc.collect()
assert differences(before) == []  # the snapshot contains nothing that training with torch changes
assert len(before) > 20_000 and exit_handlers == []
assert "fsdp_c" not in sys.modules
"""
"""Takes the snapshot ``before``, after torch has filled its caches."""


# ---- snapshots of torch --------------------------------------------------------------------------

SCENARIOS = {
    "import_of_fsdp_c_leaves_torch_unchanged": r"""
import fsdp_c
check_unchanged()
for _ in range(3):
    fsdp_c.install()
    fsdp_c.install()
    found = "\n".join(differences(before))
    assert "fully_shard.__code__" in found and "clip_grad_norm_.__code__" in found, found
    assert "replicate.__code__" in found and "sys.meta_path" in found, found
    assert "_global_optimizer_pre_hooks" in found, found
    fsdp_c.uninstall()
    check_unchanged()
    fsdp_c.uninstall()
    check_unchanged()
""",
    "uninstall_after_training_leaves_torch_unchanged": r"""
import fsdp_c
for _ in range(2):
    fsdp_c.install()
    alive = train(*TORCH)
    assert fsdp_c.is_active(alive[0])
    found = "\n".join(differences(before))
    for part in (UNSHARD, "FSDPState._lazy_init.__code__", "FSDPParam.to_sharded.__code__",
                 "FSDPCommContext", "_global_optimizer_post_hooks", "atexit",
                 "_global_parameter_registration_hooks", "FSDPLinear.load_state_dict"):
        assert part in found, (part, found)
    del alive
    gc.collect()
    found = "\n".join(differences(before))
    assert UNSHARD in found  # fsdp_c is still installed
    fsdp_c.uninstall()
    check_unchanged()
train(*TORCH)
gc.collect()
check_unchanged()
""",
    "last_model_freed_without_install_leaves_only_the_exit_handler": r"""
import fsdp_c
alive = train(fsdp_c.fully_shard, fsdp_c.replicate)
assert len(differences(before)) > 30
del alive
gc.collect()
assert [line.split(":")[0] for line in differences(before)] == ["atexit"]
fsdp_c.uninstall()
check_unchanged()
alive = train(fsdp_c.fully_shard, fsdp_c.replicate)  # everything is patched again
assert len(differences(before)) > 30 and exit_handlers
""",
    "uninstall_with_live_model_undoes_the_rest_when_it_is_freed": r"""
import fsdp_c
fsdp_c.install()
model, other, optimizer = train(*TORCH)
fsdp_c.uninstall()
found = "\n".join(differences(before))
assert "fully_shard.__code__" not in found and "sys.meta_path" not in found, found
assert UNSHARD in found and "atexit" in found, found
for _ in range(2):
    optimizer.zero_grad()
    (model(torch.ones(2, 4)).sum() + other(torch.ones(2, 4)).sum()).backward()
    optimizer.step()
local = model[0].weight._local_tensor
version = local._version
model.zero_grad()
torch.optim.AdamW([model[0].weight]).step()  # no gradient: only fsdp_c's hook increments
assert local._version == version + 1
group = model[0]._get_fsdp_state()._fsdp_param_group
calls = []
cls = next(c for c in type(group).__mro__ if c.__module__.startswith("torch."))
original = cls.unshard
cls.unshard = lambda self, *args: (calls.append(self), original(self, *args))[1]
model(torch.ones(2, 4))
cls.unshard = original
assert group in calls, "a patch of torch's class has no effect on a model after uninstall()"
train(*TORCH)  # torch's own models beside it
del model, group
gc.collect()
found = "\n".join(differences(before))
assert UNSHARD in found  # `other` is alive
calls.clear()
del other, optimizer
gc.collect()
check_unchanged()
""",
    "environment_switch_is_undone_by_uninstall": r"""
os.environ["FSDP_C"] = "1"
import fsdp_c_autoload
fsdp_c_autoload.autoload()
assert differences(before)
import fsdp_c
fsdp_c.uninstall()  # no model has been sharded
check_unchanged()
fsdp_c_autoload.autoload()
alive = train(*TORCH)
assert fsdp_c.is_active(alive[0])
del alive
gc.collect()
fsdp_c.uninstall()
check_unchanged()
""",
    "later_patches_by_other_code_survive_uninstall": r"""
import functools
import torch.distributed.fsdp._fully_shard._fsdp_param_group as torch_module
import fsdp_c
fsdp_c.install()
alive = train(*TORCH)
cls = torch_module.FSDPParamGroup
calls = []


def instrumented(*args):
    from __main__ import calls, below
    calls.append("code")
    return below(*args)

*_, reshard = functions_within(cls.reshard)  # a debugger replaces the code of the innermost one
below = type(reshard)(reshard.__code__, reshard.__globals__)
reshard.__code__ = instrumented.__code__
original = cls.unshard

@functools.wraps(original)
def patched_unshard(*args):
    calls.append("attribute")
    return original(*args)

cls.unshard = patched_unshard
fully_shard = TORCH[0]
copied = fully_shard.__code__ = fully_shard.__code__.replace(co_name="copied")
sharded = type(alive[0])
load = sharded.load_state_dict
sharded.load_state_dict = patched = lambda self, *args: load(self, *args)
hook = register_optimizer_step_post_hook(lambda *_: calls.append("hook"))
fsdp_c.uninstall()
del alive
gc.collect()
assert fully_shard.__code__ is copied and cls.unshard is patched_unshard
assert vars(sharded)["load_state_dict"] is patched
model = train(*TORCH)[0]  # the copied code runs torch's function now
assert not fsdp_c.is_active(model) and "fsdp_c" not in type(model._get_fsdp_state()).__module__
del model
assert {"code", "attribute", "hook"} <= set(calls), calls
cls.unshard = original
hook.remove()
gc.collect()
fully_shard.__code__ = before[
    "torch.distributed.fsdp._fully_shard._fully_shard:fully_shard.__code__"].value
reshard.__code__ = before[f"{cls.__module__}.{UNSHARD.replace('unshard', 'reshard')}"].value
sharded.load_state_dict = load
fsdp_c.uninstall()
check_unchanged()
""",
    "model_freed_in_a_global_hook_is_undone_after_the_hooks": r"""
import fsdp_c
alive = train(fsdp_c.fully_shard, fsdp_c.replicate)
fsdp_c.uninstall()

def free(*_):
    global alive
    alive = None
    gc.collect()

hooks = [register(free) for register in (
    register_optimizer_step_pre_hook,
    register_optimizer_step_post_hook,
    register_module_parameter_registration_hook,
)]
hooks += [register(lambda *_: None) for register in (
    register_optimizer_step_pre_hook,
    register_module_parameter_registration_hook,
)]
plain = nn.Parameter(torch.ones(2))
plain.grad = torch.ones(2)
optimizer = torch.optim.AdamW([plain])
optimizer.step()  # raises if a dict of hooks changes meanwhile
assert alive is None
gc.collect()
alive = train(fsdp_c.fully_shard, fsdp_c.replicate)
fsdp_c.uninstall()
nn.Linear(2, 2)
assert alive is None
for hook in hooks:
    hook.remove()
gc.collect()
check_unchanged()
""",
    "class_that_fsdp_c_sharded_first_equals_that_of_torch": r"""
import fsdp_c

class First(nn.Linear):
    pass

class Second(nn.Linear):
    pass

for _ in range(2):
    model = fsdp_c.fully_shard(First(2, 2))
    method = vars(type(model))["__deepcopy__"]
    assert method.__module__ == "fsdp_c._runtime.serialization", method
    del model
    gc.collect()
fsdp_c.uninstall()
first, second = (vars(type(TORCH[0](cls(2, 2)))) for cls in (First, Second))
assert first.keys() == second.keys(), first.keys() ^ second.keys()
assert first["__deepcopy__"] is second["__deepcopy__"]
""",
}
"""Programs that run after BASELINE, by the rule that they check."""

RUN = """
torch.set_num_threads(1)  # a forked child has no thread pool
gc.freeze()  # the collections of a child then skip torch's objects
for name, code in SCENARIOS.items():
    pid = os.fork()
    if pid == 0:
        try:
            exec(BASELINE, globals())
            exec(code, globals())
            os._exit(0)
        except BaseException:
            print(name, traceback.format_exc(), sep="\\n", flush=True)
            os._exit(1)
    print(name, "passed" if os.waitpid(pid, 0)[1] == 0 else "failed", flush=True)
"""


@pytest.fixture(scope="module")
def outcomes() -> str:
    """Runs an interpreter that forks a child for each scenario.

    No backward runs before a fork. In torch's CUDA builds a backward starts threads, and a later
    backward in a forked child raises.
    """
    code = f"SCENARIOS, BASELINE = {SCENARIOS!r}, {BASELINE!r}\n{SNAPSHOT}{RUN}"
    command = [sys.executable, "-c", code]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout + completed.stderr
    return completed.stdout


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_torch_is_unchanged_after_each_scenario_of_install_and_uninstall(
    outcomes: str, scenario: str
) -> None:
    assert f"{scenario} passed\n" in outcomes, outcomes


# ---- the registry --------------------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yields the registry without the changes of fsdp_c, and with no live model.

    The garbage collector is off: it would end leases of other tests, and run the pending undos.
    """
    gc.collect()
    with no_garbage_collection():
        for name, value in (("_changes", {}), ("_model_changes", {}), ("_lease", None)):
            monkeypatch.setattr(patches, name, value)
        for name in ("_is_installed", "_is_exit_needed", "_is_undo_due"):
            monkeypatch.setattr(patches, name, False)
        yield patches


def test_set_attribute_undo_restores_or_deletes_the_attribute() -> None:
    owner = SimpleNamespace(old=1)
    undos = [patches.set_attribute(owner, "old", 2), patches.set_attribute(owner, "new", 3)]
    assert vars(owner) == {"old": 2, "new": 3}
    assert [undo() for undo in undos] == [True, True]
    assert vars(owner) == {"old": 1}
    assert [undo() for undo in undos] == [True, True]  # a second undo changes nothing
    assert vars(owner) == {"old": 1}


def test_set_attribute_undo_keeps_a_newer_value() -> None:
    owner = SimpleNamespace(old="torch's")
    undo = patches.set_attribute(owner, "old", "fsdp_c")
    owner.old = "newer"
    assert not undo()
    assert owner.old == "newer"
    owner.old = "fsdp_c"
    assert undo()
    assert owner.old == "torch's"


def test_undo_deletes_the_override_of_an_inherited_attribute() -> None:
    class Base:
        value = 1

    class Derived(Base):
        pass

    undo = patches.set_attribute(Derived, "value", 2)
    assert undo()
    assert "value" not in vars(Derived) and Derived.value == 1


def test_change_covered_by_a_newer_value_is_not_applied_again(registry: Any) -> None:
    owner = SimpleNamespace(value=0)
    registry.apply_with_first_model("value", lambda: registry.set_attribute(owner, "value", 1))
    lease = registry.lease()
    owner.value = 2
    del lease
    assert registry.keys() == ["value"] and owner.value == 2
    lease = registry.lease()
    assert owner.value == 2
    owner.value = 1
    del lease
    assert registry.keys() == [] and owner.value == 0


def test_patches_applied_with_first_model_stay_while_installed_or_leased(registry: Any) -> None:
    owner = SimpleNamespace()
    registry.apply_with_first_model("model", lambda: registry.set_attribute(owner, "model", 1))
    install = {"install": lambda: registry.set_attribute(owner, "install", 1)}
    registry.install(install)
    assert registry.keys() == ["install"]
    lease = registry.lease()
    assert registry.lease() is lease
    del lease
    assert set(registry.keys()) == {"install", "model"}
    registry.uninstall()
    assert registry.keys() == [] and vars(owner) == {}
    lease = registry.lease()
    registry.install(install)
    registry.uninstall()
    assert registry.keys() == ["model"]
    del lease
    assert vars(owner) == {}


def test_change_in_exit_scope_stays_until_uninstall(registry: Any) -> None:
    owner = SimpleNamespace()
    lease = registry.lease()
    registry.apply(registry.Scope.EXIT, "exit", lambda: registry.set_attribute(owner, "exit", 1))
    del lease
    assert registry.keys() == ["exit"]
    lease = registry.lease()
    registry.uninstall()
    assert registry.keys() == ["exit"]
    del lease
    assert vars(owner) == {}


def test_change_of_lease_that_ends_during_apply_is_undone_afterwards(registry: Any) -> None:
    owner = SimpleNamespace()
    registry.apply_with_first_model("model", lambda: registry.set_attribute(owner, "model", 1))
    leases = [registry.lease()]

    def change() -> Any:
        leases.clear()  # as a garbage collection within the change may do
        assert vars(owner) == {"model": 1}
        return registry.set_attribute(owner, "exit", 1)

    registry.apply(registry.Scope.EXIT, "exit", change)
    assert vars(owner) == {"exit": 1}


def test_undo_at_garbage_collection_leaves_gc_callbacks_of_others(
    registry: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, phases = SimpleNamespace(), []
    registry.apply_with_first_model("model", lambda: registry.set_attribute(owner, "model", 1))
    lease = registry.lease()
    monkeypatch.setattr(registry, "_is_iterating_over_hooks", lambda: True)
    del lease
    monkeypatch.setattr(registry, "_is_iterating_over_hooks", lambda: False)
    assert vars(owner) == {"model": 1}
    gc.callbacks.append(lambda phase, info: phases.append(phase))
    gc.collect()
    gc.callbacks.pop()
    assert vars(owner) == {} and phases == ["start", "stop"]


def test_failed_change_undoes_the_changes_before_it(registry: Any) -> None:
    owner = SimpleNamespace()

    def fail() -> Any:
        raise KeyboardInterrupt

    registry.apply_with_first_model("model", lambda: registry.set_attribute(owner, "model", 1))
    registry.apply_with_first_model("fails", fail)
    with pytest.raises(KeyboardInterrupt):
        registry.lease()
    assert registry.keys() == [] and vars(owner) == {}


# ---- redirections --------------------------------------------------------------------------------


def make_function(result: str) -> FunctionType:
    def function() -> str:
        return result

    return function


def test_redirection_undo_keeps_newer_code_and_runs_the_original_below_it() -> None:
    function = make_function("torch's")
    redirection = redirect.Redirection(function, lambda: "fsdp_c")
    below = redirect.copy_function(function)  # what a tool that replaces code objects calls
    newer = make_function("newer").__code__
    function.__code__ = newer
    assert below() == "fsdp_c"
    redirection.undo()
    assert function.__code__ is newer
    assert below() == "torch's"
    again = redirect.Redirection(function, lambda: "fsdp_c")
    assert function() == "fsdp_c"
    again.undo()
    assert function.__code__ is newer


def test_repeated_redirection_uses_the_same_code_object() -> None:
    function = make_function("torch's")
    codes = []
    size = None
    for target in ("first", "second", "third"):
        redirection = redirect.Redirection(function, lambda target=target: target)
        assert function() == target
        codes.append(function.__code__)
        size = size or len(redirect.active)
        redirection.undo()
        assert function() == "torch's"
    assert all(code is codes[0] for code in codes) and len(redirect.active) == size
