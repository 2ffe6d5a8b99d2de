"""Without kernels of ours torch's multi-tensor operations move the data: never more of them than
torch's own FSDP2 issues in the same step, and the same bits.

What is counted is what a device would be given: operators that write memory, each with all that it
calls inside of itself as one; not the copies that the fake process group makes. (On CUDA each is
one launch; where torch has no kernel for a list, the list's length, for both.) Eight fake ranks,
forward and backward.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.autograd.profiler import profile
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Shard

import fsdp_c
from fsdp_c import _C, kernels

WRITES = {
    f"aten::{name}"
    for name in (
        *("copy_", "_foreach_copy_", "split_with_sizes_copy", "_chunk_cat", "cat", "zero_"),
        *("fill_", "div_", "mul_", "add_", "constant_pad_nd", "zeros_like"),
    )
}
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Net(nn.Module):
    """Three blocks; the sizes of ``uneven`` ones are no multiples of 8 ranks."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 32), nn.LayerNorm(32), nn.Linear(32, width))
            for _ in range(3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x


class WithTable(nn.Sequential):
    """Has a frozen table in bfloat16 besides: two compute dtypes in a unit."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.table = nn.Parameter(torch.randn(24).bfloat16(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[1](self[0](x)) * self.table.float().sum()


class Tables(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            WithTable(nn.Linear(16, 32), nn.Linear(32, 16)) for _ in range(3)
        )


def second_dim(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim == 2 else None


def only_matrices(param: nn.Parameter) -> Shard | None:
    return Shard(1)


class Matrices(Net):
    """Nothing but matrices, all cut on dim 1; two in a block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False))
            for _ in range(3)
        )


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], bool]] = {
    "Shard(0)": (Net, {}, False),
    "Shard(0), uneven": (lambda: Net(13), {}, False),
    "Shard(0), mixed precision": (Net, {"mp_policy": MIXED}, False),
    "Shard(1)": (Net, {"shard_placement_fn": second_dim}, False),
    "Shard(1), mixed precision": (
        Net,
        {"shard_placement_fn": second_dim, "mp_policy": MIXED},
        False,
    ),
    "Shard(1), nothing else": (Matrices, {"shard_placement_fn": only_matrices}, False),
    "two dtypes": (Tables, {}, False),
    "two dtypes, Shard(1)": (Tables, {"shard_placement_fn": second_dim}, False),
    "HSDP": (Net, {}, True),
    "HSDP, mixed precision": (Net, {"mp_policy": MIXED}, True),
    "kept after forward": (Net, {"reshard_after_forward": False}, False),
    "a smaller group": (Net, {"reshard_after_forward": 4}, False),
}


def launches_of(model: nn.Module, x: torch.Tensor) -> Counter[str]:
    """The writing operators of one step, without those inside of others."""
    with profile() as profiled:
        model(x).sum().backward()
    return Counter(e.name for e in profiled.function_events if e.name in WRITES and not inside(e))


def inside(event: Any) -> bool:
    parent = event.cpu_parent
    while parent is not None:
        if parent.name in WRITES or parent.name.startswith("c10d::"):
            return True
        parent = parent.cpu_parent
    return False


def trained(fully_shard: Any, name: str) -> tuple[Counter[str], list[torch.Tensor]]:
    """The launches of the third step, and the gradients after it."""
    make, options, hsdp = CASES[name]
    torch.manual_seed(0)
    model = make()
    mesh = init_device_mesh("cpu", (2, 4) if hsdp else (8,), mesh_dim_names=("r", "s")[-1 - hsdp :])
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)
    width = 13 if "uneven" in name else 16
    x = torch.randn(4, width, requires_grad=True)
    for _ in range(2):
        model(x).sum().backward()
    count = launches_of(model, x)
    return count, [p.grad.to_local() for p in model.parameters() if p.grad is not None]  # type: ignore[union-attr]


@pytest.fixture
def no_kernels() -> Iterator[None]:
    _C._testing.hide_kernels(True)
    try:
        yield
    finally:
        _C._testing.hide_kernels(False)


@pytest.mark.torch("2.13")  # fake groups of before leave what is reduced unwritten
@pytest.mark.parametrize("name", CASES)
def test_no_more_launches_than_torch(name: str, fake_group: int, no_kernels: None) -> None:
    theirs, expected = trained(torch_fully_shard, name)
    ours, gradients = trained(fsdp_c.fully_shard, name)
    print(f"{name}: torch {theirs.total()} {dict(theirs)}, ours {ours.total()} {dict(ours)}")
    assert ours.total() <= theirs.total(), f"torch: {theirs}, ours: {ours}"
    assert ours["aten::_foreach_copy_"] > 0
    for mine, stock in zip(gradients, expected, strict=True):
        assert torch.equal(mine, stock)


def test_kernels_issue_no_operators(fake_group: int) -> None:
    with_kernels, _ = trained(fsdp_c.fully_shard, "Shard(1)")
    assert with_kernels["aten::_foreach_copy_"] == 0
    assert with_kernels["aten::_chunk_cat"] == 0


def test_what_moves_the_data_is_said_once(
    fake_group: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "_said", set())
    with caplog.at_level(logging.INFO, logger=kernels.logger.name):
        for _ in range(2):
            model = fsdp_c.fully_shard(nn.Linear(8, 8))
            model(torch.randn(1, 8))
    said = [record.getMessage() for record in caplog.records if "packed" in record.getMessage()]
    assert said == ["fsdp_c: memory is packed and unpacked on cpu by fsdp_c's cpu kernels"]


def test_cuda_without_kernels_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "_said", set())
    monkeypatch.setattr(torch.version, "hip", None)
    _C._testing.hide_kernels(True)
    try:
        kernels.say(torch.device("cuda"))
    finally:
        _C._testing.hide_kernels(False)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "torch's foreach operations: it was built without nvcc" in caplog.text


def test_which_kernels_there_are() -> None:
    cpu = torch.device("cpu")
    assert _C.kernels_of(cpu) == "cpu"
    assert _C.kernels_of(torch.device("xpu")) == "torch"
    _C._testing.hide_kernels(True)
    try:
        assert _C.kernels_of(cpu) == "torch"
    finally:
        _C._testing.hide_kernels(False)
