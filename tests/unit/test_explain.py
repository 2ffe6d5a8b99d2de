"""``fsdp_c.explain``: the table of units, and the mistakes that it warns about."""

from __future__ import annotations

import gc
import io
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.debug import CommDebugMode

import fsdp_c
from fsdp_c import Explanation, fully_shard

WORLD = 8
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Block(nn.Module):
    """Layers of 8 -> 16 -> 8."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 16)
        self.down = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def sharded(model: nn.Module | None = None, **kwargs: Any) -> Any:
    model = model or Model()
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


def explained(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Explanation:
    return fsdp_c.explain(model, optimizer, file=io.StringIO())


def step(model: nn.Module) -> None:
    model(torch.ones(2, 8)).sum().backward()


@pytest.fixture(autouse=True)
def world(fake_group: int) -> None:
    assert fake_group == WORLD


# ---- the table -----------------------------------------------------------------------------------


def test_one_row_for_each_unit() -> None:
    units = explained(sharded(mp_policy=MIXED)).units
    assert [unit.name for unit in units] == ["(root)", "blocks.0", "blocks.1", "blocks.2"]
    assert [unit.modules for unit in units] == ["Model", "Block", "Block", "Block"]
    root, block = units[:2]
    assert (root.parameters, root.elements) == (3, 64 + 8 + 64)
    assert (block.parameters, block.elements) == (4, 2 * 128 + 16 + 8)
    assert block.dtypes == "float32/bfloat16/float32"
    assert block.mesh == "8"
    assert block.shard_bytes == 4 * (2 * 128 + 16 + 8) // WORLD


def test_shards_are_counted_with_their_padding() -> None:
    module = fully_shard(nn.Linear(3, 5))  # 5 rows over 8 ranks: one each, three of them padding
    (unit,) = explained(module).units
    assert unit.shard_bytes == 4 * (3 + 1)
    assert unit.elements == 5 * 3 + 5


@pytest.mark.parametrize("trained_before", [False, True])
@pytest.mark.parametrize("reshard", [None, True, False])
def test_the_collectives_are_those_of_a_step(reshard: bool | None, trained_before: bool) -> None:
    model = sharded(reshard_after_forward=reshard)
    if trained_before:
        step(model)
    units = explained(model).units
    with CommDebugMode() as comm:
        step(model)
    counts = {str(op): count for op, count in comm.get_comm_counts().items()}
    assert counts["c10d._allgather_base_"] == sum(unit.gathers for unit in units)
    assert counts["c10d._reduce_scatter_base_"] == sum(unit.reduce_scatters for unit in units) == 4


def test_the_collectives_of_hybrid_sharding() -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh=mesh)
    units = explained(model).units
    with CommDebugMode() as comm:
        step(model)
    counts = {str(op): count for op, count in comm.get_comm_counts().items()}
    assert counts["c10d.allreduce_"] == sum(unit.all_reduces for unit in units) == 4
    assert {unit.mesh for unit in units} == {"2x4"}


def test_the_collectives_of_replicas_in_buckets() -> None:
    model: Any = fsdp_c.replicate(Model(), bucket_cap_mb=600 / 2**20)
    (unit,) = explained(model).units
    with CommDebugMode() as comm:
        step(model)
    assert comm.get_total_counts() == unit.all_reduces > 3
    model.blocks.requires_grad_(False)
    assert explained(model).units[0].all_reduces < unit.all_reduces


def test_frozen_units_reduce_nothing() -> None:
    model = Model()
    model.blocks[1].requires_grad_(False)
    units = {unit.name: unit for unit in explained(sharded(model)).units}
    assert (units["blocks.1"].gathers, units["blocks.1"].reduce_scatters) == (2, 0)
    assert units["blocks.0"].reduce_scatters == 1


def test_transient_memory_is_the_larger_of_gathering_and_reducing() -> None:
    elements = 2 * 128 + 16 + 8
    plain = explained(sharded()).units[1].transient
    mixed = explained(sharded(mp_policy=MIXED)).units[1].transient
    # fp32: gradients, the input of the reduction and its output are more than two copies.
    assert plain == 4 * (elements + elements + elements // WORLD)
    assert mixed == 2 * elements + 4 * (elements + elements // WORLD)
    frozen = Model()
    frozen.requires_grad_(False)
    assert explained(sharded(frozen)).units[1].transient == 2 * 4 * elements


def test_it_prints_what_it_returns(capsys: pytest.CaptureFixture[str]) -> None:
    model = sharded()
    found = fsdp_c.explain(model)
    printed = capsys.readouterr().out
    assert printed == f"{found}\n"
    lines = printed.splitlines()
    assert " ".join(lines[0].split()) == (
        "unit modules params elements dtypes mesh shard AG RS AR transient"
    )
    assert lines[1].split()[:4] == ["(root)", "Model", "3", "136"]
    assert lines[2].split()[:6] == ["blocks.0-2", "3", "x", "Block", "4", "280"]
    assert lines[3].startswith("(each dtypes: stored/computed/reduced in; mesh: ")
    buffer = io.StringIO()
    fsdp_c.explain(model, file=buffer)
    assert buffer.getvalue() == printed and capsys.readouterr().out == ""


def test_nothing_is_initialised_or_sent() -> None:
    model = sharded()
    with CommDebugMode() as comm:
        explained(model)
    assert comm.get_total_counts() == 0
    assert model._get_fsdp_state()._is_root is None


def test_a_model_that_is_not_sharded_is_refused() -> None:
    with pytest.raises(ValueError, match="nothing in Model is sharded: call fully_shard first"):
        explained(Model())


# ---- the warnings --------------------------------------------------------------------------------


@pytest.mark.parametrize("reshard", [None, True, False])
def test_a_model_without_mistakes_has_no_warnings(reshard: bool | None) -> None:
    model = sharded(reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters())
    assert explained(model, optimizer).warnings == []
    loss = model(torch.ones(2, 8)).sum()
    assert explained(model, optimizer).warnings == []  # between forward and backward
    loss.backward()
    optimizer.step()
    assert explained(model, optimizer).warnings == []
    model.load_state_dict(model.state_dict(), assign=True)
    assert explained(model).warnings == []


def test_an_optimizer_built_before_sharding() -> None:
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (warning,) = explained(sharded(model), optimizer).warnings
    assert "the optimizer holds 15 of 15 parameters that are not the model's" in warning
    assert "Build it after the last fully_shard" in warning


def test_an_optimizer_that_lacks_parameters() -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    (warning,) = explained(model, optimizer).warnings
    assert warning.startswith("the optimizer does not hold 'embed.weight', 'embed.bias', 'head.we")


def test_parameters_replaced_after_sharding() -> None:
    model = sharded()
    step(model)
    model.head.weight = nn.Parameter(torch.zeros(8, 8))
    (warning,) = explained(model).warnings
    assert warning.startswith("'head.weight' were replaced after sharding")


def test_parameters_added_after_sharding() -> None:
    model = sharded()
    model.head.bias = nn.Parameter(torch.zeros(8))
    (warning,) = explained(model).warnings
    assert warning.startswith("'head.bias' are in no unit")


def test_tied_weights_in_different_units() -> None:
    model = Model()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    (warning,) = explained(sharded(model)).warnings
    assert "were one parameter before sharding" in warning
    assert warning.startswith("'blocks.0.up.weight', 'blocks.2.up.weight' were")
    assert "(blocks.0, blocks.2)" in warning


def test_tied_weights_in_one_unit_are_fine() -> None:
    model = Model()
    model.head.weight = model.embed.weight
    assert explained(sharded(model)).warnings == []


@pytest.mark.parametrize("units", [0, 1, 2])
def test_blocks_left_in_the_root(units: int) -> None:
    model = Model()
    for block in model.blocks[:units]:
        fully_shard(block)
    fully_shard(model)
    (warning,) = explained(model).warnings
    left = ", ".join(f"'blocks.{index}'" for index in range(units, 3))
    assert warning.startswith(f"{left} are repeated layers but no units")


def test_parts_of_blocks_as_units_leave_nothing_in_the_root() -> None:
    model = Model()
    for block in model.blocks:
        fully_shard(block.up)  # type: ignore[union-attr]
        fully_shard(block.down)  # type: ignore[union-attr]
    assert explained(fully_shard(model)).warnings == []


def test_long_lists_are_cut() -> None:
    (warning,) = explained(fully_shard(Model(blocks=9))).warnings
    assert warning.startswith("'blocks.0', 'blocks.1', 'blocks.2' and 6 more are repeated")


def test_it_says_whose_kernels_pack(fake_group: int) -> None:
    explanation = fsdp_c.explain(fully_shard(nn.Linear(8, 8)), file=io.StringIO())
    assert explanation.kernels == {"cpu": "fsdp_c's cpu kernels"}
    assert "packed on cpu by fsdp_c's cpu kernels" in str(explanation)


def test_it_says_what_buffers_are_kept(fake_group: int) -> None:
    gc.collect()  # models of other tests: the end of a group gives buffers back
    model = fully_shard(nn.Linear(512, 512, bias=False))
    fsdp_c.release_memory()
    for _ in range(2):
        model(torch.ones(1, 512)).sum().backward()
        model.zero_grad()
    explanation = fsdp_c.explain(model, file=io.StringIO())
    assert explanation.buffers is not None
    _, waiting = explanation.buffers
    assert waiting >= 2 * 512 * 512 * 4  # unsharded parameter, and a buffer of the same size
    assert "kept for the next ones" in str(explanation)
    fsdp_c.release_memory()
    again = fsdp_c.explain(model, file=io.StringIO())
    assert again.buffers is not None and again.buffers[1] == 0
