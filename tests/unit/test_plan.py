"""``plan`` and ``explain`` predict memory and collectives of a step; units of ``auto_shard``."""

from __future__ import annotations

import io
import logging
import re
import time
from functools import partial
from pathlib import Path
from typing import Any

import fork_server
import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from releases import DataParallelMeshDims
from test_explain import sharded
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from toy_models import MLPBlock, MLPModel
from wrap_models import Transformer, bytes_of, units_of

import fsdp_c
from fsdp_c import Explanation, auto_shard, wrap
from fsdp_c._tools import report, step_memory
from fsdp_c._tools.optimizer_memory import measure_optimizer

ROOT = Path(__file__).resolve().parents[2]
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class LargeVocabulary(Transformer):
    """An embedding and a head of 64,000 elements each, and three layers of 1,184."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__(layers=3, width=16)
        self.embed = nn.Embedding(4000, 16)
        self.head = nn.Linear(16, 4000, bias=False)
        if tied:
            self.head.weight = self.embed.weight


TOKENS = torch.zeros(2, 8, dtype=torch.long)


def quiet_plan(model: nn.Module, *args: Any, **kwargs: Any) -> Explanation:
    kwargs.setdefault("world_size", 8)
    return fsdp_c.plan(model, *args, file=io.StringIO(), **kwargs)


def meta_model() -> LargeVocabulary:
    with torch.device("meta"):
        return LargeVocabulary()


# ---- units, memory and side effects --------------------------------------------------------------


def test_plan_of_meta_model_without_process_group_predicts_peak() -> None:
    assert not dist.is_initialized()
    explanation = quiet_plan(meta_model(), batch=TOKENS, memory="1 MiB", mp_policy=MIXED)
    assert [unit.name for unit in explanation.units] == [
        "(root)", "embed", "layers.0", "layers.1", "layers.2", "head",
    ]  # fmt: skip
    assert explanation.knows_activations and explanation.peak.total > 100_000
    assert explanation.fits is (explanation.peak.total <= 2**20)


def test_plan_equals_explain_of_sharded_model(fake_group: int) -> None:
    for kwargs in ({}, {"mp_policy": MIXED}, {"reshard_after_forward": 4}):
        before = quiet_plan(LargeVocabulary(), batch=TOKENS, device="cpu", **kwargs)
        model = auto_shard(LargeVocabulary(), **kwargs)
        optimizer = torch.optim.AdamW(model.parameters())
        after = fsdp_c.explain(model, optimizer, batch=TOKENS, file=io.StringIO())
        assert after.units == before.units
        assert after.peak == before.peak
        assert after.received == before.received


def test_plan_of_offloading_on_the_cpu_equals_explain(fake_group: int) -> None:
    kwargs: Any = {"offload_policy": fsdp_c.CPUOffloadPolicy()}
    before = quiet_plan(LargeVocabulary(), batch=TOKENS, device="cpu", **kwargs)
    model = auto_shard(LargeVocabulary(), **kwargs)
    optimizer = torch.optim.AdamW(model.parameters())
    after = fsdp_c.explain(model, optimizer, batch=TOKENS, file=io.StringIO())
    assert before.peak == after.peak
    assert before.peak == quiet_plan(LargeVocabulary(), batch=TOKENS, device="cpu").peak


def parallelize(mesh: Any) -> MLPModel:
    model = MLPModel()
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    for block in model.blocks:
        parallelize_module(block, mesh["tp"], plan)  # type: ignore[arg-type]
    return model


def test_plan_of_tensor_parallel_model_equals_explain(fake_group: int) -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    settings: dict[str, Any] = {"ranks_per_node": 2, "memory": "1 GiB"}
    before = quiet_plan(parallelize(mesh), world_size=4, device="cpu", **settings)
    model = auto_shard(parallelize(mesh), mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters())
    after = fsdp_c.explain(model, optimizer, file=io.StringIO())
    assert before.units == after.units and before.peak == after.peak
    blocks = [unit for unit in before.units if unit.name.startswith("blocks")]
    assert {unit.elements for unit in blocks} == {(2 * 128 + 16) // 2 + 8}
    assert not any("init_device_mesh" in str(advice) for advice in before.advice)


def test_batch_of_tensor_parallel_model_is_refused(fake_group: int) -> None:
    mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
    batch, match = torch.ones(2, 8), "is a DTensor before fully_shard.* without batch="
    with pytest.raises(ValueError, match=match):
        quiet_plan(parallelize(mesh), batch=batch)
    with pytest.raises(ValueError, match=match):
        model = auto_shard(parallelize(mesh), mesh=mesh["dp"])
        fsdp_c.explain(model, batch=batch, file=io.StringIO())


def test_explain_leaves_hooks_and_parameters_unchanged(fake_group: int) -> None:
    model = auto_shard(LargeVocabulary())
    hooks = [(dict(m._forward_pre_hooks), dict(m._forward_hooks)) for m in model.modules()]
    params = dict(model.named_parameters())
    for _ in range(2):
        fsdp_c.explain(model, batch=TOKENS, file=io.StringIO())
    assert model._get_fsdp_state()._is_root is None
    assert hooks == [(dict(m._forward_pre_hooks), dict(m._forward_hooks)) for m in model.modules()]
    now = dict(model.named_parameters())
    assert now.keys() == params.keys() and all(now[name] is params[name] for name in params)
    assert all(param.grad is None for param in now.values())
    model(TOKENS).sum().backward()
    assert all(param.grad is not None for param in now.values())


def test_plan_of_forward_that_reads_values_raises_with_model_name() -> None:
    class ReadsValues(LargeVocabulary):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) if tokens.sum().item() == 0 else tokens

    model = ReadsValues()
    weight = model.embed.weight
    with pytest.raises(ValueError, match=r"ReadsValues: it cannot run on fake tensors.*DataDep"):
        quiet_plan(model, batch=TOKENS)
    assert model.embed.weight is weight and not model._forward_pre_hooks


@pytest.mark.parametrize("batch", [TOKENS, (TOKENS,), {"tokens": TOKENS}])
def test_plan_accepts_batch_as_tensor_tuple_or_dict(batch: Any) -> None:
    assert quiet_plan(meta_model(), batch=batch).knows_activations


def test_plan_with_custom_loss_counts_its_activations() -> None:
    def loss(logits: torch.Tensor) -> torch.Tensor:
        return logits.double().exp().sum()

    default = quiet_plan(meta_model(), batch=TOKENS)
    custom = quiet_plan(meta_model(), batch=TOKENS, loss=loss)
    assert custom.timeline.highest("activations") > default.timeline.highest("activations")


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"world_size": None}, "plan needs world_size= or mesh="),
        ({"world_size": None, "mesh": (2, 2, 2)}, "a mesh of one or two dimensions, not"),
        ({"world_size": 8, "mesh": (2, 2)}, "has 4 ranks, not 8"),
        ({"memory": "much"}, "expected a number of bytes such as '80GiB', not 'much'"),
        ({"optimizer": "adamwx"}, "torch.optim has no optimizer 'adamwx'"),
    ],
)
def test_plan_with_invalid_argument_raises(kwargs: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        quiet_plan(meta_model(), **kwargs)


# ---- predictions against measurements ------------------------------------------------------------


@pytest.mark.parametrize("jobs", ["mlp, ", "hsdp", "gpt, mixed, reshard", "checkpoints, mixed"])
def test_predicted_peak_is_within_one_percent_of_measured_peak(jobs: str) -> None:
    completed = fork_server.run_script(ROOT / "benchmarks/plan.py", "--only", jobs)
    assert completed.returncode == 0, completed.stderr[-3000:]
    match = re.search(r"(\d+) of (\d+) within 1%", completed.stdout)
    assert match is not None and match[1] == match[2] != "0", completed.stdout


def test_explain_counts_collectives_and_bytes_of_one_step(fake_group: int) -> None:
    model = auto_shard(LargeVocabulary())
    explanation = fsdp_c.explain(model, file=io.StringIO())
    with CommDebugMode() as comm:
        model(TOKENS).sum().backward()
    counts = {str(op): count for op, count in comm.get_comm_counts().items()}
    # A step gathers each of three layers twice, and the embedding, the head and the root once.
    assert counts["c10d._allgather_base_"] == sum(unit.gathers for unit in explanation.units) == 9
    elements = sum(param.numel() for param in model.parameters())
    layers = sum(param.numel() for param in model.layers.parameters())
    assert explanation.received == {"shard": 4 * (2 * elements + layers) * 7 // 8, "replicate": 0}


def test_predicted_peak_on_cuda_exceeds_cpu_due_to_overlap() -> None:
    cpu, cuda = (quiet_plan(meta_model(), batch=TOKENS, device=name) for name in ("cpu", "cuda"))
    assert cuda.peak.total > cpu.peak.total


def test_offloaded_shards_and_states_take_no_device_memory() -> None:
    on_device = quiet_plan(meta_model(), batch=TOKENS)
    offloaded = quiet_plan(meta_model(), batch=TOKENS, offload_policy=fsdp_c.CPUOffloadPolicy())
    highest = offloaded.timeline.highest
    assert highest("shards") == highest("optimizer states") == 0
    assert offloaded.timeline.samples[-1].total == 0 < on_device.timeline.samples[-1].total


@pytest.mark.parametrize(
    ("optimizer", "on_cpu", "state_ratio", "step_ratio", "counts_all_parameters"),
    [
        (None, False, 2, 1, True),
        ("adamw", True, 2, 2, False),
        ("SGD", False, 0, 0, False),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), False, 1, 0, False),
        (partial(torch.optim.AdamW, fused=True), False, 2, 0, False),
        (partial(torch.optim.AdamW), False, 2, 1, True),
        (partial(torch.optim.AdamW, capturable=True), False, 2, 1, True),
        (partial(torch.optim.AdamW, differentiable=True), True, 2, 2, False),
    ],
)
def test_optimizer_bytes_counts_states_and_temporaries(
    optimizer: Any, on_cpu: bool, state_ratio: float, step_ratio: float, counts_all_parameters: bool
) -> None:
    measured = measure_optimizer(optimizer, torch.float32, on_cpu)
    assert measured[1:] == (state_ratio, step_ratio, counts_all_parameters)


def test_plan_of_8_billion_parameters_takes_less_than_6_cpu_seconds() -> None:
    """An idle machine takes one second. The limit allows for other processes."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.qkv = nn.LayerNorm(4096), nn.Linear(4096, 6144, bias=False)
            self.out = nn.Linear(4096, 4096, bias=False)
            self.up, self.down = nn.Linear(4096, 2 * 14336), nn.Linear(14336, 4096)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(self.norm(x)).split([4096, 1024, 1024], -1)
            heads = [t.unflatten(-1, (-1, 128)).transpose(1, 2) for t in (q, k, v)]
            mixed = nn.functional.scaled_dot_product_attention(*heads, enable_gqa=True)
            x = x + self.out(mixed.transpose(1, 2).flatten(2))
            gate, up = self.up(x).chunk(2, -1)
            return x + self.down(nn.functional.silu(gate) * up)

    with torch.device("meta"):
        model = nn.Sequential(
            nn.Embedding(128256, 4096), *(Layer() for _ in range(32)), nn.Linear(4096, 128256)
        )
    assert sum(param.numel() for param in model.parameters()) > 8e9
    begin = time.process_time()
    explanation = quiet_plan(
        model, Layer, batch=torch.zeros(1, 2048, dtype=torch.long), mp_policy=MIXED
    )
    assert time.process_time() - begin < 6
    assert 25 * 2**30 < explanation.peak.total < 60 * 2**30


