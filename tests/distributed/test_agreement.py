"""Ranks whose collectives carry no labels agree on them at the end of each backward."""

from __future__ import annotations

import functools
import re

import agreement
import pytest
from launch import run_ranks

pytestmark = pytest.mark.xdist_group("agreement")  # the tests share launches

GLOO = {"FSDP_C_TRANSPORT": "gloo"}
OFF = {**GLOO, "FSDP_C_GUARD": "off"}
COLLECTIVES = {
    "another order of blocks": ("gathers 'blocks.1'", "gathers 'blocks.2'"),
    "another divide factor": ("with divisor ", "with divisor 7"),
    "another forward prefetch": ("gathers 'blocks.1'", "gathers 'blocks.2'"),
    "another backward prefetch": ("gathers 'blocks.2'", "gathers 'blocks.1'"),
    "another parameter": ("gradients of parameters 0, 1 ", "gradients of parameters 2, 3 "),
    "another root": ("of another model", "of another model"),
    "another evaluated block": ("gathers 'blocks.0'", "gathers 'blocks.1'"),
    "explicit unshard": ("gathers 'blocks.0'", "gathers 'blocks.3'"),
}
"""Collectives of the equal ranks and of the last rank, after five steps on two or three ranks."""

STATIC = (
    "another divide factor",
    "another forward prefetch",
    "another backward prefetch",
    "another root",
)
"""Kinds that the comparison of plans finds before the first gather."""


@functools.cache
def collect(steps: int, world: int) -> list[dict[str, tuple[str, int]]]:
    return run_ranks(agreement.run_kinds, world, (steps,), env=GLOO, timeout=200)


@pytest.mark.parametrize(
    ("name", "steps", "world"),
    [(name, steps, world) for name in agreement.KINDS for steps in (0, 5) for world in (2, 3)],
)
def test_different_collective_of_equal_size_raises_on_all_ranks_before_the_optimizer_step(
    name: str, steps: int, world: int
) -> None:
    for results in collect(steps, world):
        text, completed = results[name]
        assert completed == 0
        if steps == 0 and name in STATIC:
            assert f"ranks 0 and {world - 1} of process group" in text
            continue
        first, _, second = text.partition(f", rank {world - 1} ")
        assert first.startswith("collective mismatch: rank 0 ")
        if steps == 0 and name == "explicit unshard":
            assert "gathers a unit before the first forward of its root" in second
        if steps > 0:
            own, other = COLLECTIVES[name]
            assert own in first
            assert other in second


def test_model_trains_after_a_mismatch_and_a_reset_as_without_the_mismatch() -> None:
    for raised, equal_shards in run_ranks(agreement.train_after_mismatch, 3, env=GLOO):
        assert raised
        assert equal_shards and all(equal_shards)


@pytest.mark.parametrize("transport", ["gloo", "direct"])
def test_equal_roots_in_another_order_raise_on_all_ranks(transport: str) -> None:
    for text in run_ranks(agreement.swap_equal_roots, 2, env={"FSDP_C_TRANSPORT": transport}):
        assert re.search("rank 0 .* of another model .*, rank 1 .* of another model", text)


def test_difference_after_an_unshard_before_the_first_forward_raises() -> None:
    for equal, different in run_ranks(agreement.diverge_after_early_unshard, 3, env=GLOO):
        assert equal == ""
        assert "collective mismatch: rank 0 gathers 'blocks.1'" in different


def test_training_continues_after_different_collectives_with_the_guard_off() -> None:
    names = ("another order of blocks", "another divide factor", "another parameter")
    for results in run_ranks(agreement.run_kinds, 2, (1, names), env=OFF):
        assert list(results.values()) == [("", 2)] * 3


def test_ranks_with_equal_programs_do_not_raise() -> None:
    for results in run_ranks(agreement.run_legitimate, 2, env=GLOO, timeout=200):
        assert {name: error for name, error in results.items() if error} == {}


def test_ranks_of_hsdp_agree_over_both_process_groups() -> None:
    assert run_ranks(agreement.run_hsdp, 4, (False,), env=GLOO) == [""] * 4


@pytest.mark.parametrize("env", [GLOO, {}], ids=["gloo", "shared memory"])
def test_divergence_of_one_rank_of_hsdp_raises_on_all_ranks(env: dict[str, str]) -> None:
    texts = run_ranks(agreement.run_hsdp, 4, (True,), env=env)
    assert ["collective mismatch: " in text for text in texts] == [True] * 4
    assert all(text.endswith("Restart all ranks from a checkpoint") for text in texts)
    # Rank 0 has no process group in common with rank 3.
    assert "ranks of another process group differ: collective mismatch: rank 0 " in texts[0]


def test_observers_of_collectives_do_not_count_agreements() -> None:
    with_guard, without = (
        run_ranks(agreement.count_observed, 2, env=env)[0] for env in (GLOO, OFF)
    )
    assert with_guard == without
    counts, _, _ = without
    assert sum(counts.values()) > 0


def test_flight_recorder_has_no_agreements() -> None:
    recorded = {"TORCH_FR_BUFFER_SIZE": "1000"}
    with_guard, without = (
        run_ranks(agreement.list_recorder_entries, 2, env=env | recorded)[0] for env in (GLOO, OFF)
    )
    assert with_guard == without
    assert len(without) > 0
