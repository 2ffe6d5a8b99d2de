"""The step on fake tensors leaves the model as it was before."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from test_plan import TOKENS, LargeVocabulary, quiet_plan

import fsdp_c
from fsdp_c import auto_shard


class StoresTensors(LargeVocabulary):
    """Forward stores tensors in an attribute, a buffer, a list and a dict of the module."""

    mask: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []
        self.cache: dict[int, torch.Tensor] = {}

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        if self.mask is None:
            self.mask = torch.ones(tokens.shape[1], 1)
            self.register_buffer("positions", torch.zeros(tokens.shape[1], 1))
            self.cache[0] = torch.zeros(1)
        out = super().forward(tokens) * self.mask + self.positions + self.cache[0]
        self.losses.append(out.sum())
        return out


@pytest.mark.parametrize("report", ["plan", "explain"])
def test_tensors_that_forward_stores_are_removed_after_the_dry_run(
    report: str, fake_group: int
) -> None:
    model = StoresTensors()
    buffers = dict(model.named_buffers())
    if report == "plan":
        quiet_plan(model, batch=TOKENS)
    else:
        fsdp_c.explain(auto_shard(model), batch=TOKENS, file=io.StringIO())
    assert model.mask is None and model.losses == [] and model.cache == {}
    assert dict(model.named_buffers()) == buffers
    assert type(model(TOKENS)) is torch.Tensor
