"""The basic grid: FSDP2's core settings on a flat mesh, generated from a seed.

``generate(seed, count)`` returns the anchors first, then random combinations. The anchors are the
plain setting, and variants that change one of its dimensions, so that a failure identifies its
cause. The dtypes of MIXED count as one dimension. The anchor of ``fp16_factor`` also has the
reduce dtype fp16.
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
    # Mismatching dtypes: both implementations must raise the same error.
    ("bf16", "fp32", None, False, "fp32", None),
)
MIXED_FIELDS = ("param", "reduce", "output", "cast_inputs", "original", "inputs")


def generate(seed: int, count: int) -> list[Setting]:
    """Returns the first ``count`` settings of the grid: the anchors, then random settings."""
    settings = dict.fromkeys(_anchors())
    rng = random.Random(seed)
    while len(settings) < count:
        settings[random_setting(rng)] = None
    return list(settings)[:count]


def at_world_size(setting: Setting, world_size: int) -> Setting:
    """Adapts the setting to a launch with ``world_size`` ranks."""
    if world_size == 1 and setting.divide in ("force_sum_factor", "fp16_factor"):
        # On one rank torch issues no reduce-scatter. torch divides the gradient by the factor
        # instead, and divides again if the reduction is a plain sum. fsdp_c divides once.
        return dataclasses.replace(setting, divide="world")
    return setting


def _anchors() -> list[Setting]:
    plain = Setting()
    anchors = [plain]
    for name, values in CHOICES.items():
        anchors += [
            resolve_conflicts(dataclasses.replace(plain, **{name: value})) for value in values
        ]
    anchors += [_with_mixed(plain, mixed) for mixed in MIXED]
    return anchors


def _with_mixed(setting: Setting, mixed: tuple[Any, ...]) -> Setting:
    return dataclasses.replace(setting, **dict(zip(MIXED_FIELDS, mixed, strict=True)))


def random_setting(rng: random.Random) -> Setting:
    """Returns a random combination. Four dimensions are always drawn, each of the others with a
    probability. AdamW steps local shards here; the anchors cover AdamW over DTensors."""
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
    return resolve_conflicts(setting)


def resolve_conflicts(setting: Setting) -> Setting:
    """Changes values that cannot be combined, so that nearly every setting trains."""
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
        # torch fixes a group's dtypes at its first forward, from the parameters that require
        # gradients then. torch fails in backward if a completely frozen group is unfrozen later.
        setting = dataclasses.replace(setting, toggle_frozen=False)
    if setting.family == "unused" and setting.schedule.startswith("no_sync") and setting.reduce:
        # torch fails in backward on a group without a forward, if gradients are accumulated
        # without reduction and reduce_dtype is set.
        setting = dataclasses.replace(setting, reduce=None)
    if (setting.schedule, setting.checkpoint) == ("summed", "reentrant"):
        # The inner backward of reentrant checkpointing ends torch's iteration early: torch loses
        # the other forward's gradients and continues with stale unsharded parameters.
        setting = dataclasses.replace(setting, checkpoint="nonreentrant")
    if setting.checkpoint == "inside" and setting.state is not None:
        setting = dataclasses.replace(setting, state=None)
    return setting
