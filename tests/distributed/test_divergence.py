"""Ranks that diverge raise on every rank, and name both sides. Legitimate programs do not raise.

A rank departs when it is about to issue another collective than its sequence predicts.
"""

from __future__ import annotations

import functools

import divergence
import pytest
from launch import run_ranks
from releases import has

GLOO = {"FSDP_C_TRANSPORT": "gloo"}
OFF = {"FSDP_C_GUARD": "off"}
NAMED_BY_PLAN = {
    "another shape": "'blocks.1.first.weight' [16, 8]",
    "another shape of equal size": "'blocks.1.first.weight' [16, 4]",
    "another dtype": "torch.bfloat16",
    "another order of parameters": "has 'blocks.1.second.weight' [8, 8]",
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
    "explicit unshard": ("gathers 'blocks.0' (step 3, forward)", "gathers 'blocks.3' (step 2, out"),
}
"""The collectives of the equal ranks and of the last rank, by dynamic case, after two steps."""


@functools.cache
def collect_static(env: tuple[tuple[str, str], ...] = ()) -> list[dict[str, tuple[str, float]]]:
    return run_ranks(
        divergence.run, 2, ("fsdp_c", divergence.STATIC, 0), env=dict(env), timeout=200
    )


@functools.cache
def collect_dynamic(steps: int, world: int) -> list[dict[str, tuple[str, float]]]:
    return run_ranks(divergence.run, world, ("fsdp_c", divergence.DYNAMIC, steps), timeout=200)


@pytest.mark.parametrize("env", [(), tuple(GLOO.items())], ids=["shared memory", "gloo"])
@pytest.mark.parametrize("name", divergence.STATIC)
def test_different_plan_raises_on_all_ranks_and_names_the_field(name: str, env: tuple) -> None:
    texts = {results[name][0] for results in collect_static(env)}
    assert len(texts) == 1, "ranks have different messages"
    text = texts.pop()
    assert text.startswith("RuntimeError: ranks 0 and 1 of process group ")
    assert NAMED_BY_PLAN[name] in text
    assert max(results[name][1] for results in collect_static(env)) < divergence.LIMIT_SECONDS / 2


@pytest.mark.parametrize("name", divergence.DYNAMIC)
def test_different_collective_raises_on_all_ranks_and_names_both_units(name: str) -> None:
    own, other = NAMED_BY_LABEL[name]
    for rank, results in enumerate(collect_dynamic(2, 3)):
        text, seconds = results[name]
        assert "collective mismatch: " in text
        assert own in text, rank
        assert other in text, rank
        assert ", rank 2 " in text, rank
        assert seconds < divergence.LIMIT_SECONDS / 2


@pytest.mark.parametrize("name", divergence.DYNAMIC)
def test_divergence_in_the_first_step_raises_on_all_ranks(name: str) -> None:
    for results in collect_dynamic(0, 2):
        text, seconds = results[name]
        assert text.startswith("RuntimeError: ")
        assert "rank 0 " in text
        assert "rank 1 " in text or "ranks 0 and 1 " in text
        assert seconds < divergence.LIMIT_SECONDS / 2


@functools.cache
def collect_over_gloo(steps: int, world: int, distinct: bool) -> list[dict[str, tuple[str, float]]]:
    arguments = ("fsdp_c", divergence.DYNAMIC, steps, distinct)
    return run_ranks(divergence.run, world, arguments, env=GLOO, timeout=200)


@pytest.mark.parametrize("distinct", [False, True], ids=["equal sizes", "other sizes"])
@pytest.mark.parametrize(("steps", "world"), [(0, 2), (1, 2), (5, 2), (2, 3)])
@pytest.mark.parametrize("name", divergence.DYNAMIC)
def test_different_collective_over_gloo_raises_on_all_ranks_and_names_two(
    name: str, steps: int, world: int, distinct: bool
) -> None:
    """gloo ends a process that receives a message of another size than expected."""
    for results in collect_over_gloo(steps, world, distinct):
        text, seconds = results[name]
        assert text.startswith("RuntimeError: ")
        if "ranks 0 and " not in text:  # the comparison of models
            first, _, second = text.partition("collective mismatch: rank ")[2].partition(", rank ")
            assert int(first[0]) < world - 1
            assert second[0] == str(world - 1)
        assert seconds < divergence.LIMIT_SECONDS / 2


def test_rank_that_departs_alone_raises_at_the_time_limit() -> None:
    message, _ = run_ranks(divergence.depart_alone, 2, env=GLOO)
    assert "of parameter group 'blocks." in message
    assert "Timed out after 2 s: 1 of 2 ranks of process group '1' are about to issue" in message


def test_rank_that_departs_again_after_an_interruption_is_counted_once() -> None:
    results = run_ranks(divergence.depart_after_an_interruption, 2, env=GLOO)
    assert [interrupted for interrupted, _ in results] == [True, False]
    for _, message in results:
        assert "collective mismatch: rank 0 gathers 'blocks.2'" in message
        assert ", rank 1 gathers 'blocks.0'" in message


def test_guard_off_compares_no_plan() -> None:
    """The rank with another divide factor trains with other gradients, as in torch."""
    names = ("another divide factor", "another order of blocks")
    for results in run_ranks(divergence.run, 2, ("fsdp_c", names, 0), env=OFF):
        assert [results[name][0] for name in names] == ["silent"] * 2


@pytest.mark.parametrize("env", [{}, GLOO], ids=["shared memory", "gloo"])
def test_programs_that_are_consistent_on_all_ranks_do_not_raise(env: dict[str, str]) -> None:
    for results in run_ranks(divergence.run_legitimate, 2, env=env):
        assert {name: error for name, error in results.items() if error} == {}


@pytest.mark.parametrize("env", [{}, GLOO], ids=["shared memory", "gloo"])
def test_pipeline_stages_with_different_models_do_not_raise(env: dict[str, str]) -> None:
    assert run_ranks(divergence.run_stages, 4, env=env) == [""] * 4
