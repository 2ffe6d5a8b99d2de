"""The basic grid, generated from a seed: what FSDP2 does on a flat mesh with its core settings.

``generate(seed, count)`` returns first the anchors (each value of each dimension once, everything
else plain, so that a failure points at its cause) and then random combinations.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

from models import FAMILIES
from setting import SCHEDULES, Setting

CHOICES: dict[str, tuple[Any, ...]] = {
    "family": tuple(FAMILIES),
    "wrap": ("root", "blocks", "deep"),
    "reshard": (None, True, False),
    "schedule": SCHEDULES,
    "optimizer": ("sgd", "sgd_foreach", "adamw", "adamw_foreach", "adamw_fused"),
    "clip": (False, True),
    "checkpoint": (None, "reentrant", "nonreentrant", "inside"),
    "prefetch": (None, "forward", "backward", "both"),
    "divide": (None, "world", "force_sum", "force_sum_factor", "fp16_factor"),
    "unshard": (None, "sync", "async", "async_wait", "blocks", "reshard"),
    "toggle_reshard": (False, True),
    "toggle_frozen": (False, True),
    "evaluate": (False, True),
    "hooks": (False, True),
    "ignored": (False, True),
    "state": (None, "copy", "assign", "meta"),
    "reset": (False, True),
    "zero": ("none", "keep"),
}

MIXED = (
    # param, reduce, output, cast_inputs, original, inputs
    ("bf16", "fp32", None, True, "fp32", None),
    ("bf16", None, None, True, "fp32", None),
    ("bf16", "bf16", None, True, "fp32", None),
    ("bf16", "fp32", "fp32", True, "fp32", None),
    ("bf16", "fp32", "fp32", False, "fp32", "bf16"),
    ("bf16", "fp16", None, True, "fp32", None),
    ("fp16", "fp32", None, True, "fp32", None),
    ("fp16", None, "fp32", True, "fp32", "fp16"),
    ("fp16", "fp16", "bf16", True, "fp32", "fp64"),
    ("fp32", "bf16", None, True, "fp32", None),
    (None, "bf16", None, True, "fp32", None),
    (None, "fp16", None, True, "fp32", None),
    (None, "fp64", None, True, "fp32", None),
    (None, None, "bf16", True, "fp32", None),
    (None, None, "fp16", False, "fp32", None),
    ("fp32", "fp32", "fp32", True, "fp32", "bf16"),
    ("fp32", None, None, True, "bf16", None),
    (None, "fp32", None, True, "bf16", None),
    (None, None, None, True, "bf16", None),
    ("bf16", "fp32", None, True, "fp64", None),
    ("fp32", "fp64", None, True, "fp64", "fp32"),
    (None, "fp32", None, True, "fp64", None),
    (None, None, None, True, "fp16", None),
    # mismatching dtypes: both must fail alike
    ("bf16", "fp32", None, False, "fp32", None),
)
MIXED_FIELDS = ("param", "reduce", "output", "cast_inputs", "original", "inputs")


def generate(seed: int, count: int) -> list[Setting]:
    """The first ``count`` settings of the grid of this seed: the anchors, then random ones."""
    settings = dict.fromkeys(_anchors())
    rng = random.Random(seed)
    while len(settings) < count:
        settings[random_setting(rng)] = None
    return list(settings)[:count]


def at_world_size(setting: Setting, world_size: int) -> Setting:
    """The setting as it is run on this many ranks."""
    if world_size == 1 and setting.divide in ("force_sum_factor", "fp16_factor"):
        # On one rank stock divides by a given factor in place of the collective, and then again
        # after it where the reduction is a plain sum. Ours divides once.
        return dataclasses.replace(setting, divide="world")
    return setting


def _anchors() -> list[Setting]:
    plain = Setting()
    found = [plain]
    for name, values in CHOICES.items():
        found += [repaired(dataclasses.replace(plain, **{name: value})) for value in values]
    found += [_with_mixed(plain, mixed) for mixed in MIXED]
    return found


def _with_mixed(setting: Setting, mixed: tuple[Any, ...]) -> Setting:
    return dataclasses.replace(setting, **dict(zip(MIXED_FIELDS, mixed, strict=True)))


def random_setting(rng: random.Random) -> Setting:
    """A combination: the structural dimensions freely, each of the others now and then. AdamW steps
    DTensors in the anchors."""
    setting = Setting(
        family=rng.choice(CHOICES["family"]),
        wrap=rng.choice(CHOICES["wrap"]),
        reshard=rng.choice(CHOICES["reshard"]),
        optimizer=rng.choice(CHOICES["optimizer"]),
    )
    setting = dataclasses.replace(setting, local_step=setting.optimizer.startswith("adamw"))
    if rng.random() < 0.6:
        setting = dataclasses.replace(setting, schedule=rng.choice(SCHEDULES))
    if rng.random() < 0.6:
        setting = _with_mixed(setting, rng.choice(MIXED[:-1]))
    for name in tuple(CHOICES)[tuple(CHOICES).index("clip") :]:
        if rng.random() < 0.2:
            setting = dataclasses.replace(setting, **{name: rng.choice(CHOICES[name][1:])})
    return repaired(setting)


def repaired(setting: Setting) -> Setting:
    """Drop what cannot be combined, so that nearly every setting trains."""
    if setting.divide == "fp16_factor":
        setting = dataclasses.replace(setting, reduce="fp16")
    elif setting.divide is not None and "fp16" in (setting.reduce, setting.param, setting.original):
        setting = dataclasses.replace(setting, divide=None)
    if setting.wrap == "root" and (setting.prefetch or setting.unshard == "blocks"):
        setting = dataclasses.replace(setting, wrap="blocks")
    compute = setting.param or setting.original
    if setting.ignored and not (compute == setting.original == "fp32"):
        # An ignored parameter keeps its dtype, which must be that of the activations.
        setting = dataclasses.replace(setting, ignored=False)
    if setting.family == "batchnorm" and compute != setting.original:
        setting = dataclasses.replace(setting, param=None, inputs=None)
    if setting.family == "frozen" and setting.toggle_frozen and (setting.param or setting.reduce):
        # Stock fixes a group's dtypes at its first forward from the parameters that train then,
        # and fails in backward when a group that was frozen as a whole is released later.
        setting = dataclasses.replace(setting, toggle_frozen=False)
    if setting.family == "unused" and setting.schedule.startswith("no_sync") and setting.reduce:
        # Stock fails in backward on a group that no forward has reached, when gradients are
        # accumulated without reduction in a dtype of their own.
        setting = dataclasses.replace(setting, reduce=None)
    if (setting.schedule, setting.checkpoint) == ("summed", "reentrant"):
        # The inner backward of reentrant recomputation ends stock's iteration early: it loses the
        # gradients of the other forward and trains on with stale unsharded parameters.
        setting = dataclasses.replace(setting, checkpoint="nonreentrant")
    if setting.checkpoint == "inside" and setting.state is not None:
        setting = dataclasses.replace(setting, state=None)
    return setting
