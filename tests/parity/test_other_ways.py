"""Parity in other ways of moving the same data: a part of the basic grid, on two ranks. Torch's
multi-tensor operations take the place of our kernels, as on a device that has none; or every
parameter's part of a row is a message of its own, as large ones' are. (Collectives are recorded, so
that the rows themselves are whole: test_pieces.py has those that are not.)"""

from __future__ import annotations

from pathlib import Path

import pytest
from grid import at_world_size, generate
from record import differences
from setting import Launch, Setting
from surface import LANDED, needed
from worker import run_grid

pytestmark = pytest.mark.timeout(1800)

SETTINGS = [at_world_size(s, 2) for s in generate(1, 16) if needed(s) <= LANDED]
# What the grid's draw may lack: another dim than 0.
SETTINGS += [Setting(placement="last"), Setting(placement="mixed", param="bf16", reduce="fp32")]


@pytest.mark.parametrize("way", ["without_kernels", "in_pieces"])
def test_same_bits(tmp_path: Path, way: str) -> None:
    launch = Launch(2)
    stock = run_grid("torch", SETTINGS, launch, tmp_path, ours=False)
    ours = run_grid(f"{way}:fully_shard", SETTINGS, launch, tmp_path, ours=True)
    for index, setting in enumerate(SETTINGS):
        for rank in range(2):
            assert differences(stock[index][rank], ours[index][rank]) == [], setting
