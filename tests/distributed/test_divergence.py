"""Ranks that diverge raise on every rank, and name both sides. Legitimate programs do not raise.

A rank departs when it is about to issue another collective than its sequence predicts.
"""

from __future__ import annotations

import functools
import os
import sys
from pathlib import Path

import consistent_programs
import divergence
import fork_server
import pytest
from divergence import Variation
from launch import run_ranks
from releases import has

pytestmark = pytest.mark.xdist_group("divergence")  # the tests share launches

GLOO = {"FSDP_C_TRANSPORT": "gloo"}
OFF = {"FSDP_C_GUARD": "off"}
NAMED_BY_MODEL = {
    "another shape": "'blocks.1.first.weight' [24, 12]",
    "another shape of equal size": "'blocks.1.first.weight' [24, 6]",
    "another dtype": "torch.bfloat16",
    "another order of parameters": "has 'blocks.1.second.weight' [12, 12]",
    "another name": "'blocks.1.other.weight'",
    "another number of units": "has unit 4: 'blocks.4'",
    "another unit": "has '' with 4 parameters",
    "another frozen parameter": "frozen",
    "another reduce dtype": "reduce_dtype of unit 'blocks.0': rank 0 has torch.float32; rank",
    # From 2.15 on, the reduce dtype does not follow param_dtype.
    "another param dtype": "param_dtype of unit 'blocks.0': rank 0 has None; rank"
    if has("2.15")
    else "reduce_dtype of unit 'blocks.0': rank 0 has torch.float32; rank",
    "another reshard_after_forward": "reshard_after_forward of unit 'blocks.1'",
    "another divide factor": "gradient_divide_factor of unit 'blocks.1': rank 0 has None; rank",
    "another prefetch": "forward prefetch of unit 'blocks.0': rank 0 has []; rank",
    "another backward prefetch": "backward prefetch of unit 'blocks.2': rank 0 has []; rank",
    "another list of modules": "'blocks.1, blocks.2' with 8 parameters",
    "another placement": "(Shard(dim=1),)",
    "another offload policy": "CPU offload of unit 'blocks.0': rank 0 has False; rank",
    "another output dtype": "output_dtype of unit 'blocks.0': rank 0 has None; rank",
    "another cast of inputs": "cast_forward_inputs of unit 'blocks.0': rank 0 has True; rank",
    "another reduction": "force_sum_reduction_for_comms of unit 'blocks.1': rank 0 has False; rank",
    "another unshard_in_backward": "unshard_in_backward of unit 'blocks.1': rank 0 has True; rank",
    "another reduction of unused parameters": (
        "reduce_scatter_unused_params of unit 'blocks.1': rank 0 has False; rank"
    ),
    "another bucket size": "bucket_bytes of unit '",
    "another version": "version: rank 0 has fsdp_c ",
}
"""A part of the message for each static case."""