# ---- printed text --------------------------------------------------------------------------------


def test_unit_table_merges_equal_layers_and_omits_wrapper_names(fake_group: int) -> None:
    model = MLPModel(blocks=12)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    text = str(fsdp_c.explain(sharded(model), file=io.StringIO()))
    assert re.search(r"^blocks.0-11 +12 x MLPBlock +4 +280 ", text, re.M)
    assert "_checkpoint_wrapped_module" not in text


def test_unit_table_merges_only_adjacent_units_of_equal_size() -> None:
    def unit(name: str, elements: int = 1) -> Any:
        return report.UnitReport(name, "Block", 1, elements, "", "8", 4, 1, 1, 0, 8)

    names = ["a.0", "a.1", "a.3", "b.0.c.1", "b.0.c.2", "b.1.c.2", "d"]
    units = [*map(unit, names), unit("e.0"), unit("e.1", 2)]
    assert [(merged.name, merged.modules) for merged in report.combine_similar_units(units)] == [
        ("a.0-1", "2 x Block"),
        ("a.3", "Block"),
        ("b.0.c.1-2", "2 x Block"),
        ("b.1.c.2", "Block"),
        ("d", "Block"),
        ("e.0", "Block"),
        ("e.1", "Block"),
    ]


def test_merged_unit_name_keeps_number_signs_and_leading_zeros() -> None:
    units = [
        report.UnitReport(name, "Block", 1, 1, "", "8", 4, 1, 1, 0, 8)
        for name in ("a#0", "a#1", "v01.b.0", "v01.b.1")
    ]
    names = [merged.name for merged in report.combine_similar_units(units)]
    assert names == ["a#0-1", "v01.b.0-1"]


