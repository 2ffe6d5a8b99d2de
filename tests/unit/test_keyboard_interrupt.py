"""KeyboardInterrupt in ``fully_shard``, ``replicate`` or ``auto_shard`` is undone.

The tests interrupt about 40 lines of each call, and with FSDP_C_INTERRUPTS=0 every line.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn as nn
from garbage_collection import no_garbage_collection
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import fsdp_c

# The number of lines of each call that are interrupted; 0 means all lines.
SAMPLES = int(os.environ.get("FSDP_C_INTERRUPTS", "40"))
# Lines of other files are not interrupted.
PACKAGE = f"{Path(fsdp_c.__file__).parent}/"
TRACED_PATHS = (PACKAGE, "/torch/nn/modules/module.py", "/_fully_shard/", "/_composable")


class TiedModel(nn.Module):
    """Two blocks with buffers, a head with hooks, and an embedding tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(2)
        )
        self.head = nn.Linear(4, 4, bias=False)
        self.embed = nn.Linear(4, 4, bias=False)
        self.embed.weight = self.head.weight
        self.head.register_forward_hook(lambda *unused: None)
        self.head.register_forward_pre_hook(lambda *unused: None)
        self.head.register_state_dict_post_hook(lambda *unused: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def shard_first_block(model: Any) -> None:
    fsdp_c.fully_shard(model.blocks[0])


# Maps a name to (preparation, call that is interrupted).
CALLS: dict[str, tuple[Callable[[Any], None], Callable[[Any], Any]]] = {
    "one module": (shard_first_block, lambda model: fsdp_c.fully_shard(model)),
    "with options": (
        lambda model: None,
        lambda model: fsdp_c.fully_shard(
            model,
            mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            reshard_after_forward=2,
            ignored_params=set(model.blocks.parameters()),
        ),
    ),
    "list": (
        lambda model: None,
        lambda model: fsdp_c.fully_shard([model.blocks[1], model.head, model.embed]),
    ),
    "replicate": (lambda model: None, lambda model: fsdp_c.replicate(model, bucket_cap_mb=1)),
    "auto_shard": (lambda model: None, lambda model: fsdp_c.auto_shard(model)),
}


def snapshot(model: nn.Module) -> list[Any]:
    """Returns everything that a call could change, except for the values of tensors."""
    entries: list[Any] = []
    for module in model.modules():
        entries.append((type(module), id(_module_state_mapping.get(module))))
        for name, value in vars(module).items():
            entries.append((name, id(value)))
            if isinstance(value, dict):
                entries.append([(key, id(item)) for key, item in value.items()])
    for tensor in (*model.parameters(), *model.buffers()):
        entries.append((tensor.data_ptr(), tensor.requires_grad, type(tensor)))
    return entries


class Interrupt:
    """Raises KeyboardInterrupt at the n-th traced line. With n = 0, only counts the lines."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.lines = 0
        self.location = ""

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not any(path in frame.f_code.co_filename for path in TRACED_PATHS):
            return None
        if event == "line":
            self.lines += 1
            if self.lines == self.n:
                self.location = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self.trace

    def run(self, call: Callable[[], Any]) -> bool:
        """Runs ``call``. Returns whether it was interrupted.

        Without the garbage collector: lines of a finalizer would be counted, and Python ignores an
        interrupt in a finalizer.
        """
        before = sys.gettrace()
        with no_garbage_collection():
            sys.settrace(self.trace)
            try:
                call()
            except KeyboardInterrupt:
                return True
            finally:
                sys.settrace(before)
        return False


def sample_lines(prepare: Callable[[Any], None], call: Callable[[Any], Any]) -> list[int]:
    """Returns about ``SAMPLES`` of the numbers of the lines of the call, including the last 8.

    The lines of a second call are counted, because the first one fills caches.
    """
    for counter in (Interrupt(0), Interrupt(0)):
        model = TiedModel()
        prepare(model)
        counter.run(lambda: call(model))  # noqa: B023
    last = range(counter.lines - 7, counter.lines + 1)
    step = max(1, counter.lines // SAMPLES) if SAMPLES else 1
    return sorted({*range(1, counter.lines + 1, step), *last})


@pytest.mark.parametrize("name", CALLS)
def test_sharding_call_interrupted_at_sampled_lines_leaves_model_unchanged(
    fake_group: int, name: str
) -> None:
    prepare, call = CALLS[name]
    sharded = TiedModel()
    call(sharded)  # fills caches; keeping the model keeps its mesh and specs cached
    failures = []
    for n in sample_lines(prepare, call):
        model = TiedModel()
        prepare(model)
        before = snapshot(model)
        interrupt = Interrupt(n)
        assert interrupt.run(lambda: call(model))  # noqa: B023
        if snapshot(model) != before:
            failures.append(interrupt.location)
            continue
        call(model)
        assert any(isinstance(module, FSDPModule) for module in model.modules())
    assert failures == []


def test_fully_shard_repeated_after_interrupt_trains(single_group: int) -> None:
    sharded = fsdp_c.fully_shard(TiedModel())  # keeping the model keeps its mesh and specs cached
    assert isinstance(sharded, FSDPModule)
    for n in sample_lines(*CALLS["one module"])[::5]:
        model: Any = TiedModel()
        shard_first_block(model)
        assert Interrupt(n).run(lambda: fsdp_c.fully_shard(model))  # noqa: B023
        fsdp_c.fully_shard(model)
        model(torch.ones(2, 4)).sum().backward()
        assert all(param.grad is not None for param in model.parameters())