NAMED_BY_LABEL = {
    "another order of blocks": ("gathers 'blocks.1'", "gathers 'blocks.2'"),
    "a block skipped": ("gathers 'blocks.2'", "gathers 'blocks.3'"),
    "a block twice": ("gathers 'blocks.2'", "gathers 'blocks.1'"),
    "a conditional parameter": ("gradients of parameters 0, 1, 2, 3 ", "of parameters 0, 1 "),
    "frozen later": ("gradients of parameters 0, 1, 2, 3 ", "of parameters 1, 2, 3 "),
    "divide factor later": ("with divisor 3", "with divisor 7"),
    "prefetch later": ("gathers 'blocks.1'", "gathers 'blocks.2'"),
    "reshard later": ("gathers 'blocks.1'", "reduce-scatters 'blocks.2'"),
    "no gradient sync": ("reduce-scatters 'blocks.3'", "gathers 'blocks.1'"),
    "no backward": (
        "gathers 'blocks.3' (step 3, backward)",
        "gathers 'blocks.0' (step 4, for",
    ),
    "an evaluation": ("gathers 'blocks.3' (step 3, backward)", "gathers 'blocks.0' (step 4, for"),
    "reduction later": ("reduce-scatters 'blocks.1' by average", "'blocks.1' by sum (step 3, bac"),
    "dtype later": ("gathers 'blocks.1' of 416 bytes", "gathers 'blocks.1' of 312 bytes per rank"),
    "unshard_in_backward later": ("gathers 'blocks.1' (step 3, b", "reduce-scatters 'blocks.2' ("),
    "a detached block": (
        "reduce-scatters 'blocks.0' (step 3, backward)",
        "gathers 'blocks.0' (step 4, for",
    ),
    "a forward that raised": (
        "gathers 'blocks.1' (step 3, forward)",
        "gathers 'blocks.0' (step 4, for",
    ),
    "a backward twice": ("gathers 'blocks.0' (step 4, forward)", "gathers 'blocks.3' (step 3, bac"),
    "an evaluation of a block": (
        "gathers 'blocks.0' (step 3, forward)",
        "gathers 'blocks.1' (step 3, for",
    ),
    "another model": ("'blocks.0' of another model (step 3", "of another model (step 1, forward)"),
    "backward prefetch later": ("gathers 'blocks.1' (step 3, b", "gathers 'blocks.0' (step 3, bac"),
    "block frozen later": (
        "reduce-scatters 'blocks.1' (step 3",
        "reduce-scatters 'blocks.0' (step 3",
    ),
    "no gradient sync of a block": (
        "reduce-scatters 'blocks.1' (step 3",
        "reduce-scatters 'blocks.0' (step 3",
    ),
    "explicit unshard": ("gathers 'blocks.0' (step 3, forward)", "gathers 'blocks.3' (step 2, out"),
}
"""The collectives of the equal ranks and of the last rank, by dynamic case, after two steps."""


@functools.cache
def collect_static(
    env: tuple[tuple[str, str], ...], world: int
) -> list[dict[str, tuple[str, float]]]:
    arguments = ("fsdp_c", divergence.STATIC, Variation())
    return run_ranks(divergence.run, world, arguments, env=dict(env), timeout=200)


@functools.cache
def collect_dynamic(steps: int, world: int) -> list[dict[str, tuple[str, float]]]:
    arguments = ("fsdp_c", divergence.DYNAMIC, Variation(steps=steps))
    return run_ranks(divergence.run, world, arguments, timeout=200)


@pytest.mark.parametrize("env", [(), tuple(GLOO.items())], ids=["shared memory", "gloo"])
@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("name", divergence.STATIC)
def test_different_models_raise_on_all_ranks_and_name_the_difference(
    name: str, world: int, env: tuple
) -> None:
    texts = {results[name][0] for results in collect_static(env, world)}
    assert len(texts) == 1, "ranks have different messages"
    text = texts.pop()
    assert text.startswith(f"RuntimeError: ranks 0 and {world - 1} of process group ")
    assert NAMED_BY_MODEL[name] in text


def is_own_error(name: str, text: str) -> bool:
    return name == divergence.OWN_ERROR_KIND and divergence.OWN_ERROR in text


@pytest.mark.parametrize("name", divergence.DYNAMIC)
def test_different_collective_raises_on_all_ranks_and_names_both_units(name: str) -> None:
    own, other = NAMED_BY_LABEL[name]
    for rank, results in enumerate(collect_dynamic(2, 3)):
        text, _ = results[name]
        if rank == 2 and is_own_error(name, text):
            continue
        assert "collective mismatch: " in text
        assert own in text, rank
        assert other in text, rank
        assert ", rank 2 " in text, rank


@pytest.mark.parametrize("name", divergence.DYNAMIC)
def test_divergence_in_the_first_step_raises_on_all_ranks(name: str) -> None:
    for rank, results in enumerate(collect_dynamic(0, 2)):
        text, _ = results[name]
        if rank == 1 and is_own_error(name, text):
            continue
        assert text.startswith("RuntimeError: ")
        assert "rank 0 " in text
        assert "rank 1 " in text or "ranks 0 and 1 " in text


@functools.cache
def collect_over_gloo(steps: int, world: int, distinct: bool) -> list[dict[str, tuple[str, float]]]:
    factors = (2, 1, 3, 4) if distinct else (1, 1, 1, 1)
    arguments = ("fsdp_c", divergence.DYNAMIC, Variation(factors, steps=steps))
    return run_ranks(divergence.run, world, arguments, env=GLOO, timeout=200)