def test_plan_fits_if_peak_is_below_given_memory() -> None:
    model = meta_model()
    peak = quiet_plan(model, batch=TOKENS).peak.total
    fits, fails = (quiet_plan(model, batch=TOKENS, memory=peak + by) for by in (1024, -1024))
    assert fits.fits and "1.0 KiB are left" in str(fits)
    assert fails.fits is False and "it does not fit" in str(fails)
    assert "1.0 KiB too much" in str(fails)
    assert "without activations" in str(quiet_plan(model, memory=peak))
    assert quiet_plan(model).fits is None


def test_plan_table_without_batch_and_optimizer_lists_missing_arguments(fake_group: int) -> None:
    text = str(fsdp_c.explain(sharded(), file=io.StringIO()))
    assert re.search(r"activations +unknown +pass a batch", text)
    assert re.search(r"optimizer states +unknown +pass the optimizer", text)


def test_unit_table_separates_columns_of_sizes_with_ten_characters() -> None:
    model = nn.Linear(16, 16000, bias=False)
    text = str(quiet_plan(model, 2**20, world_size=1, optimizer="SGD"))
    assert re.search(r"shards +1000\.0 KiB  1000\.0 KiB", text)


def test_suggested_changes_lower_peak_by_predicted_amount() -> None:
    big = torch.zeros(64, 64, dtype=torch.long)
    explanation = quiet_plan(meta_model(), batch=big)
    assert len(explanation.changes) == 3
    assert explanation.changes == sorted(explanation.changes, key=lambda change: -change.saves)
    half = quiet_plan(meta_model(), batch=big[:32])
    (change,) = (c for c in explanation.changes if c.text.startswith("half the batch"))
    actual = explanation.peak.total - half.peak.total
    assert abs(change.saves - actual) < 0.05 * actual
    (change,) = (c for c in explanation.changes if c.text.startswith("compute in bfloat16"))
    mixed = quiet_plan(meta_model(), batch=big, mp_policy=MIXED)
    actual = explanation.peak.total - mixed.peak.total
    assert abs(change.saves - actual) < 0.25 * actual


