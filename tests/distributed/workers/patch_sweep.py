"""Wraps functions of torch's FSDP2 before fsdp_c is imported, and trains on two gloo ranks.

``test_patch_sweep.py`` runs this program. It imports torch once and forks two ranks per case, so
each case starts from the same state. A case wraps some targets by pass-through wrappers that count
their calls, then trains under torch or, after ``autoload()``, under fsdp_c. As with ``FSDP_C=1``,
the first ``fully_shard`` call imports fsdp_c.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
import torch.distributed.fsdp
import torch.distributed.tensor
import torch.nn as nn

PACKAGE = "torch.distributed.fsdp"
MODULES = (
    "_fsdp_collectives",
    "_fsdp_param_group",
    "_fsdp_param",
    "_fsdp_state",
    "_fsdp_init",
    "_fsdp_common",
    "_fully_shard",
)
RANKS = 2
LIMIT_S = 120
"""Seconds after which a case counts as hung."""

NEMO = "nemo"
"""Style of a wrapper: the signature that NeMo-Automodel's wrapper of ``foreach_reduce`` has."""

Target = tuple[Any, str]
"""A module or class of torch, and the name of its function, method or property."""


# ---- targets -------------------------------------------------------------------------------------


def _codes_in(code: CodeType) -> dict[str, CodeType]:
    return {const.co_name: const for const in code.co_consts if isinstance(const, CodeType)}


def _defined_in(module: Any) -> Iterator[Target]:
    """Yields functions and members of classes that the module's source defines, replaced or not."""
    for name, code in _codes_in(module.__loader__.get_code(module.__name__)).items():
        value = vars(module).get(name)
        if not inspect.isclass(value):
            if callable(value):
                yield module, name
            continue
        for member in _codes_in(code):
            if member in vars(value) and member not in ("__repr__", "__class_getitem__"):
                yield value, member


@functools.cache
def targets() -> dict[str, Target]:
    """Returns all functions, methods and properties that the sweep wraps, in a fixed order."""
    modules = [importlib.import_module(f"{PACKAGE}._fully_shard.{name}") for name in MODULES]
    found = [target for module in modules for target in _defined_in(module)]
    return {f"{owner.__name__.rpartition('.')[2]}.{name}": (owner, name) for owner, name in found}


# ---- wrappers ------------------------------------------------------------------------------------


class Calls(dict[str, int]):
    """Number of calls by target name."""

    def wrapper_of(self, label: str, function: Any, style: str) -> Callable[..., Any]:
        """Returns a pass-through wrapper; ``style`` is "wraps", "plain" or :data:`NEMO`."""
        self[label] = 0

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self[label] += 1
            return function(*args, **kwargs)

        def nemo_wrapper(fsdp_params: Any, unsharded_grads: Any, *args: Any, **kwargs: Any) -> Any:
            self[label] += 1
            return function(fsdp_params, unsharded_grads, *args, **kwargs)

        if style == NEMO:
            return nemo_wrapper
        if style == "wraps":
            return functools.wraps(function)(wrapper)
        # torch reads attributes of its own functions: fully_shard.state.
        vars(wrapper).update({k: v for k, v in vars(function).items() if k != "__wrapped__"})
        return wrapper

    def wrap(self, label: str, style: str) -> None:
        """Replaces the target where it is defined, and where torch's FSDP modules import it."""
        owner, name = targets()[label]
        found = vars(owner)[name]
        if isinstance(found, property):
            replaced: Any = property(
                self.wrapper_of(label, found.fget, style), found.fset, found.fdel
            )
        elif isinstance(found, (staticmethod, classmethod)):
            replaced = type(found)(self.wrapper_of(label, found.__func__, style))
        else:
            replaced = self.wrapper_of(label, found, style)
        holders = [owner]
        if inspect.ismodule(owner):
            imported = [m for key, m in list(sys.modules.items()) if key.startswith(PACKAGE)]
            holders += [m for m in imported if m is not owner and vars(m).get(name) is found]
        for holder in holders:
            setattr(holder, name, replaced)


