"""``fsdp_c.explain`` returns a table of units and warnings about mistakes."""

from __future__ import annotations

import gc
import io
import re
from typing import Any

import pytest
import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.debug import CommDebugMode
from toy_models import MLPModel

import fsdp_c
from fsdp_c import Explanation, fully_shard
from fsdp_c._tools import step_memory
from fsdp_c._tools.optimizer_memory import count_state_bytes
from fsdp_c._tools.unit_bytes import count_bytes_outside_units

WORLD = 8
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def sharded(model: nn.Module | None = None, **kwargs: Any) -> Any:
    model = model or MLPModel()
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, **kwargs)
    return fully_shard(model, **kwargs)


def quiet_explain(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Explanation:
    return fsdp_c.explain(model, optimizer, file=io.StringIO())


def step(model: nn.Module) -> None:
    model(torch.ones(2, 8)).sum().backward()


@pytest.fixture(autouse=True)
def world(fake_group: int) -> None:
    assert fake_group == WORLD


# ---- the table -----------------------------------------------------------------------------------


def test_explain_returns_one_row_per_unit() -> None:
    units = quiet_explain(sharded(mp_policy=MIXED)).units
    assert [unit.name for unit in units] == ["(root)", "blocks.0", "blocks.1", "blocks.2"]
    assert [unit.modules for unit in units] == ["MLPModel", "MLPBlock", "MLPBlock", "MLPBlock"]
    root, block = units[:2]
    assert (root.parameters, root.elements) == (3, 64 + 8 + 64)
    assert (block.parameters, block.elements) == (4, 2 * 128 + 16 + 8)
    assert block.dtypes == "float32/bfloat16/float32"
    assert block.mesh == "8"
    assert block.shard_bytes == 4 * (2 * 128 + 16 + 8) // WORLD


def test_shard_bytes_include_padding() -> None:
    module = fully_shard(nn.Linear(3, 5))  # 5 of 8 ranks have a row, 3 have a row of padding
    (unit,) = quiet_explain(module).units
    assert unit.shard_bytes == 4 * (3 + 1)
    assert unit.elements == 5 * 3 + 5


@pytest.mark.parametrize("trained_before", [False, True])
@pytest.mark.parametrize("reshard", [None, True, False])
def test_counted_collectives_equal_those_of_one_step(
    reshard: bool | None, trained_before: bool
) -> None:
    model = sharded(reshard_after_forward=reshard)
    if trained_before:
        step(model)
    units = quiet_explain(model).units
    with CommDebugMode() as comm:
        step(model)
    counts = {str(op): count for op, count in comm.get_comm_counts().items()}
    assert counts["c10d._allgather_base_"] == sum(unit.gathers for unit in units)
    assert counts["c10d._reduce_scatter_base_"] == sum(unit.reduce_scatters for unit in units) == 4


def test_counted_all_reduces_of_hsdp_equal_those_of_one_step() -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))
    model = sharded(mesh=mesh)
    units = quiet_explain(model).units
    with CommDebugMode() as comm:
        step(model)
    counts = {str(op): count for op, count in comm.get_comm_counts().items()}
    assert counts["c10d.allreduce_"] == sum(unit.all_reduces for unit in units) == 4
    assert {unit.mesh for unit in units} == {"2x4"}


def test_counted_all_reduces_of_replicate_equal_number_of_buckets() -> None:
    model: Any = fsdp_c.replicate(MLPModel(), bucket_cap_mb=600 / 2**20)
    (unit,) = quiet_explain(model).units
    with CommDebugMode() as comm:
        step(model)
    assert comm.get_total_counts() == unit.all_reduces > 3
    model.blocks.requires_grad_(False)
    assert quiet_explain(model).units[0].all_reduces < unit.all_reduces


def test_frozen_unit_counts_no_reduce_scatter() -> None:
    model = MLPModel()
    model.blocks[1].requires_grad_(False)
    units = {unit.name: unit for unit in quiet_explain(sharded(model)).units}
    assert (units["blocks.1"].gathers, units["blocks.1"].reduce_scatters) == (2, 0)
    assert units["blocks.0"].reduce_scatters == 1