def test_suggested_checkpointing_lowers_peak_by_predicted_amount() -> None:
    class Deep(LargeVocabulary):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.embed = nn.Embedding(10, 64)
            self.layers = nn.ModuleList(
                nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))) for _ in range(8)
            )
            self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 10)

    model, big = Deep(), torch.zeros(512, 8, dtype=torch.long)
    explanation = quiet_plan(model, nn.Sequential, batch=big)
    (change,) = (c for c in explanation.changes if c.text.startswith("checkpoint"))
    for i, layer in enumerate(model.layers):
        model.layers[i] = checkpoint_wrapper(layer)
    actual = explanation.peak.total - quiet_plan(model, nn.Sequential, batch=big).peak.total
    assert abs(change.saves - actual) < 0.1 * actual


@pytest.mark.parametrize(
    ("size", "count"),
    [("80GiB", 80 * 2**30), ("1.5 MB", 1_500_000), ("7", 7), (9, 9), (".5k", 500)],
)
def test_parse_bytes_accepts_units_and_plain_numbers(size: Any, count: int) -> None:
    assert report.parse_bytes(size) == count


@pytest.mark.parametrize(
    "size", ["1.2.3GiB", ".", "80 GiBs", "9" * 310, "9" * 307 + "TiB"], ids=lambda size: size[:8]
)
def test_parse_bytes_of_other_text_raises(size: str) -> None:
    with pytest.raises(ValueError, match=f"a number of bytes such as '80GiB', not {size!r}"):
        report.parse_bytes(size)


