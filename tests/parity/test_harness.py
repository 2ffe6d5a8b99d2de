"""The parity harness itself: its grid covers what it claims, and its comparison can fail."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from grid import CHOICES, MIXED, MIXED_FIELDS, generate
from meshes import KINDS
from models_wide import WIDE_FAMILIES
from record import Bits, Recorder, differences
from setting import WIDE_SCHEDULES, Launch, Setting
from surface import FEATURES, needed
from thread_ranks import METHODS
from wide import EXTRAS, PLACES, generate_wide
from worker import run_grid

pytestmark = pytest.mark.timeout(1200)

PLAIN = Setting(family="tiny")


def fully_shard_that_dies(*args: Any, **kwargs: Any) -> None:
    """An implementation whose process dies, as one with a memory error does."""
    os._exit(7)


def fully_shard_mostly(module: Any, **kwargs: Any) -> Any:
    """Torch's, but dying on what the plain setting does not do: reshard_after_forward=True."""
    from torch.distributed.fsdp import fully_shard

    if kwargs["reshard_after_forward"]:
        os._exit(7)
    return fully_shard(module, **kwargs)


def fully_shard_losing_a_rank(module: Any, **kwargs: Any) -> Any:
    """Torch's, but one rank raises where the plain setting does not go; the others go on."""
    from torch.distributed.fsdp import fully_shard

    if kwargs["reshard_after_forward"] and torch.distributed.get_rank() == 1:
        raise ValueError("lost")
    return fully_shard(module, **kwargs)


def test_grid_is_a_function_of_its_seed() -> None:
    assert generate(3, 220) == generate(3, 220)
    assert generate(3, 220) != generate(4, 220)


def test_a_wider_grid_contains_the_narrower() -> None:
    assert generate(3, 400)[:220] == generate(3, 220)


def test_grid_has_no_duplicates_and_names_are_unique() -> None:
    settings = generate(0, 240)
    assert len(settings) == len({str(setting) for setting in settings}) == 240


@pytest.mark.parametrize("name", CHOICES)
def test_grid_takes_every_value_of_every_dimension(name: str) -> None:
    taken = {getattr(setting, name) for setting in generate(0, 240)}
    assert taken == set(CHOICES[name])


def test_grid_takes_every_mixed_precision_combination() -> None:
    taken = {tuple(getattr(s, name) for name in MIXED_FIELDS) for s in generate(0, 240)}
    assert set(MIXED) <= taken


@pytest.mark.parametrize(
    ("name", "values"),
    [
        *EXTRAS.items(),
        ("family", tuple(WIDE_FAMILIES)),
        ("mesh", tuple(KINDS)),
        ("schedule", WIDE_SCHEDULES),
        ("reshard", ("1", "2", "4")),
        ("compiled", ("blocks", "root")),
    ],
)
def test_wide_grid_takes_every_value_of_every_dimension(name: str, values: tuple[Any, ...]) -> None:
    taken = {getattr(s, name) for _, s in generate_wide(0, 360, frozenset(FEATURES))}
    assert set(values) <= taken


def test_wide_grid_uses_no_feature_that_has_not_landed() -> None:
    few = frozenset({"hsdp"})
    settings = generate_wide(0, 100, few)
    assert len(settings) == 100
    assert all(needed(setting) <= few for _, setting in settings)
    assert generate_wide(0, 300, few)[:100] == settings


def test_every_launch_of_the_wide_grid_has_settings() -> None:
    launches = [launch for launch, _ in generate_wide(0, 360, frozenset(FEATURES))]
    assert {launch: launches.count(launch) for launch in set(launches)}.keys() == {
        launch for launch, _, _ in PLACES
    }


def test_threads_as_ranks_compare_like_processes(tmp_path: Path) -> None:
    threads = Launch(4, threads=True)
    settings = [
        replace(PLAIN, perturb=1e-3),
        replace(PLAIN, family="residual", param="bf16", cast_inputs=False),
        replace(PLAIN, mesh="hsdp"),
    ]
    stock = run_grid("torch", settings, threads, tmp_path, ours=False)
    ours = run_grid("torch", settings, threads, tmp_path, ours=True)
    found = "\n".join(differences(stock[0][3], ours[0][3]))
    assert "step 2.0 output" in found
    assert "step 1" not in found
    # An error, which all ranks raise; the setting behind it runs on new ranks.
    for rank in range(4):
        assert stock[1][rank][-1][0] == "error"
        assert any(METHODS[0].strip("_") in label for label, _ in stock[2][rank])
        assert any("allreduce" in label for label, _ in stock[2][rank])
        assert differences(stock[2][rank], ours[2][rank]) == []


