"""A KeyboardInterrupt at any line of ``fully_shard`` and its siblings: nothing has happened."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed._composable_state import _module_state_mapping
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy

import fsdp_c

SAMPLES = int(os.environ.get("FSDP_C_INTERRUPTS", "40"))
"""How many lines of each call are interrupted; 0: all."""
PLACES = ("/fsdp_c/", "/torch/nn/modules/module.py", "/_fully_shard/", "/_composable")


class Tied(nn.Module):
    """Two blocks with buffers and hooks of their own, and a weight that two modules hold."""

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


def shard_blocks_first(model: Any) -> None:
    fsdp_c.fully_shard(model.blocks[0])


CALLS: dict[str, tuple[Callable[[Any], None], Callable[[Any], Any]]] = {
    "one module": (shard_blocks_first, lambda model: fsdp_c.fully_shard(model)),
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


def picture(model: nn.Module) -> list[Any]:
    """All that a call could change, but for the numbers."""
    found: list[Any] = []
    for module in model.modules():
        found.append((type(module), id(_module_state_mapping.get(module))))
        for name, value in vars(module).items():
            found.append((name, id(value)))
            if isinstance(value, dict):
                found.append([(key, id(item)) for key, item in value.items()])
    for tensor in (*model.parameters(), *model.buffers()):
        found.append((tensor.data_ptr(), tensor.requires_grad, type(tensor)))
    return found


class Interrupt:
    """Raises KeyboardInterrupt at the n-th line; counts all where n is 0."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.seen = 0
        self.place = ""

    def trace(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not any(place in frame.f_code.co_filename for place in PLACES):
            return None
        if event == "line":
            self.seen += 1
            if self.seen == self.n:
                self.place = f"{frame.f_code.co_filename}:{frame.f_lineno}"
                raise KeyboardInterrupt
        return self.trace

    def run(self, call: Callable[[], Any]) -> bool:
        """Whether it was interrupted."""
        before = sys.gettrace()
        sys.settrace(self.trace)
        try:
            call()
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False


def lines_of(prepare: Callable[[Any], None], call: Callable[[Any], Any]) -> Iterator[int]:
    """Every line of the call, or as many as are wanted; the last ones always. Counted in the second
    call: what is said once, or looked up once, is in the first."""
    for counter in (Interrupt(0), Interrupt(0)):
        model = Tied()
        prepare(model)
        counter.run(lambda: call(model))  # noqa: B023
    last = range(counter.seen - 8, counter.seen + 1)
    step = max(1, counter.seen // SAMPLES) if SAMPLES else 1
    yield from sorted({*range(1, counter.seen + 1, step), *last})


@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_any_line_leaves_the_model_as_it_was(fake_group: int, name: str) -> None:
    prepare, call = CALLS[name]
    kept = Tied()
    call(kept)  # what is cached is cached now; meshes and specs while somebody has them
    faults = []
    for n in lines_of(prepare, call):
        model = Tied()
        prepare(model)
        before = picture(model)
        interrupt = Interrupt(n)
        assert interrupt.run(lambda: call(model))  # noqa: B023
        if picture(model) != before:
            faults.append(interrupt.place)
            continue
        call(model)
        assert any(isinstance(module, FSDPModule) for module in model.modules())
    assert faults == []


def test_the_corrected_call_trains(single_group: int) -> None:
    for n in lines_of(*CALLS["one module"]):
        if n % 5:
            continue
        model: Any = Tied()
        shard_blocks_first(model)
        assert Interrupt(n).run(lambda: fsdp_c.fully_shard(model))  # noqa: B023
        fsdp_c.fully_shard(model)
        model(torch.ones(2, 4)).sum().backward()
        assert all(param.grad is not None for param in model.parameters())
