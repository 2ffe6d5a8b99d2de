"""``plan`` and ``explain``: what a step will need; ``auto_shard``'s embeddings, heads, bounds."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from test_explain import Block, Model, sharded
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.debug import CommDebugMode
from wrap_models import Transformer, bytes_of, units_of

import fsdp_c
from fsdp_c import Explanation, auto_shard, forecast, plan_command, report, wrap
from fsdp_c.optimizer_memory import optimizer_bytes

ROOT = Path(__file__).resolve().parents[2]
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Words(Transformer):
    """Embedding and head of 64,000 elements, three layers of 1,184."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__(layers=3, width=16)
        self.embed = nn.Embedding(4000, 16)
        self.head = nn.Linear(16, 4000, bias=False)
        if tied:
            self.head.weight = self.embed.weight


TOKENS = torch.zeros(2, 8, dtype=torch.long)


def planned(model: nn.Module, *args: Any, **kwargs: Any) -> Explanation:
    kwargs.setdefault("world_size", 8)
    return fsdp_c.plan(model, *args, file=io.StringIO(), **kwargs)


def on_meta() -> Words:
    with torch.device("meta"):
        return Words()


# ---- what is found -------------------------------------------------------------------------------


def test_a_plan_needs_neither_processes_nor_memory() -> None:
    assert not dist.is_initialized()
    found = planned(on_meta(), batch=TOKENS, memory="1 MiB", mp_policy=MIXED)
    assert [unit.name for unit in found.units] == [
        "(root)", "embed", "layers.0", "layers.1", "layers.2", "head",
    ]  # fmt: skip
    assert found.knows_activations and found.peak.total > 100_000
    assert found.fits is (found.peak.total <= 2**20)


def test_a_plan_is_what_explain_says_of_the_sharded_model(fake_group: int) -> None:
    for kwargs in ({}, {"mp_policy": MIXED}, {"reshard_after_forward": 4}):
        before = planned(Words(), batch=TOKENS, device="cpu", **kwargs)
        model = auto_shard(Words(), **kwargs)
        optimizer = torch.optim.AdamW(model.parameters())
        after = fsdp_c.explain(model, optimizer, batch=TOKENS, file=io.StringIO())
        assert after.units == before.units
        assert after.peak == before.peak
        assert after.received == before.received


def test_the_model_is_as_it_was(fake_group: int) -> None:
    model = auto_shard(Words())
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


def test_a_forward_that_asks_for_values_is_named() -> None:
    class Asks(Words):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) if tokens.sum().item() == 0 else tokens

    model = Asks()
    weight = model.embed.weight
    with pytest.raises(ValueError, match=r"Asks cannot be run on tensors without values.*DataDep"):
        planned(model, batch=TOKENS)
    assert model.embed.weight is weight and not model._forward_pre_hooks


@pytest.mark.parametrize("batch", [TOKENS, (TOKENS,), {"tokens": TOKENS}])
def test_batches_of_every_kind(batch: Any) -> None:
    assert planned(on_meta(), batch=batch).knows_activations