def test_ranks_out_of_step_cost_their_own_setting_only(tmp_path: Path) -> None:
    settings = [PLAIN, replace(PLAIN, reshard=True), PLAIN]
    losing = "test_harness:fully_shard_losing_a_rank"
    lost = run_grid(losing, settings, Launch(2), tmp_path, ours=True, collective_seconds=5)
    stock = run_grid("torch", settings, Launch(2), tmp_path, ours=False)
    assert lost[1][1][-1] == ("error", "ValueError: lost")
    assert lost[1][0][-1][0] == "error"  # its peer has waited in vain
    assert [differences(stock[i][0], lost[i][0]) for i in (0, 2)] == [[], []]


def test_equal_runs_compare_equal_and_a_perturbed_one_does_not(tmp_path: Path) -> None:
    settings = [PLAIN, replace(PLAIN, perturb=1e-3)]
    stock = run_grid("torch", settings, Launch(2), tmp_path, ours=False)
    ours = run_grid("torch", settings, Launch(2), tmp_path, ours=True)
    for rank in range(2):
        assert stock[0][rank][-1][0].startswith("final state")
        assert any(label.startswith("collective") for label, _ in stock[0][rank])
        assert differences(stock[0][rank], ours[0][rank]) == []
    found = "\n".join(differences(stock[1][0], ours[1][0]))
    assert "step 2.0 output" in found
    assert "step 1" not in found


def test_a_crash_costs_its_own_setting_only(tmp_path: Path) -> None:
    settings = [PLAIN, replace(PLAIN, reshard=True), PLAIN]
    ours = run_grid("test_harness:fully_shard_mostly", settings, Launch(2), tmp_path, ours=True)
    stock = run_grid("torch", settings, Launch(2), tmp_path, ours=False)
    assert differences(stock[0][1], ours[0][1]) == []
    assert ours[1][1][0][0] == "crash"
    assert "exit status 7" in ours[1][1][0][1]
    assert differences(stock[1][1], ours[1][1]) != []
    assert differences(stock[2][1], ours[2][1]) == []


def test_an_implementation_that_always_dies_is_given_up(tmp_path: Path) -> None:
    dies = "test_harness:fully_shard_that_dies"
    ours = run_grid(dies, generate(0, 5), Launch(1), tmp_path, ours=True, max_crashes=2)
    assert [records[0][-1][0] for records in ours] == ["crash"] * 2 + ["not run"] * 3


def test_an_exception_is_compared_by_type_and_message(tmp_path: Path) -> None:
    failing = replace(PLAIN, family="residual", param="bf16", cast_inputs=False)
    [records] = run_grid("torch", [failing], Launch(2), tmp_path, ours=False)
    label, text = records[0][-1]
    assert label == "error"
    assert text.startswith("RuntimeError: ")
    other = [*records[0][:-1], ("error", "ValueError: something else")]
    assert len(differences(records[0], other)) == 1


class TestDifferences:
    """Bits, not tolerances."""

    @staticmethod
    def note(*tensors: torch.Tensor) -> list[Any]:
        recorder = Recorder()
        for tensor in tensors:
            recorder.tensor("t", tensor)
        return recorder.entries

    def test_the_smallest_step_counts(self) -> None:
        one = torch.ones(3)
        next_up = torch.nextafter(one, torch.tensor(2.0))
        assert differences(self.note(one), self.note(one.clone())) == []
        assert "3 of 3 differ" in differences(self.note(one), self.note(next_up))[0]

    def test_the_sign_of_zero_counts(self) -> None:
        assert differences(self.note(torch.zeros(1)), self.note(-torch.zeros(1))) != []

    def test_nan_equals_itself(self) -> None:
        nan = torch.tensor([float("nan")])
        assert differences(self.note(nan), self.note(nan.clone())) == []

    def test_dtype_shape_and_emptiness_count(self) -> None:
        empty = torch.empty(0, 5)
        assert differences(self.note(empty), self.note(torch.empty(0, 7))) != []
        assert differences(self.note(empty), self.note(empty.bfloat16())) != []
        assert differences(self.note(empty), [("t", None)]) != []

    def test_missing_and_additional_entries_count(self) -> None:
        one = torch.ones(3)
        assert differences(self.note(one, one), self.note(one)) != []
        assert differences(self.note(one), self.note(one, one)) != []

    def test_the_order_of_collectives_counts(self) -> None:
        gather = ("collective allgather_base", [("torch.float32", 4), ("torch.float32", 2)])
        scatter = ("collective reduce_scatter_base", [("torch.float32", 2), ("torch.float32", 4)])
        assert differences([gather, scatter], [scatter, gather]) != []

    def test_non_contiguous_tensors_compare_by_value(self) -> None:
        matrix = torch.arange(6.0).view(2, 3)
        assert Bits.of(matrix.t()) == Bits.of(matrix.t().contiguous())