# ---- training ------------------------------------------------------------------------------------


class _Model(nn.Module):
    """An embedding and two blocks of 5 rows, a head of 6 rows, and a frozen parameter.

    Two ranks shard 5 rows unevenly.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(6, 5, bias=False)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(2))
        self.head = nn.Linear(5, 6, bias=False)
        self.scale = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(x)
        for block in self.blocks:
            hidden = hidden + block(hidden).tanh()
        return self.head(hidden) * self.scale.sum()


def _train(rank: int, mixed: bool) -> list[torch.Tensor]:
    """Returns gradients of two steps with two microbatches each, and the final parameters."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    torch.manual_seed(0)
    model = _Model()
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if mixed else None, reduce_dtype=torch.float32 if mixed else None
    )
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    sharded: Any = model
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    result = []
    for step in range(2):
        for microbatch in range(2):
            torch.manual_seed(10 * step + microbatch + 100 * rank)
            sharded.set_is_last_backward(microbatch == 1)
            sharded.set_requires_gradient_sync(microbatch == 1)
            model(torch.randn(4, 6)).float().square().mean().backward()
        grads: list[Any] = [p.grad for p in model.parameters() if p.grad is not None]
        result += [grad.to_local().clone() for grad in grads]
        optimizer.step()
        optimizer.zero_grad()
    handle = sharded.unshard(async_op=True)
    handle.wait()
    result += [p.detach().clone() for p in model.parameters() if not hasattr(p, "to_local")]
    sharded.reshard()
    return result + [value.to_local().clone() for value in model.state_dict().values()]


# ---- cases ---------------------------------------------------------------------------------------


def _run_rank(rank: int, folder: Path, case: dict[str, Any]) -> None:
    """Runs one rank of one case and writes its outcome to ``folder``; never returns."""
    outcome: dict[str, Any] = {}
    try:
        signal.alarm(LIMIT_S)
        torch.set_num_threads(1)
        if case["by_fsdp_c"]:
            os.environ["FSDP_C"] = "1"
            importlib.import_module("fsdp_c_autoload").autoload()
        calls = Calls()
        for label in case["targets"]:
            calls.wrap(label, case["style"])
        store = dist.FileStore(str(folder / "store"), RANKS)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
        outcome["tensors"] = _train(rank, mixed=False) + _train(rank, mixed=True)
        outcome["calls"] = dict(calls)
        outcome["by_fsdp_c"] = "fsdp_c._C" in sys.modules
        dist.barrier()
    except BaseException:
        outcome["error"] = traceback.format_exc()
    (folder / f"{rank}.pkl").write_bytes(pickle.dumps(outcome))
    os._exit(0)


def run_case(folder: Path, case: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns the outcomes of both ranks; ``{"error": ...}`` where a rank raised or was stopped."""
    folder.mkdir(parents=True)
    children = []
    for rank in range(RANKS):
        pid = os.fork()
        if pid == 0:
            _run_rank(rank, folder, case)
        children.append(pid)
    statuses = [os.waitpid(pid, 0)[1] for pid in children]
    outcomes = []
    for rank, status in enumerate(statuses):
        file = folder / f"{rank}.pkl"
        stopped = {"error": f"ended with {os.waitstatus_to_exitcode(status)}"}
        outcomes.append(pickle.loads(file.read_bytes()) if file.exists() else stopped)
    return outcomes


def main() -> None:
    """Runs each case that standard input gives in JSON; prints the path of its pickled outcomes.

    The first line of output has the names of all targets."""
    work = Path(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    print(json.dumps(list(targets())), file=answers, flush=True)
    for number, line in enumerate(sys.stdin):
        outcomes = run_case(work / str(number), json.loads(line))
        file = work / f"{number}.pkl"
        file.write_bytes(pickle.dumps(outcomes))
        print(file, file=answers, flush=True)


if __name__ == "__main__":
    main()
