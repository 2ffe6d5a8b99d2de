"""The parity harness: its grid covers all values, and its comparison detects differences."""

from __future__ import annotations

import atexit
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from feature_support import FEATURES, features_of
from grid import CHOICES, MIXED, MIXED_FIELDS, generate
from meshes import KINDS
from models_wide import WIDE_FAMILIES
from record import Bits, Recorder, differences
from setting import WIDE_SCHEDULES, Launch, Setting
from thread_ranks import GATHER
from wide import EXTRAS, PLACES, generate_wide
from worker import run_grid

pytestmark = pytest.mark.timeout(1200)

PLAIN = Setting(family="tiny")


def fully_shard_exiting(*args: Any, **kwargs: Any) -> None:
    """Ends the process, as a memory error does."""
    os._exit(7)


def fully_shard_exiting_after_all_settings(*args: Any, **kwargs: Any) -> Any:
    """Calls torch's function. The process fails at its exit."""
    from torch.distributed.fsdp import fully_shard

    atexit.register(os._exit, 7)
    return fully_shard(*args, **kwargs)


def fully_shard_exiting_on_reshard(module: Any, **kwargs: Any) -> Any:
    """Calls torch's function, but exits for reshard_after_forward=True. PLAIN does not use it."""
    from torch.distributed.fsdp import fully_shard

    if kwargs["reshard_after_forward"]:
        os._exit(7)
    return fully_shard(module, **kwargs)


def fully_shard_raising_on_rank_1(module: Any, **kwargs: Any) -> Any:
    """Calls torch's function, but raises on rank 1 for reshard_after_forward=True."""
    from torch.distributed.fsdp import fully_shard

    if kwargs["reshard_after_forward"] and torch.distributed.get_rank() == 1:
        raise ValueError("lost")
    return fully_shard(module, **kwargs)


def fully_shard_ending_its_thread(*args: Any, **kwargs: Any) -> None:
    """Raises an exception that no setting records."""
    raise KeyboardInterrupt


def test_grid_depends_on_seed_only() -> None:
    assert generate(3, 220) == generate(3, 220)
    assert generate(3, 220) != generate(4, 220)


def test_larger_grid_starts_with_smaller_grid() -> None:
    assert generate(3, 400)[:220] == generate(3, 220)


def test_grid_setting_names_are_unique() -> None:
    settings = generate(0, 240)
    assert len(settings) == len({str(setting) for setting in settings}) == 240


@pytest.mark.parametrize("name", CHOICES)
def test_grid_contains_every_value_of_each_dimension(name: str) -> None:
    generated = {getattr(setting, name) for setting in generate(0, 240)}
    assert generated == set(CHOICES[name])


def test_grid_contains_every_mixed_precision_combination() -> None:
    generated = {tuple(getattr(s, name) for name in MIXED_FIELDS) for s in generate(0, 240)}
    assert set(MIXED) <= generated


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
def test_wide_grid_contains_every_value_of_each_dimension(
    name: str, values: tuple[Any, ...]
) -> None:
    generated = {getattr(s, name) for _, s in generate_wide(0, 360, frozenset(FEATURES))}
    assert set(values) <= generated


def test_wide_grid_uses_given_features_only() -> None:
    hsdp_only = frozenset({"hsdp"})
    settings = generate_wide(0, 100, hsdp_only)
    assert len(settings) == 100
    assert all(features_of(setting) <= hsdp_only for _, setting in settings)
    assert generate_wide(0, 300, hsdp_only)[:100] == settings


def test_wide_grid_has_settings_for_every_launch() -> None:
    launches = {launch for launch, _ in generate_wide(0, 360, frozenset(FEATURES))}
    assert launches == {launch for launch, _, _ in PLACES}


def test_run_grid_on_threads_detects_differences_and_errors(tmp_path: Path) -> None:
    threads = Launch(4, threads=True)
    settings = [
        replace(PLAIN, perturb=1e-3),
        replace(PLAIN, family="residual", param="bf16", cast_inputs=False),
        replace(PLAIN, mesh="hsdp"),
    ]
    torch_records = run_grid("torch", settings, threads, tmp_path, is_under_test=False)
    fsdp_c_records = run_grid("torch", settings, threads, tmp_path, is_under_test=True)
    lines = "\n".join(differences(torch_records[0][3], fsdp_c_records[0][3]))
    assert "step 2.0 output" in lines
    assert "step 1" not in lines
    # All ranks raise the error of setting 1. Setting 2 runs on new ranks.
    for rank in range(4):
        assert torch_records[1][rank][-1][0] == "error"
        assert any(GATHER.strip("_") in label for label, _ in torch_records[2][rank])
        assert any("allreduce" in label for label, _ in torch_records[2][rank])
        assert differences(torch_records[2][rank], fsdp_c_records[2][rank]) == []


def test_run_grid_raises_if_thread_ranks_end_without_a_record(tmp_path: Path) -> None:
    ending = "test_harness:fully_shard_ending_its_thread"
    with pytest.raises(RuntimeError, match="no setting has the records of all ranks"):
        run_grid(ending, [PLAIN], Launch(2, threads=True), tmp_path, is_under_test=True)