@pytest.mark.parametrize("distinct", [False, True], ids=["equal sizes", "other sizes"])
@pytest.mark.parametrize(("steps", "world"), [(0, 2), (1, 2), (5, 2), (2, 3)])
@pytest.mark.parametrize("name", divergence.DYNAMIC)
def test_different_collective_over_gloo_raises_on_all_ranks_and_names_two_ranks(
    name: str, steps: int, world: int, distinct: bool
) -> None:
    """gloo ends a process that receives a message of another size than expected."""
    for rank, results in enumerate(collect_over_gloo(steps, world, distinct)):
        text, _ = results[name]
        if rank == world - 1 and is_own_error(name, text):
            continue
        assert text.startswith("RuntimeError: ")
        if "ranks 0 and " not in text:  # the comparison of models
            first, _, second = text.partition("collective mismatch: rank ")[2].partition(", rank ")
            assert int(first[0]) < world - 1
            assert second[0] == str(world - 1)


def test_rank_that_departs_alone_raises_at_the_time_limit() -> None:
    message, _ = run_ranks(divergence.depart_alone, 2, env=GLOO)
    assert "of parameter group 'blocks." in message
    assert "Timed out after 2 s: 1 of 2 ranks of process group '1' are about to issue" in message
    assert message.endswith("evaluation: run the same collectives on all ranks")


def test_rank_that_departs_again_after_an_interruption_is_counted_once() -> None:
    results = run_ranks(divergence.depart_after_an_interruption, 2, env=GLOO)
    assert [interrupted for interrupted, _ in results] == [True, False]
    for _, message in results:
        assert "collective mismatch: rank 0 gathers 'blocks.2'" in message
        assert ", rank 1 gathers 'blocks.0'" in message


def test_guard_off_compares_no_models() -> None:
    """The rank with another divide factor trains with other gradients, as in torch."""
    names = ("another divide factor", "another order of blocks")
    for results in run_ranks(divergence.run, 2, ("fsdp_c", names, Variation()), env=OFF):
        assert [results[name][0] for name in names] == ["silent"] * 2


@pytest.mark.parametrize("env", [{}, GLOO], ids=["shared memory", "gloo"])
def test_programs_that_are_consistent_on_all_ranks_do_not_raise(env: dict[str, str]) -> None:
    for results in run_ranks(consistent_programs.run, 2, env=env):
        assert {name: error for name, error in results.items() if error} == {}


@pytest.mark.parametrize("env", [{}, GLOO], ids=["shared memory", "gloo"])
def test_pipeline_stages_with_different_models_do_not_raise(env: dict[str, str]) -> None:
    run_ranks(consistent_programs.run_stages, 4, env=env)


@pytest.mark.parametrize("schedule", ["ScheduleGPipe", "Schedule1F1B"])
@pytest.mark.parametrize("env", [{}, GLOO], ids=["shared memory", "gloo"])
def test_schedules_of_pipeline_stages_do_not_raise(env: dict[str, str], schedule: str) -> None:
    run_ranks(consistent_programs.run_schedule, 4, (schedule,), env=env)


@pytest.mark.parametrize("env", [{}, GLOO], ids=["shared memory", "gloo"])
def test_ranks_that_torchrun_restarts_do_not_raise(env: dict[str, str], tmp_path: Path) -> None:
    """One of the first ranks ends in its third step.

    torchrun forks the ranks, so they do not import torch again. Each attempt has a store of its
    own. Over a store of all attempts gloo may read addresses of earlier ranks, and torch fails,
    with and without fsdp_c.
    """
    options = ["--nproc-per-node=2", "--max-restarts=1", "--run-path", "--start-method=fork"]
    options += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=restart"]
    script = [consistent_programs.__file__, str(tmp_path)]
    paths = os.pathsep.join(path for path in sys.path if path)
    own_store = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    ended = fork_server.run_module(
        "torch.distributed.run",
        *options,
        *script,
        env={**os.environ, **env, **own_store, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        cwd=tmp_path,
    )
    assert ended.returncode == 0, ended.stderr
    assert "mismatch" not in ended.stderr and "different models" not in ended.stderr
    files = sorted(path.name for path in tmp_path.iterdir())
    assert files == ["began0-0", "began0-1", "began1-0", "began1-1", "trained1-0", "trained1-1"]
