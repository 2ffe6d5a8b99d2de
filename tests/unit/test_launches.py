"""Without its own kernels, fsdp_c calls torch's multi-tensor operators, at most as many as FSDP2.

The gradients have the same bits. A launch is an operator that writes memory; operators that it
calls and copies of the fake process group do not count. On CUDA each operator is one launch, or
one per tensor if torch has no multi-tensor kernel.
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
from fsdp_c import _C
from fsdp_c._runtime import kernels

WRITES = {
    f"aten::{name}"
    for name in (
        *("copy_", "_foreach_copy_", "split_with_sizes_copy", "_chunk_cat", "cat", "zero_"),
        *("fill_", "div_", "mul_", "add_", "_foreach_add_", "constant_pad_nd", "zeros_like"),
    )
}
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Net(nn.Module):
    """Three residual blocks. 8 ranks do not divide a ``width`` of 13."""

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


class BlockOfTwoDtypes(nn.Sequential):
    """Two layers and a frozen parameter in bfloat16, so that a unit has two compute dtypes."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.table = nn.Parameter(torch.randn(24).bfloat16(), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self[1](self[0](x)) * self.table.float().sum()


class NetOfTwoDtypes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            BlockOfTwoDtypes(nn.Linear(16, 32), nn.Linear(32, 16)) for _ in range(3)
        )


def shard_matrices_on_dim_1(param: nn.Parameter) -> Shard | None:
    return Shard(1) if param.ndim == 2 else None


def shard_all_on_dim_1(param: nn.Parameter) -> Shard | None:
    return Shard(1)


class NetWithoutBiases(Net):
    """All parameters are matrices, two per block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False))
            for _ in range(3)
        )


# Maps a name to (model, arguments of fully_shard, whether the mesh is an HSDP mesh).
CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], bool]] = {
    "Shard(0)": (Net, {}, False),
    "Shard(0), uneven": (lambda: Net(13), {}, False),
    "Shard(0), mixed precision": (Net, {"mp_policy": MIXED}, False),
    "Shard(1)": (Net, {"shard_placement_fn": shard_matrices_on_dim_1}, False),
    "Shard(1), mixed precision": (
        Net,
        {"shard_placement_fn": shard_matrices_on_dim_1, "mp_policy": MIXED},
        False,
    ),
    "Shard(1), no other placement": (
        NetWithoutBiases,
        {"shard_placement_fn": shard_all_on_dim_1},
        False,
    ),
    "two dtypes": (NetOfTwoDtypes, {}, False),
    "two dtypes, Shard(1)": (
        NetOfTwoDtypes,
        {"shard_placement_fn": shard_matrices_on_dim_1},
        False,
    ),
    "HSDP": (Net, {}, True),
    "HSDP, mixed precision": (Net, {"mp_policy": MIXED}, True),
    "kept after forward": (Net, {"reshard_after_forward": False}, False),
    "resharded to 4 ranks": (Net, {"reshard_after_forward": 4}, False),
}


def launches_of(model: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> Counter[str]:
    """Counts the operators of one step that write memory, without nested ones."""
    with profile() as profiled:
        model(x).sum().backward()
    return Counter(
        e.name for e in profiled.function_events if e.name in WRITES and not is_nested(e)
    )


def is_nested(event: Any) -> bool:
    """Returns whether a writing operator or a collective called the operator."""
    parent = event.cpu_parent
    while parent is not None:
        if parent.name in WRITES or parent.name.startswith("c10d::"):
            return True
        parent = parent.cpu_parent
    return False


def train_case(fully_shard: Any, name: str) -> tuple[Counter[str], list[torch.Tensor]]:
    """Returns the launches of the third step of a case, and the gradients after it."""
    make, options, hsdp = CASES[name]
    torch.manual_seed(0)
    model = make()
    if hsdp:
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    else:
        mesh = init_device_mesh("cpu", (8,))
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


@pytest.mark.torch("2.13")  # the fake group of older releases does not write reduced tensors
@pytest.mark.parametrize("name", CASES)
def test_step_without_kernels_makes_at_most_as_many_launches_as_torch(
    name: str, fake_group: int, no_kernels: None
) -> None:
    torch_launches, torch_grads = train_case(torch_fully_shard, name)
    launches, grads = train_case(fsdp_c.fully_shard, name)
    print(f"{name}: torch {dict(torch_launches)}, fsdp_c {dict(launches)}")
    assert launches.total() <= torch_launches.total(), f"torch: {torch_launches}, {launches}"
    assert launches["aten::_foreach_copy_"] > 0
    for grad, torch_grad in zip(grads, torch_grads, strict=True):
        assert torch.equal(grad, torch_grad)


class SumOfLayers(nn.Module):
    """Adds the results of some of three layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, used: tuple[int, ...]) -> torch.Tensor:
        return torch.stack([self.layers[i](x) for i in used]).sum(0)