def test_run_grid_with_error_on_one_rank_keeps_other_records(tmp_path: Path) -> None:
    settings = [PLAIN, replace(PLAIN, reshard=True), PLAIN]
    raising = "test_harness:fully_shard_raising_on_rank_1"
    lost = run_grid(
        raising, settings, Launch(2), tmp_path, is_under_test=True, collective_seconds=15
    )
    torch_records = run_grid("torch", settings, Launch(2), tmp_path, is_under_test=False)
    assert lost[1][1][-1] == ("error", "ValueError: lost")
    assert lost[1][0][-1][0] == "error"  # its peer's collective timed out
    assert [differences(torch_records[i][0], lost[i][0]) for i in (0, 2)] == [[], []]


def test_run_grid_differs_from_perturbed_run_only(tmp_path: Path) -> None:
    settings = [PLAIN, replace(PLAIN, perturb=1e-3)]
    torch_records = run_grid("torch", settings, Launch(2), tmp_path, is_under_test=False)
    fsdp_c_records = run_grid("torch", settings, Launch(2), tmp_path, is_under_test=True)
    for rank in range(2):
        assert torch_records[0][rank][-1][0].startswith("final state")
        assert any(label.startswith("collective") for label, _ in torch_records[0][rank])
        assert differences(torch_records[0][rank], fsdp_c_records[0][rank]) == []
    lines = "\n".join(differences(torch_records[1][0], fsdp_c_records[1][0]))
    assert "step 2.0 output" in lines
    assert "step 1" not in lines


def test_run_grid_with_crashing_setting_keeps_other_records(tmp_path: Path) -> None:
    settings = [PLAIN, replace(PLAIN, reshard=True), PLAIN]
    fsdp_c_records = run_grid(
        "test_harness:fully_shard_exiting_on_reshard",
        settings,
        Launch(2),
        tmp_path,
        is_under_test=True,
    )
    torch_records = run_grid("torch", settings, Launch(2), tmp_path, is_under_test=False)
    assert differences(torch_records[0][1], fsdp_c_records[0][1]) == []
    assert fsdp_c_records[1][1][0][0] == "crash"
    assert "exit status 7" in fsdp_c_records[1][1][0][1]
    assert differences(torch_records[1][1], fsdp_c_records[1][1]) != []
    assert differences(torch_records[2][1], fsdp_c_records[2][1]) == []


def test_run_grid_stops_after_max_crashes(tmp_path: Path) -> None:
    always_exiting = "test_harness:fully_shard_exiting"
    fsdp_c_records = run_grid(
        always_exiting, generate(0, 5), Launch(1), tmp_path, is_under_test=True, max_crashes=2
    )
    assert [records[0][-1][0] for records in fsdp_c_records] == ["crash"] * 2 + ["not run"] * 3


def test_run_grid_raises_if_ranks_crash_after_their_last_setting(tmp_path: Path) -> None:
    exiting = "test_harness:fully_shard_exiting_after_all_settings"
    with pytest.raises(RuntimeError, match="exit status 7"):
        run_grid(exiting, [PLAIN], Launch(1), tmp_path, is_under_test=True)


def test_run_grid_compares_exceptions_by_type_and_message(tmp_path: Path) -> None:
    failing = replace(PLAIN, family="residual", param="bf16", cast_inputs=False)
    [records] = run_grid("torch", [failing], Launch(2), tmp_path, is_under_test=False)
    label, text = records[0][-1]
    assert label == "error"
    assert text.startswith("RuntimeError: ")
    assert differences(records[0], list(records[0])) == []
    for other in (text.replace("RuntimeError", "ValueError", 1), "RuntimeError: something else"):
        other_records = [*records[0][:-1], ("error", other)]
        assert len(differences(records[0], other_records)) == 1


class TestDifferences:
    """``differences`` compares bits, without tolerances."""

    @staticmethod
    def record(*tensors: torch.Tensor) -> list[Any]:
        recorder = Recorder()
        for tensor in tensors:
            recorder.tensor("t", tensor)
        return recorder.entries

    def test_differences_of_adjacent_floats_are_reported(self) -> None:
        ones = torch.ones(3)
        next_up = torch.nextafter(ones, torch.tensor(2.0))
        assert differences(self.record(ones), self.record(ones.clone())) == []
        assert "3 of 3 differ" in differences(self.record(ones), self.record(next_up))[0]

    def test_differences_of_signed_zeros_are_reported(self) -> None:
        assert differences(self.record(torch.zeros(1)), self.record(-torch.zeros(1))) != []

    def test_equal_nans_are_not_reported_as_difference(self) -> None:
        nan = torch.tensor([float("nan")])
        assert differences(self.record(nan), self.record(nan.clone())) == []

    def test_differences_of_dtype_shape_and_none_are_reported(self) -> None:
        empty = torch.empty(0, 5)
        assert differences(self.record(empty), self.record(torch.empty(0, 7))) != []
        assert differences(self.record(empty), self.record(empty.bfloat16())) != []
        assert differences(self.record(empty), [("t", None)]) != []

    def test_differences_of_entry_counts_are_reported(self) -> None:
        ones = torch.ones(3)
        assert differences(self.record(ones, ones), self.record(ones)) != []
        assert differences(self.record(ones), self.record(ones, ones)) != []

    def test_differences_of_collective_order_are_reported(self) -> None:
        gather = ("collective allgather_base", [("torch.float32", 4), ("torch.float32", 2)])
        scatter = ("collective reduce_scatter_base", [("torch.float32", 2), ("torch.float32", 4)])
        assert differences([gather, scatter], [scatter, gather]) != []

    def test_bits_of_non_contiguous_tensor_equal_contiguous_copy(self) -> None:
        matrix = torch.arange(6.0).view(2, 3)
        assert Bits.of(matrix.t()) == Bits.of(matrix.t().contiguous())