def test_memory_plot_of_model_without_parameters_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    quiet_plan(nn.Identity(), 2**20).plot(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes()[:4] == b"\x89PNG"


def test_memory_plot_writes_png_and_svg(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    explanation = quiet_plan(meta_model(), batch=TOKENS, memory="2 MiB")
    explanation.plot(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes()[:4] == b"\x89PNG"
    explanation.plot(tmp_path / "memory.svg")
    text = (tmp_path / "memory.svg").read_text()
    assert text.count("<path") > len(step_memory.KINDS)


# ---- auto_shard ----------------------------------------------------------------------------------


def unit_names(model: nn.Module, **kwargs: Any) -> list[tuple[str, ...]]:
    return units_of(wrap.plan(model, **kwargs))


LAYERS = [("layers.0",), ("layers.1",), ("layers.2",)]


def test_auto_shard_makes_units_of_large_untied_embedding_and_head() -> None:
    assert unit_names(LargeVocabulary()) == [("embed",), *LAYERS, ("head",), ("",)]
    assert unit_names(LargeVocabulary(), separate_ends=False) == [*LAYERS, ("",)]
    assert unit_names(LargeVocabulary(tied=True)) == [*LAYERS, ("",)]
    assert unit_names(Transformer()) == [*LAYERS, ("",)]


def test_auto_shard_skips_backward_unshard_of_embedding_and_reshard_of_head(
    fake_group: int,
) -> None:
    model: Any = auto_shard(LargeVocabulary())
    (embed,), (head,) = (m._get_fsdp_state()._fsdp_param_groups for m in (model.embed, model.head))
    assert not embed.unshard_in_backward and embed._reshard_after_forward
    assert head.unshard_in_backward and not head._reshard_after_forward
    model = auto_shard(LargeVocabulary(), reshard_after_forward=True)
    assert model.head._get_fsdp_state()._fsdp_param_groups[0]._reshard_after_forward
    model = LargeVocabulary()
    model.embed = nn.Embedding(4000, 16, max_norm=1.0)
    auto_shard(model)
    assert model.embed._get_fsdp_state()._fsdp_param_groups[0].unshard_in_backward


def test_auto_shard_logs_its_units(fake_group: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "torch.distributed.fsdp.fully_shard"):
        auto_shard(LargeVocabulary())
    assert caplog.messages[-1] == (
        "fsdp_c: auto_shard units of LargeVocabulary: 1 x Embedding (64,000 elements), "
        "3 x Layer (576 elements at most), 1 x Linear (64,000 elements), the root (32 elements)"
    )


@pytest.mark.parametrize("policy", ["blocks", {MLPBlock}, 10**9])
@pytest.mark.parametrize("bound", [1000, 2000, 10**6])
def test_planned_units_stay_within_max_transient(policy: Any, bound: int) -> None:
    model = MLPModel(blocks=6)
    kwargs: Any = {"max_transient": bound, "ranks": 8}
    try:
        wrap.plan(model, policy, **kwargs)
    except ValueError as error:
        assert bound == 1000 and "is too small: the unit 'blocks.0.up'" in str(error)
        return
    assert bound > 1000
    explanation = quiet_plan(model, policy, max_transient=bound)
    assert max(unit.transient for unit in explanation.units) <= bound
    if bound == 2000:
        assert len(explanation.units) > len(quiet_plan(model, policy).units)


def test_large_max_transient_keeps_default_units() -> None:
    model = LargeVocabulary()
    large = 4 * bytes_of(model.parameters())
    assert unit_names(model, max_transient=large) == unit_names(model)


@pytest.mark.parametrize("policy", ["blocks", {MLPBlock}, 10**9])
@pytest.mark.parametrize("mp_policy", [MixedPrecisionPolicy(), MIXED])
@pytest.mark.parametrize("min_unit", [None, 2**20])
def test_units_of_sharded_model_stay_within_max_transient(
    policy: Any, mp_policy: MixedPrecisionPolicy, min_unit: int | None, fake_group: int
) -> None:
    largest = {}
    for bound in (10**6, 2000):
        model = auto_shard(
            MLPModel(blocks=6), policy, max_transient=bound, min_unit=min_unit, mp_policy=mp_policy
        )
        explanation = fsdp_c.explain(model, file=io.StringIO())
        largest[bound] = max(unit.transient for unit in explanation.units)
    assert largest[2000] <= 2000
    assert largest[10**6] > 2000 or (min_unit is None and policy != 10**9)


def test_max_transient_includes_padding_of_all_ranks(fake_group: int) -> None:
    def narrow_model() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(64, 1, bias=False) for _ in range(4)))

    with pytest.raises(ValueError, match=r"temporarily needs (\d+) bytes") as caught:
        auto_shard(narrow_model(), 10**9, max_transient=1000)
    needed = int(re.findall(r"needs (\d+)", str(caught.value))[0])
    model = auto_shard(narrow_model(), 10**9, max_transient=needed)
    explanation = fsdp_c.explain(model, file=io.StringIO())
    assert max(unit.transient for unit in explanation.units) <= needed


@pytest.mark.torch("2.12")
@pytest.mark.parametrize(
    ("dims", "ranks"),
    [({"shard": "dp"}, 2), ({"shard": ("dp", "tp")}, 8), ({"replicate": "dp"}, 1)],
)
def test_max_transient_counts_ranks_of_shard_dims(
    dims: dict[str, Any], ranks: int, fake_group: int
) -> None:
    model = nn.Sequential(*(nn.Linear(16, 16, bias=False) for _ in range(2)))
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    # Gradients, the input and the output of the reduce-scatter. An all-reduce is in place.
    needed = 2 * 1024 + (1024 // ranks if ranks > 1 else 0)
    with pytest.raises(ValueError, match=f"temporarily needs {needed} bytes"):
        wrap.plan(model, max_transient=1000, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(**dims))


def test_too_small_max_transient_raises_with_unit_and_leaves_model_unchanged(
    fake_group: int,
) -> None:
    model = LargeVocabulary()
    match = (
        r"max_transient=100000 is too small: the unit 'embed' temporarily needs \d+ bytes, most of "
        r"them for 'weight' \(4000, 16\), and auto_shard cannot split it"
    )
    with pytest.raises(ValueError, match=match):
        auto_shard(model, max_transient=100_000)
    assert type(model) is LargeVocabulary and not model._forward_pre_hooks
    tied = LargeVocabulary(tied=True)  # one unit has both tied modules
    with pytest.raises(ValueError, match="is too small: the unit"):
        auto_shard(tied, {type(model.layers[0])}, max_transient=100_000)


@pytest.mark.parametrize("name", ["max_transient", "min_unit"])
def test_plan_limit_that_is_not_a_positive_number_of_bytes_raises(
    name: str, fake_group: int
) -> None:
    for function in (auto_shard, partial(quiet_plan, world_size=8)):
        for value in (0, -1):
            with pytest.raises(ValueError, match=f"{name} is a positive number of bytes, not"):
                function(LargeVocabulary(), **{name: value})
        for value in ("1GiB", True):
            match = rf"{name} is a number of bytes, such as .*\({type(value).__name__}\)"
            with pytest.raises(TypeError, match=match):
                function(LargeVocabulary(), **{name: value})


# ---- invalid arguments ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"world_size": -2}, ValueError, "a number of ranks is positive, not -2"),
        ({"world_size": 1.5}, TypeError, "a number of ranks is an integer, not 1.5"),
        ({"world_size": "8"}, TypeError, "a number of ranks is an integer, not '8'"),
        ({"world_size": None, "mesh": 8}, TypeError, r"mesh is .* a shape such as \(2, 4\), not 8"),
        ({"world_size": None, "mesh": "2x4"}, TypeError, "mesh is a DeviceMesh or a shape"),
        ({"optimizer": "Adamm"}, ValueError, "no optimizer 'Adamm': did you mean Adam?"),
        ({"optimizer": "Optimizer"}, ValueError, "torch.optim has no optimizer 'Optimizer'"),
        ({"optimizer": 3}, TypeError, "an optimizer is a class, its name, or a function"),
        ({"optimizer": "LBFGS"}, ValueError, "memory of LBFGS: .*closure"),
        ({"memory": -3}, ValueError, "expected a number of bytes such as '80GiB', not -3"),
        ({"device": "gpu"}, ValueError, "device is a torch.device or its name, not 'gpu'"),
        ({"reshard": True}, TypeError, "unexpected keyword argument 'reshard'"),
        ({"mp_policy": MixedPrecisionPolicy("bfloat16")}, Exception, "bfloat16|is_floating_point"),
        ({"reshard_after_forward": 3}, ValueError, "should be a factor of 8, not 3"),
        ({"reshard_after_forward": -2}, ValueError, "should be a factor of 8, not -2"),
        ({"reshard_after_forward": 16}, ValueError, "should be a factor of 8, not 16"),
        ({"reshard_after_forward": "yes"}, ValueError, "should be a bool or an int"),
    ],
)
def test_plan_with_argument_of_wrong_type_or_value_raises(
    kwargs: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        quiet_plan(meta_model(), **kwargs)


@pytest.mark.parametrize("call", [quiet_plan, fsdp_c.explain, auto_shard])
def test_plan_explain_and_auto_shard_of_object_that_is_not_a_module_raise(
    call: Any, fake_group: int
) -> None:
    with pytest.raises(TypeError, match="expects a module, not int"):
        call(3)
    match = r"expects a module, not the class LargeVocabulary: LargeVocabulary\(...\) is"
    with pytest.raises(TypeError, match=match):
        call(LargeVocabulary)


def test_explain_with_name_of_optimizer_raises(fake_group: int) -> None:
    name: Any = "AdamW"
    with pytest.raises(TypeError, match="explain expects the model's optimizer, not 'AdamW'"):
        fsdp_c.explain(auto_shard(LargeVocabulary()), name)


def test_plan_with_batch_of_wrong_shape_raises_and_logs_nothing(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with pytest.raises(
        ValueError, match=r"fake tensors of the batch's sizes and dtypes: RuntimeError"
    ):
        quiet_plan(MLPModel(), batch=torch.ones(2, 9))
    assert caplog.messages == []