def test_transient_bytes_are_maximum_of_unshard_and_reduction() -> None:
    elements = 2 * 128 + 16 + 8
    plain = quiet_explain(sharded()).units[1].transient
    mixed = quiet_explain(sharded(mp_policy=MIXED)).units[1].transient
    # In fp32 the reduction needs more: gradients, reduce-scatter input and output.
    assert plain == 4 * (elements + elements + elements // WORLD)
    assert mixed == 2 * elements + 4 * (elements + elements // WORLD)
    frozen = MLPModel()
    frozen.requires_grad_(False)
    assert quiet_explain(sharded(frozen)).units[1].transient == 2 * 4 * elements


def test_explain_prints_returned_table(capsys: pytest.CaptureFixture[str]) -> None:
    model = sharded()
    explanation = fsdp_c.explain(model)
    printed = capsys.readouterr().out
    assert printed == f"{explanation}\n"
    lines = printed.splitlines()
    assert " ".join(lines[0].split()) == (
        "unit modules params elements dtypes mesh shard AG RS AR transient"
    )
    assert lines[1].split()[:4] == ["(root)", "MLPModel", "3", "136"]
    assert lines[2].split()[:6] == ["blocks.0-2", "3", "x", "MLPBlock", "4", "280"]
    assert lines[3].startswith("(each dtypes: stored/computed/reduced in; mesh: ")
    buffer = io.StringIO()
    fsdp_c.explain(model, file=buffer)
    assert buffer.getvalue() == printed and capsys.readouterr().out == ""


def test_explain_runs_no_lazy_initialization_and_no_collective() -> None:
    model = sharded()
    with CommDebugMode() as comm:
        quiet_explain(model)
    assert comm.get_total_counts() == 0
    assert model._get_fsdp_state()._is_root is None


def test_explain_of_plain_model_raises() -> None:
    with pytest.raises(ValueError, match="nothing in MLPModel is sharded: call fully_shard first"):
        quiet_explain(MLPModel())


# ---- the warnings --------------------------------------------------------------------------------


@pytest.mark.parametrize("reshard", [None, True, False])
def test_explain_of_model_without_mistakes_has_no_warnings(reshard: bool | None) -> None:
    model = sharded(reshard_after_forward=reshard)
    optimizer = torch.optim.AdamW(model.parameters())
    assert quiet_explain(model, optimizer).warnings == []
    loss = model(torch.ones(2, 8)).sum()
    assert quiet_explain(model, optimizer).warnings == []  # between forward and backward
    loss.backward()
    optimizer.step()
    assert quiet_explain(model, optimizer).warnings == []
    model.load_state_dict(model.state_dict(), assign=True)
    assert quiet_explain(model).warnings == []


def test_explain_with_optimizer_created_before_sharding_has_warning() -> None:
    model = MLPModel()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (warning,) = quiet_explain(sharded(model), optimizer).warnings
    assert warning.startswith("the model does not have 15 of the optimizer's 15 parameters. If")
    assert "build it after the last fully_shard" in warning


def test_explain_with_optimizer_that_lacks_parameters_has_warning() -> None:
    model = sharded()
    optimizer = torch.optim.SGD(model.blocks.parameters(), lr=0.1)
    (warning,) = quiet_explain(model, optimizer).warnings
    assert warning.startswith("the optimizer does not hold 'embed.weight', 'embed.bias', 'head.we")


def test_explain_with_optimizer_of_two_models_that_lacks_parameters_has_both_warnings() -> None:
    model, other = sharded(), sharded()
    optimizer = torch.optim.SGD([*model.blocks.parameters(), *other.parameters()], lr=0.1)
    foreign, missing = quiet_explain(model, optimizer).warnings
    assert foreign.startswith("the model does not have 15 of the optimizer's 27 parameters. If")
    assert missing.startswith("the optimizer does not hold 'embed.weight', 'embed.bias', 'head.we")


def test_explain_of_parameter_replaced_after_sharding_has_warning() -> None:
    model = sharded()
    step(model)
    model.head.weight = nn.Parameter(torch.zeros(8, 8))
    (warning,) = quiet_explain(model).warnings
    assert warning.startswith("'head.weight' was replaced after sharding")


def test_explain_of_parameter_added_after_sharding_has_warning() -> None:
    model = sharded()
    model.head.bias = nn.Parameter(torch.zeros(8))
    (warning,) = quiet_explain(model).warnings
    assert warning.startswith("no unit contains 'head.bias' (ignored, added after fully_shard, or")


def test_explain_of_parameters_outside_of_every_sharded_module_has_warning() -> None:
    model = MLPModel()
    for block in model.blocks:
        fully_shard(block)
    (warning,) = quiet_explain(model).warnings
    assert warning.startswith("no unit contains 'embed.weight', 'embed.bias', 'head.weight' (")
    assert "or outside of every sharded module)" in warning


def make_tied() -> Any:
    model = MLPModel()
    model.blocks[2].up.weight = model.blocks[0].up.weight
    return model


def test_explain_of_weights_tied_across_units_has_warning() -> None:
    (warning,) = quiet_explain(sharded(make_tied())).warnings
    assert "were one parameter before sharding" in warning
    assert warning.startswith("'blocks.0.up.weight', 'blocks.2.up.weight' were")
    assert "(blocks.0, blocks.2)" in warning


def test_tied_weights_of_two_units_are_refused_with_the_advice_of_explain() -> None:
    model = sharded(make_tied())
    advice = "'blocks.0.up.weight', 'blocks.2.up.weight' are one parameter in two units: shard"
    with pytest.raises(ValueError, match=f"already managed by another FSDP group(.|\n)*{advice}"):
        step(model)


def test_tied_weights_in_one_unit_as_advised_train_without_warning() -> None:
    model = make_tied()
    fully_shard([model.blocks[0], model.blocks[2]])
    fully_shard(model.blocks[1])
    fully_shard(model)
    assert quiet_explain(model).warnings == []
    step(model)
    assert model.blocks[2].up.weight is model.blocks[0].up.weight
    assert model.blocks[2].up.weight.grad is not None


def test_explain_of_weights_tied_within_unit_has_no_warning() -> None:
    model = MLPModel()
    model.head.weight = model.embed.weight
    assert quiet_explain(sharded(model)).warnings == []


@pytest.mark.parametrize("units", [0, 1, 2])
def test_explain_of_blocks_left_in_root_unit_has_warning(units: int) -> None:
    model = MLPModel()
    for block in model.blocks[:units]:
        fully_shard(block)
    fully_shard(model)
    (warning,) = quiet_explain(model).warnings
    blocks = ", ".join(f"'blocks.{index}'" for index in range(units, 3))
    role = "is a repeated layer but no unit" if units == 2 else "are repeated layers but no units"
    assert warning.startswith(f"{blocks} {role}")


def test_explain_of_blocks_with_children_as_units_has_no_warning() -> None:
    model = MLPModel()
    for block in model.blocks:
        fully_shard(block.up)  # type: ignore[union-attr]
        fully_shard(block.down)  # type: ignore[union-attr]
    assert quiet_explain(fully_shard(model)).warnings == []


def test_warning_about_nine_blocks_names_three() -> None:
    (warning,) = quiet_explain(fully_shard(MLPModel(blocks=9))).warnings
    assert warning.startswith("'blocks.0', 'blocks.1', 'blocks.2' and 6 more are repeated")


def test_explanation_names_kernels_per_device_type(fake_group: int) -> None:
    explanation = fsdp_c.explain(fully_shard(nn.Linear(8, 8)), file=io.StringIO())
    assert explanation.kernels == {"cpu": "fsdp_c's cpu kernels"}
    assert "packed on cpu by fsdp_c's cpu kernels" in str(explanation)


def test_explanation_reports_cached_buffers_until_release_memory(fake_group: int) -> None:
    gc.collect()  # frees models of other tests; their groups return buffers when they end
    model = fully_shard(nn.Linear(512, 512, bias=False))
    fsdp_c.release_memory()
    for _ in range(2):
        model(torch.ones(1, 512)).sum().backward()
        model.zero_grad()
    explanation = fsdp_c.explain(model, file=io.StringIO())
    assert explanation.buffers is not None
    _, cached = explanation.buffers
    assert cached >= 2 * 512 * 512 * 4  # the unsharded parameter and a buffer of the same size
    assert "kept for the next ones" in str(explanation)
    fsdp_c.release_memory()
    released = fsdp_c.explain(model, file=io.StringIO())
    assert released.buffers is not None and released.buffers[1] == 0


@pytest.mark.parametrize("trained_before", [False, True])
def test_explain_of_model_sharded_by_torch_raises(trained_before: bool) -> None:
    model = MLPModel()
    torch.distributed.fsdp.fully_shard(model)
    if trained_before:
        step(model)
    with pytest.raises(ValueError, match=r"'\(root\)' is sharded by torch, not by fsdp_c: call fs"):
        quiet_explain(model)


@pytest.mark.parametrize(("variable", "has_advice"), [("", False), ("8", False), ("4", True)])
def test_explain_reads_number_of_ranks_of_a_node_from_local_world_size(
    variable: str, has_advice: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", variable)
    advice = fsdp_c.explain(sharded(), memory="1GiB", file=io.StringIO()).advice
    assert any("2 nodes of 4 ranks" in str(line) for line in advice) is has_advice


# ---- optimizers ----------------------------------------------------------------------------------


class Wrapper(torch.optim.Optimizer):
    """Wraps an optimizer as accelerate's ``AcceleratedOptimizer`` does."""

    def __init__(self, optimizer: Any, device_placement: bool = True, scaler: Any = None) -> None:
        self.optimizer = optimizer

    state = property(lambda self: self.optimizer.state)  # type: ignore[assignment]
    param_groups = property(lambda self: self.optimizer.param_groups)  # type: ignore[assignment]
    defaults = property(lambda self: self.optimizer.defaults)  # type: ignore[assignment]


class Configured(torch.optim.SGD):
    """An optimizer that requires an argument besides the parameters."""

    def __init__(self, params: Any, config: dict[str, float]) -> None:
        super().__init__(params, **config)


def get_state_bytes(explanation: Explanation) -> int:
    """Returns the bytes of optimizer states in the first sample that has any."""
    states = step_memory.KINDS.index("optimizer states")
    samples = explanation.timeline.samples
    return next(sample.bytes[states] for sample in samples if sample.bytes[states])


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,
        lambda params: Wrapper(torch.optim.AdamW(params)),
        lambda params: torch.optim.AdamW(params, capturable=True),
        lambda params: torch.optim.AdamW(params, differentiable=True),
    ],
)
def test_optimizer_states_are_estimated_before_the_first_step(make: Any) -> None:
    model = sharded()
    explanation = quiet_explain(model, make([*model.parameters()]))
    shards = sum(unit.shard_bytes for unit in explanation.units)
    assert get_state_bytes(explanation) == 2 * shards and explanation.knows_optimizer


@pytest.mark.parametrize(
    "make",
    [
        lambda params: Configured(params, {"momentum": 0.9}),
        torch.optim.LBFGS,
        torch.optim.SparseAdam,
    ],
)
def test_optimizer_states_that_cannot_be_estimated_are_unknown(make: Any) -> None:
    model = sharded()
    explanation = quiet_explain(model, make([*model.parameters()]))
    assert re.search(r"optimizer states +unknown +call this after its first", str(explanation))
    assert not explanation.knows_optimizer and len(explanation.units) == 4


def test_states_of_optimizer_that_cannot_be_measured_are_counted_after_its_step() -> None:
    model = sharded()
    optimizer = Configured(model.parameters(), {"momentum": 0.9})
    step(model)
    optimizer.step()
    explanation = quiet_explain(model, optimizer)
    states = sum(p.to_local().nbytes for p in model.parameters())
    assert get_state_bytes(explanation) == states and explanation.knows_optimizer


def test_explain_counts_states_of_trained_parameters_of_the_optimizer_only() -> None:
    model = sharded()
    model.blocks[0].requires_grad_(False)
    params = [*model.blocks[0].parameters(), *model.blocks[1].parameters()]
    optimizer = torch.optim.SGD(params, momentum=0.9)
    explanation = quiet_explain(model, optimizer)
    assert get_state_bytes(explanation) == explanation.units[2].shard_bytes


class Quantized(torch.Tensor):
    """A tensor of int8 codes that looks like float32, as low-bit states of torchao do."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape)  # type: ignore[attr-defined]

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    def __tensor_flatten__(self) -> Any:
        return ["codes"], []

    __torch_dispatch__ = None  # type: ignore[assignment]


class LowBit(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            codes = torch.zeros(param.shape, dtype=torch.int8)
            self.state[param].setdefault("codes", Quantized(codes))


def test_optimizer_states_that_are_tensor_subclasses_count_their_inner_tensors() -> None:
    model = sharded()
    explanation = quiet_explain(model, LowBit(model.parameters()))
    shards = sum(unit.shard_bytes for unit in explanation.units)
    assert get_state_bytes(explanation) == shards // 4
    optimizer = LowBit([torch.zeros(8, 4)])
    optimizer.step()
    assert count_state_bytes(optimizer) == 32
    module = nn.Module()
    module.register_buffer("codes", Quantized(torch.zeros(8, 4, dtype=torch.int8)))
    assert count_bytes_outside_units(module, {}) == 32
