"""The goals of the benchmarks, compared with the recorded results."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

TITLES = ("goal", "required", "measured", "met")


class Goal(NamedTuple):
    """A bound of a measured value. The keys lead to the value in the data of a benchmark."""

    title: str
    benchmark: str
    keys: tuple[str, ...]
    bound: float
    is_minimum: bool = False
    divisor: tuple[str, ...] = ()
    """Keys of a second value, by which the first one is divided."""


def make_step_goal(
    title: str,
    model: str,
    names: tuple[str, str],
    metric: str,
    bound: float,
    is_minimum: bool = True,
) -> Goal:
    """Returns a goal for the ratio of two implementations in a step with the optimizer."""
    keys = [("models", model, "costs", name, "with", metric) for name in names]
    return Goal(title, "steps", keys[0], bound, is_minimum, keys[1])


def make_cuda_goals() -> Iterator[Goal]:
    """Yields the goals for the CPU time of CUDA steps, minus the bare model's."""
    llama = ("fsdp", "hsdp", "hsdp, 4 microbatches without all-reduce", "replicate")
    llama += ("fsdp, checkpointing", "fsdp, 4 microbatches without sync")
    models = {"8 blocks of Llama 8B": llama, "ViT-L": ("fsdp",)}
    models["4 blocks of Qwen3-30B-A3B"] = ("fsdp",)
    for model, jobs in models.items():
        for job in jobs:
            keys = [("models", model, job, name, "CPU ms") for name in ("torch", "fsdp_c")]
            title = f"CPU time of a CUDA step, {model}, {job}: torch / fsdp_c"
            yield Goal(title, "cuda_steps", keys[0], 10, True, keys[1])


HOST = ("fp32", "us_per_group_step", "9", "fsdp_c")
PAIR = ("torch", "fsdp_c")
DDP = ("ddp", "fsdp_c")
GOALS = (
    Goal("us per unit of 9 parameters, fp32", "host", HOST, 25),
    Goal("us per parameter, fp32", "host", ("fp32", "fit", "fsdp_c", "us_per_param"), 1),
    Goal(
        "us of the guard per unit and operation, shared memory",
        "host",
        ("guard", "shared memory", "gather: guard"),
        0.3,
    ),
    Goal("memory in units, fp32, forward", "units", ("fp32", "fsdp_c", "forward"), 1.1),
    Goal("memory in units, fp32, backward", "units", ("fp32", "fsdp_c", "backward"), 2.1),
    Goal("memory in units, mixed, forward", "units", ("mixed", "fsdp_c", "forward"), 1.2),
    Goal("memory in units, mixed, backward", "units", ("mixed", "fsdp_c", "backward"), 3.2),
    make_step_goal("step with optimizer, small: torch / fsdp_c", "small", PAIR, "wall", 1.3),
    make_step_goal("step with optimizer, medium: torch / fsdp_c", "medium", PAIR, "wall", 1.6),
    make_step_goal("step with optimizer, wide: torch / fsdp_c", "wide", PAIR, "wall", 3),
    make_step_goal("step with optimizer, deep: torch / fsdp_c", "deep", PAIR, "wall", 5),
    make_step_goal("step with optimizer, medium: DDP / fsdp_c", "medium", DDP, "wall", 0.8),
    make_step_goal("step with optimizer, wide: DDP / fsdp_c", "wide", DDP, "wall", 0.8),
    make_step_goal("peak, medium: fsdp_c / torch", "medium", PAIR[::-1], "peak", 0.5, False),
    make_step_goal("peak, wide: fsdp_c / torch", "wide", PAIR[::-1], "peak", 0.8, False),
    make_step_goal(
        "page faults, medium: fsdp_c / torch", "medium", PAIR[::-1], "faults", 0.1, False
    ),
    Goal(
        "AdamW: accelerated / plain",
        "optim",
        ("ms", "AdamW", "2"),
        1.1,
        False,
        ("ms", "AdamW", "0"),
    ),
    *make_cuda_goals(),
)


def find_value(data: Any, keys: tuple[str, ...]) -> float:
    for key in keys:
        data = data[int(key)] if isinstance(data, list) else data[key]
    return float(data)


def make_rows(results: dict[str, dict[str, Any]]) -> Iterator[list[Any]]:
    """Yields a row of ``TITLES`` for each goal. A goal without a recorded value is not measured."""
    for goal in GOALS:
        bound = f"{'at least' if goal.is_minimum else 'at most'} {goal.bound:g}"
        data = results.get(goal.benchmark, {})
        try:
            value = find_value(data, goal.keys)
            if goal.divisor:
                value /= find_value(data, goal.divisor)
        except (KeyError, IndexError, TypeError):  # TypeError: the value is None
            yield [goal.title, bound, "not measured", "-"]
            continue
        met = value >= goal.bound if goal.is_minimum else value <= goal.bound
        yield [goal.title, bound, value, "yes" if met else "no"]