def shard_sum_of_layers() -> Any:
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("r", "s"))
    return fsdp_c.fully_shard(SumOfLayers(), mesh=mesh)


@pytest.mark.torch("2.13")
def test_partial_gradients_of_different_microbatches_are_added_in_one_operation(
    fake_group: int,
) -> None:
    inputs, used = torch.randn(3, 4, 16), [(0, 2), (1,), (0, 1, 2)]
    model = shard_sum_of_layers()
    model.set_requires_all_reduce(False)
    for x, layers in zip(inputs[:2], used, strict=False):
        model(x, layers).sum().backward()
    model.set_requires_all_reduce(True)
    launches = launches_of(lambda x: model(x, used[2]), inputs[2])
    assert (launches["aten::_foreach_add_"], launches["aten::add_"]) == (1, 0)
    alone = []  # the gradients of each microbatch
    for x, layers in zip(inputs, used, strict=True):
        other = shard_sum_of_layers()
        other(x, layers).sum().backward()
        alone.append([p.grad for p in other.parameters()])
    for i, (p, first) in enumerate(zip(model.parameters(), (0, 1, 0), strict=True)):
        assert torch.equal(p.grad.to_local(), alone[2][i].to_local() + alone[first][i].to_local())


def test_step_with_kernels_calls_none_of_torchs_packing_operators(fake_group: int) -> None:
    launches, _ = train_case(fsdp_c.fully_shard, "Shard(1)")
    for name in ("_foreach_copy_", "_chunk_cat", "split_with_sizes_copy"):
        assert launches[f"aten::{name}"] == 0


def test_forward_logs_kernels_of_device_type_once(
    fake_group: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "_logged_device_types", set())
    with caplog.at_level(logging.INFO, logger=kernels.logger.name):
        for _ in range(2):
            model = fsdp_c.fully_shard(nn.Linear(8, 8))
            model(torch.randn(1, 8))
    logged = [record.getMessage() for record in caplog.records if "packed" in record.getMessage()]
    assert logged == ["fsdp_c: memory is packed and unpacked on cpu by fsdp_c's cpu kernels"]


def test_cuda_without_kernels_logs_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernels, "_logged_device_types", set())
    monkeypatch.setattr(torch.version, "hip", None)
    _C._testing.hide_kernels(True)
    try:
        kernels.log_kernels(torch.device("cuda"))
    finally:
        _C._testing.hide_kernels(False)
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "torch's foreach operations: fsdp_c was built without nvcc" in caplog.text


def test_kernels_of_device_returns_name_of_implementation() -> None:
    cpu = torch.device("cpu")
    assert _C.kernels_of(cpu) == "cpu"
    assert _C.kernels_of(torch.device("xpu")) == "torch"
    _C._testing.hide_kernels(True)
    try:
        assert _C.kernels_of(cpu) == "torch"
    finally:
        _C._testing.hide_kernels(False)