def test_a_loss_of_ones_own_counts() -> None:
    def loss(logits: torch.Tensor) -> torch.Tensor:
        return logits.double().exp().sum()

    plain, own = planned(on_meta(), batch=TOKENS), planned(on_meta(), batch=TOKENS, loss=loss)
    assert own.timeline.highest("activations") > plain.timeline.highest("activations")


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
def test_what_cannot_be_planned(kwargs: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        planned(on_meta(), **kwargs)


# ---- is it right? --------------------------------------------------------------------------------


@pytest.mark.parametrize("jobs", ["mlp, ", "hsdp", "gpt, mixed, reshard", "checkpoints, mixed"])
def test_the_forecast_is_what_is_measured(jobs: str) -> None:
    command = [sys.executable, "benchmarks/plan.py", "--only", jobs]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    found = re.search(r"(\d+) of (\d+) within 1%", done.stdout)
    assert found is not None and found[1] == found[2] != "0", done.stdout


def test_collectives_and_bytes_are_those_of_a_step(fake_group: int) -> None:
    model = auto_shard(Words())
    found = fsdp_c.explain(model, file=io.StringIO())
    with CommDebugMode() as comm:
        model(TOKENS).sum().backward()
    counts = {str(op): count for op, count in comm.get_comm_counts().items()}
    # Three layers twice; embedding, head and root once.
    assert counts["c10d._allgather_base_"] == sum(unit.gathers for unit in found.units) == 9
    elements = sum(param.numel() for param in model.parameters())
    layers = sum(param.numel() for param in model.layers.parameters())
    assert found.received == {"shard": 4 * (2 * elements + layers) * 7 // 8, "replicate": 0}


def test_more_is_in_flight_on_devices_with_streams() -> None:
    cpu, cuda = (planned(on_meta(), batch=TOKENS, device=name) for name in ("cpu", "cuda"))
    assert cuda.peak.total > cpu.peak.total


def test_offloaded_shards_and_states_are_elsewhere() -> None:
    here = planned(on_meta(), batch=TOKENS)
    away = planned(on_meta(), batch=TOKENS, offload_policy=fsdp_c.CPUOffloadPolicy())
    assert away.timeline.highest("shards") == away.timeline.highest("states") == 0
    assert away.timeline.samples[-1].total == 0 < here.timeline.samples[-1].total


@pytest.mark.parametrize(
    ("wanted", "on_cpu", "states", "step", "whole"),
    [
        (None, False, 2, 1, True),
        ("adamw", True, 2, 2, False),
        ("SGD", False, 0, 0, False),
        (partial(torch.optim.SGD, lr=0.1, momentum=0.9), False, 1, 0, False),
        (partial(torch.optim.AdamW, fused=True), False, 2, 0, False),
    ],
)
def test_what_optimizers_keep(
    wanted: Any, on_cpu: bool, states: float, step: float, whole: bool
) -> None:
    assert optimizer_bytes(wanted, torch.float32, on_cpu)[1:] == (states, step, whole)


def test_eight_billions_are_planned_in_little_time() -> None:
    """Two seconds of CPU on an idle machine; others use it, too."""

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
    found = planned(model, Layer, batch=torch.zeros(1, 2048, dtype=torch.long), mp_policy=MIXED)
    assert time.process_time() - begin < 6
    assert 25 * 2**30 < found.peak.total < 60 * 2**30


# ---- what is said --------------------------------------------------------------------------------


def test_equal_layers_are_one_row_and_wrappers_are_looked_through(fake_group: int) -> None:
    model = Model(blocks=12)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    text = str(fsdp_c.explain(sharded(model), file=io.StringIO()))
    assert re.search(r"^blocks.0-11 +12 x Block +4 +280 ", text, re.M)
    assert "_checkpoint_wrapped_module" not in text


def test_only_neighbours_of_one_kind_are_folded() -> None:
    def row(name: str, elements: int = 1) -> Any:
        return report.UnitReport(name, "Block", 1, elements, "", "8", 4, 1, 1, 0, 8)

    names = ["a.0", "a.1", "a.3", "b.0.c.1", "b.0.c.2", "b.1.c.2", "d"]
    rows = [*map(row, names), row("e.0"), row("e.1", 2)]
    assert [(one.name, one.modules) for one in report.folded(rows)] == [
        ("a.0-1", "2 x Block"),
        ("a.3", "Block"),
        ("b.0.c.1-2", "2 x Block"),
        ("b.1.c.2", "Block"),
        ("d", "Block"),
        ("e.0", "Block"),
        ("e.1", "Block"),
    ]


def test_the_verdict() -> None:
    model = on_meta()
    peak = planned(model, batch=TOKENS).peak.total
    fits, fails = (planned(model, batch=TOKENS, memory=peak + by) for by in (1024, -1024))
    assert fits.fits and "1.0 KiB are left" in str(fits)
    assert fails.fits is False and "it does not fit" in str(fails)
    assert "1.0 KiB too much" in str(fails)
    assert "without activations" in str(planned(model, memory=peak))
    assert planned(model).fits is None


def test_what_is_not_known_is_said(fake_group: int) -> None:
    text = str(fsdp_c.explain(sharded(), file=io.StringIO()))
    assert re.search(r"activations +unknown +pass batch=", text)
    assert re.search(r"states +unknown +pass the optimizer", text)


def test_changes_lower_the_peak_as_much_as_they_say() -> None:
    big = torch.zeros(64, 64, dtype=torch.long)
    found = planned(on_meta(), batch=big)
    assert len(found.changes) == 3
    assert found.changes == sorted(found.changes, key=lambda change: -change.saves)
    half = planned(on_meta(), batch=big[:32])
    (said,) = (change for change in found.changes if change.text.startswith("half the batch"))
    actual = found.peak.total - half.peak.total
    assert abs(said.saves - actual) < 0.05 * actual
    (said,) = (change for change in found.changes if change.text.startswith("compute in bfloat16"))
    actual = found.peak.total - planned(on_meta(), batch=big, mp_policy=MIXED).peak.total
    assert abs(said.saves - actual) < 0.25 * actual


def test_checkpoints_save_what_they_are_said_to() -> None:
    class Deep(Words):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.embed = nn.Embedding(10, 64)
            self.layers = nn.ModuleList(
                nn.Sequential(*(nn.Linear(64, 64) for _ in range(8))) for _ in range(8)
            )
            self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 10)

    model, big = Deep(), torch.zeros(512, 8, dtype=torch.long)
    found = planned(model, nn.Sequential, batch=big)
    (said,) = (change for change in found.changes if change.text.startswith("checkpoint"))
    for i, layer in enumerate(model.layers):
        model.layers[i] = checkpoint_wrapper(layer)
    actual = found.peak.total - planned(model, nn.Sequential, batch=big).peak.total
    assert abs(said.saves - actual) < 0.1 * actual


@pytest.mark.parametrize(
    ("size", "count"), [("80GiB", 80 * 2**30), ("1.5 MB", 1_500_000), ("7", 7), (9, 9)]
)
def test_sizes_are_read(size: Any, count: int) -> None:
    assert report.bytes_of(size) == count


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    found = planned(on_meta(), batch=TOKENS, memory="2 MiB")
    found.plot(tmp_path / "memory.png")
    assert (tmp_path / "memory.png").read_bytes()[:4] == b"\x89PNG"
    found.plot(tmp_path / "memory.svg")
    text = (tmp_path / "memory.svg").read_text()
    assert text.count("<path") > len(forecast.KINDS)


# ---- the command ---------------------------------------------------------------------------------


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    run = [sys.executable, "-m", "fsdp_c", "plan", *arguments]
    return subprocess.run(run, cwd=cwd, capture_output=True, text=True, timeout=280)


def test_the_command(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "mine.py").write_text(
        "import torch.nn as nn\n"
        "def model():\n"
        "    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 64)) for _ in range(4)))\n"
    )
    done = command(
        "mine:model", "2x4", "--batch", "2x64", "--memory", "1GiB", "--param-dtype", "bfloat16",
        "--plot", "memory.png", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert re.search(r"^0-3 +4 x Sequential .*float32/bfloat16/bfloat16 +2x4 ", done.stdout, re.M)
    assert "it fits into 1.0 GiB" in done.stdout and (tmp_path / "memory.png").exists()
    assert command("mine:model", "8", "--memory", "1KiB", cwd=tmp_path).returncode == 1
    wrong = command("mine:nothing", "8", cwd=tmp_path)
    assert wrong.returncode == 2 and "mine has no function or class 'nothing'" in wrong.stderr


# ---- auto_shard ----------------------------------------------------------------------------------


def names(model: nn.Module, **kwargs: Any) -> list[tuple[str, ...]]:
    return units_of(wrap.plan(model, **kwargs))


LAYERS = [("layers.0",), ("layers.1",), ("layers.2",)]


def test_embeddings_and_heads_of_a_blocks_size_are_units() -> None:
    assert names(Words()) == [("embed",), *LAYERS, ("head",), ("",)]
    assert names(Words(), separate_ends=False) == [*LAYERS, ("",)]
    assert names(Words(tied=True)) == [*LAYERS, ("",)]
    assert names(Transformer()) == [*LAYERS, ("",)]


def test_an_embedding_is_not_gathered_again_and_a_head_stays(fake_group: int) -> None:
    model: Any = auto_shard(Words())
    (embed,), (head,) = (m._get_fsdp_state()._fsdp_param_groups for m in (model.embed, model.head))
    assert not embed.unshard_in_backward and embed._reshard_after_forward
    assert head.unshard_in_backward and not head._reshard_after_forward
    model = auto_shard(Words(), reshard_after_forward=True)
    assert model.head._get_fsdp_state()._fsdp_param_groups[0]._reshard_after_forward
    model = Words()
    model.embed = nn.Embedding(4000, 16, max_norm=1.0)
    auto_shard(model)
    assert model.embed._get_fsdp_state()._fsdp_param_groups[0].unshard_in_backward


def test_auto_shard_says_what_it_did(fake_group: int, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "torch.distributed.fsdp.fully_shard"):
        auto_shard(Words())
    assert caplog.messages[-1] == (
        "fsdp_c: auto_shard made of Words: 1 x Embedding (64,000 elements), 3 x Layer (576 "
        "elements at most), 1 x Linear (64,000 elements), the root (32 elements)"
    )


@pytest.mark.parametrize("policy", ["blocks", {Block}, 10**9])
@pytest.mark.parametrize("bound", [1000, 2000, 10**6])
def test_units_stay_within_the_bound(policy: Any, bound: int) -> None:
    model = Model(blocks=6)
    kwargs: Any = {"max_transient": bound, "ranks": 8}
    try:
        wrap.plan(model, policy, **kwargs)
    except ValueError as error:
        assert bound == 1000 and "'blocks.0.up', which cannot be divided" in str(error)
        return
    assert bound > 1000
    found = planned(model, policy, max_transient=bound)
    assert max(unit.transient for unit in found.units) <= bound
    if bound == 2000:
        assert len(found.units) > len(planned(model, policy).units)


def test_a_bound_that_nothing_exceeds_changes_nothing() -> None:
    model = Words()
    assert names(model, max_transient=4 * bytes_of(model.parameters())) == names(model)


@pytest.mark.parametrize("policy", ["blocks", {Block}, 10**9])
@pytest.mark.parametrize("mp_policy", [MixedPrecisionPolicy(), MIXED])
@pytest.mark.parametrize("min_unit", [None, 2**20])
def test_a_sharded_model_stays_within_the_bound(
    policy: Any, mp_policy: MixedPrecisionPolicy, min_unit: int | None, fake_group: int
) -> None:
    largest = {}
    for bound in (10**6, 2000):
        model = auto_shard(
            Model(blocks=6), policy, max_transient=bound, min_unit=min_unit, mp_policy=mp_policy
        )
        found = fsdp_c.explain(model, file=io.StringIO())
        largest[bound] = max(unit.transient for unit in found.units)
    assert largest[2000] <= 2000
    assert largest[10**6] > 2000 or (min_unit is None and policy != 10**9)


def test_the_bound_counts_rows_for_all_ranks(fake_group: int) -> None:
    def narrow() -> nn.Sequential:
        return nn.Sequential(*(nn.Linear(64, 1, bias=False) for _ in range(4)))

    with pytest.raises(ValueError, match=r"it needs (\d+) bytes for a while") as caught:
        auto_shard(narrow(), 10**9, max_transient=1000)
    needed = int(re.findall(r"needs (\d+)", str(caught.value))[0])
    model = auto_shard(narrow(), 10**9, max_transient=needed)
    found = fsdp_c.explain(model, file=io.StringIO())
    assert max(unit.transient for unit in found.units) <= needed


def test_a_bound_that_cannot_be_kept_names_the_unit_and_leaves_the_model(fake_group: int) -> None:
    model = Words()
    match = (
        r"max_transient=100000 is too small for the unit 'embed', which cannot be divided: it "
        r"needs \d+ bytes for a while, for 'weight' \(4000, 16\) most of them"
    )
    with pytest.raises(ValueError, match=match):
        auto_shard(model, max_transient=100_000)
    assert type(model) is Words and not model._forward_pre_hooks
    with pytest.raises(ValueError, match="too small for the unit"):  # tied: one unit of both
        auto_shard(Words(tied=True), {type(model.layers[0])}, max_transient=100_000)


@pytest.mark.parametrize("name", ["max_transient", "min_unit"])
def test_bounds_are_positive_numbers(name: str, fake_group: int) -> None:
    for shard in (auto_shard, partial(planned, world_size=8)):
        for wrong in (0, -1):
            with pytest.raises(ValueError, match=f"{name} is a positive number of bytes, not"):
                shard(Words(), **{name: wrong})
        for other in ("1GiB", True):
            with pytest.raises(TypeError, match=f"{name} is a number of bytes, such as"):
                shard(Words(), **{name: other})


# ---- mistakes ------------------------------------------------------------------------------------


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
        ({"optimizer": "LBFGS"}, ValueError, "LBFGS cannot make a step .*closure"),
        ({"memory": -3}, ValueError, "expected a number of bytes such as '80GiB', not -3"),
        ({"device": "gpu"}, ValueError, "device is a torch.device or its name, not 'gpu'"),
        ({"reshard": True}, TypeError, "unexpected keyword argument 'reshard'"),
        ({"mp_policy": MixedPrecisionPolicy("bfloat16")}, Exception, "bfloat16|is_floating_point"),
    ],
)
def test_arguments_that_a_plan_does_not_understand(
    kwargs: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        planned(on_meta(), **kwargs)


@pytest.mark.parametrize("call", [planned, fsdp_c.explain, auto_shard])
def test_what_is_no_module(call: Any, fake_group: int) -> None:
    with pytest.raises(TypeError, match="expects a module, not int"):
        call(3)
    with pytest.raises(TypeError, match=r"expects a module, not the class Words: Words\(...\) is"):
        call(Words)


def test_explain_takes_the_optimizer_itself(fake_group: int) -> None:
    wrong: Any = "AdamW"
    with pytest.raises(TypeError, match="explain expects the model's optimizer, not 'AdamW'"):
        fsdp_c.explain(auto_shard(Words()), wrong)


def test_a_batch_that_does_not_fit_is_one_sentence(caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match=r"of the batch's sizes and dtypes, to see .*RuntimeError"):
        planned(Model(), batch=torch.ones(2, 9))
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (("eight",), "ranks are a number, 8, or replicas by ranks to shard over, 2x4, not 'eight'"),
        (("8", "--param-dtype", "bf17"), "argument --param-dtype: torch has no dtype 'bf17'"),
        (("8", "--device", "gpu"), "device is a torch.device or its name"),
        (("8", "--optimizer", "LBFGS"), "LBFGS cannot make a step"),
    ],
)
def test_arguments_that_the_command_does_not_understand(
    arguments: tuple[str, ...], match: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        plan_command.main(["test_plan:Words", *arguments])
    assert caught.value.code == 2 and match in capsys.readouterr().err


def test_a_model_that_cannot_be_made_is_told_from_one_that_does_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as caught:
        plan_command.main(["torch.nn:Linear", "8"])
    assert caught.value.code == 2
    assert "torch.nn:Linear() raises TypeError: Linear.__init__()" in capsys.readouterr().err
