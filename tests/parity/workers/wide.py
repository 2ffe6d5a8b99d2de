"""The wide grid: the rest of FSDP2's surface, also on meshes of two and three dimensions.

``generate_wide`` returns pairs of a launch and a setting. The anchors come first, each with few
values that are not plain. Random combinations with the basic grid's dimensions follow. All settings
use supported features only (feature_support.py).

Where torch is wrong, results cannot be compared. ``_without_torch_bugs`` removes such values and
gives the reason for each; other tests cover fsdp_c's behavior there.
"""

from __future__ import annotations

import dataclasses
import random
from dataclasses import replace
from typing import Any

from feature_support import features_of
from grid import MIXED, MIXED_FIELDS, random_setting, resolve_conflicts
from meshes import KINDS, SHAPES, has_tensor_dim, is_hsdp, is_spmd
from models_wide import WIDE_FAMILIES
from setting import WIDE_SCHEDULES, Launch, Setting

Placed = tuple[Launch, Setting]

REPLICA_SCHEDULES = tuple(name for name in WIDE_SCHEDULES if name != "pipeline")
"""Schedules that switch the all-reduce of replicas off."""

GLOO2, GLOO4, THREADS8 = Launch(2), Launch(4), Launch(8, threads=True)

PLACES: tuple[tuple[Launch, str, int], ...] = (
    (GLOO2, "flat", 8),
    (GLOO2, "hsdp", 2),
    (GLOO2, "hsdp_columns", 1),
    (GLOO4, "flat", 6),
    (GLOO4, "hsdp", 12),
    (GLOO4, "hsdp_rows", 2),
    (GLOO4, "hsdp_columns", 1),
    (GLOO4, "tp", 6),
    (GLOO4, "hsdp_tp", 1),
    (GLOO4, "dims", 2),
    (GLOO4, "dims_hsdp", 1),
    (GLOO4, "dims_two", 1),
    (THREADS8, "flat", 3),
    (THREADS8, "hsdp", 3),
    (THREADS8, "hsdp_rows", 1),
    (THREADS8, "tp", 1),
    (THREADS8, "hsdp_tp", 1),
    (THREADS8, "dims", 1),
)
"""Launch, kind of mesh, and its weight among random settings.

Each thread has its own DTensor cache, so "dims_hsdp" takes threads 18 seconds. It runs on processes
only.
"""

EXTRAS: dict[str, tuple[Any, ...]] = {
    "placement": ("last", "mixed", "experts"),
    "offload": (True,),
    "comm": ("custom", "memory", "separate", "buffers"),
    "reduce_hook": (True,),
    "zeros": (True,),
    "async_op": (True,),
    "keep_sharded": (True,),
    "optim_event": (True,),
    "extension": ("one argument", "five arguments"),
    "inference": (True,),
}


def generate_wide(seed: int, count: int, features: frozenset[str]) -> list[Placed]:
    """Returns the first ``count`` settings whose features are all in ``features``."""
    settings = dict.fromkeys(placed for placed in _anchors() if features_of(placed[1]) <= features)
    rng = random.Random(seed)
    while len(settings) < count:
        placed = _random(rng)
        if features_of(placed[1]) <= features:
            settings[placed] = None
    return list(settings)[:count]


def _anchors() -> list[Placed]:
    plain = Setting(family="even")
    settings: list[Placed] = []

    def add(launch: Launch, setting: Setting, **values: Any) -> None:
        settings.append(remove_conflicts(launch, replace(setting, **values)))

    for launch, mesh, _ in PLACES:
        # On three dimensions of all parameters, torch's sharding propagation takes a second per
        # shape and dtype. The anchors there use one model in float32.
        is_slow = mesh == "dims_hsdp"
        start = replace(plain, mesh=mesh, family="odd" if is_slow else "even")
        for reshard in (None,) if launch.threads else (None, True, False):
            add(launch, start, reshard=reshard)
        if launch.threads:
            add(launch, start, family="odd", param="bf16", reduce="fp32")
        elif mesh != "flat":
            add(launch, start, family="odd", wrap="deep", optimizer="adamw")
            add(launch, start, clip=True, state="copy")
            mixed = {"reduce": "bf16"} if is_slow else {"param": "bf16", "reduce": "fp32"}
            add(launch, start, schedule="no_sync", **mixed)
    for schedule in WIDE_SCHEDULES:
        for reduce in (None, "fp32"):
            param = "bf16" if reduce else None
            add(GLOO4, plain, mesh="hsdp", schedule=schedule, param=param, reduce=reduce)
    add(GLOO2, plain, schedule="pipeline")
    for mixed in MIXED[:-1:3]:
        add(GLOO4, plain, mesh="hsdp", **dict(zip(MIXED_FIELDS, mixed, strict=True)))
    for size, launch, mesh in (
        ("1", GLOO2, "flat"),
        ("2", GLOO2, "flat"),
        ("2", GLOO4, "flat"),
        ("2", GLOO4, "hsdp"),
        ("4", GLOO4, "flat"),
        ("2", THREADS8, "flat"),
        ("4", THREADS8, "flat"),
        ("2", THREADS8, "hsdp"),
    ):
        for family in ("even", "odd"):
            add(launch, plain, mesh=mesh, family=family, reshard=size)
    add(GLOO4, plain, reshard="2", comm="custom")
    add(GLOO4, plain, reshard="2", comm="custom", param="bf16", reduce="fp32", evaluate=True)
    for name, values in EXTRAS.items():
        for value in values:
            family = "embedding" if name == "keep_sharded" else "even"
            add(GLOO2, plain, family=family, **{name: value})
            for mesh in ("flat", "hsdp", "tp"):
                add(GLOO4, plain, family=family, mesh=mesh, **{name: value})
    for family in WIDE_FAMILIES:
        zeros = family == "conditional"
        add(GLOO2, plain, family=family, zeros=zeros)
        add(GLOO4, plain, family=family, zeros=zeros, mesh="hsdp")
    for compiled in ("blocks", "root"):
        add(GLOO2, plain, compiled=compiled)
    return list(dict.fromkeys(settings))


def _random(rng: random.Random) -> Placed:
    """Returns a random combination of launch, mesh, basic setting and extras."""
    weights = [weight for _, _, weight in PLACES]
    launch, mesh, _ = rng.choices(PLACES, weights)[0]
    setting = replace(random_setting(rng), mesh=mesh)
    if rng.random() < 0.5:
        setting = replace(setting, family=rng.choice(tuple(WIDE_FAMILIES)))
    if rng.random() < 0.2:
        setting = replace(setting, schedule=rng.choice(WIDE_SCHEDULES))
    if rng.random() < 0.2:
        setting = replace(setting, reshard=rng.choice(("2", "4")))
    for name, values in EXTRAS.items():
        if rng.random() < 0.15:
            setting = replace(setting, **{name: rng.choice(values)})
    return remove_conflicts(launch, setting)


def remove_conflicts(launch: Launch, setting: Setting) -> Placed:
    """Removes values that cannot be combined with the launch or with other values."""
    setting = resolve_conflicts(setting)
    for rule in (_without_unsupported, _without_untrainable, _without_torch_bugs):
        setting = rule(launch, setting)
    return launch, setting


def _reset_fields(setting: Setting, *names: str) -> Setting:
    """Resets some fields to their plain values."""
    fields = {entry.name: entry.default for entry in dataclasses.fields(setting)}
    return replace(setting, **{name: fields[name] for name in names})


def _without_unsupported(launch: Launch, setting: Setting) -> Setting:
    """Removes combinations that FSDP2 rejects or does not have."""
    mesh = setting.mesh
    if launch.threads and setting.family in ("transformer", "tied", "grouped"):
        # Threads share one random generator, so dropout would not be reproducible.
        setting = replace(setting, family="even")
    if (has_tensor_dim(mesh) or is_spmd(mesh)) and setting.family not in ("even", "odd"):
        setting = replace(setting, family="odd" if setting.placement is None else "even")
    if not is_hsdp(mesh) and setting.schedule in REPLICA_SCHEDULES:
        setting = _reset_fields(setting, "schedule")
    if isinstance(setting.reshard, str):
        if has_tensor_dim(mesh) or is_spmd(mesh) or setting.extension:
            setting = _reset_fields(setting, "reshard")
        elif int(setting.reshard) > _shard_size(launch, mesh):
            setting = replace(setting, reshard="2" if _shard_size(launch, mesh) > 1 else "1")
    if setting.placement == "experts" and (mesh != "flat" or launch.world_size != 4):
        setting = _reset_fields(setting, "placement")
    if setting.placement == "experts" and (
        setting.comm == "custom" or setting.reduce_hook or setting.schedule == "pipeline"
    ):
        setting = _reset_fields(setting, "comm", "reduce_hook", "schedule")
    if setting.extension and (has_tensor_dim(mesh) or is_spmd(mesh)):
        # The harness's subclasses do not support all operations as a DTensor's local tensor.
        setting = _reset_fields(setting, "extension")
    if setting.extension and setting.family != "even":
        setting = replace(setting, family="even")
    if setting.family == "pair":
        # These settings and schedules call methods of a single root.
        setting = _reset_fields(setting, "schedule", "toggle_reshard", "reset", "optim_event")
        if setting.wrap == "root" or setting.unshard:
            setting = _reset_fields(setting, "wrap", "unshard")
        if setting.output:
            # The cast output of the first root would be the input of the second root.
            setting = _reset_fields(setting, *MIXED_FIELDS)
    return setting


def _without_untrainable(launch: Launch, setting: Setting) -> Setting:
    """Removes combinations that FSDP2 accepts but cannot train, or the harness cannot compare."""
    mixed = any(getattr(setting, name) for name in ("param", "reduce", "output", "inputs"))
    if setting.divide == "force_sum_factor" and is_hsdp(setting.mesh):
        setting = _reset_fields(setting, "divide")
    if setting.extension and (mixed or setting.original != "fp32" or setting.state):
        setting = _reset_fields(setting, *MIXED_FIELDS, "divide", "state")
    return setting


def _without_torch_bugs(launch: Launch, setting: Setting) -> Setting:
    """Removes combinations in which torch fails or is wrong (numbers: tests/TORCH_BUGS.md)."""
    shard_size = _shard_size(launch, setting.mesh)
    if isinstance(setting.reshard, str) and setting.placement in ("last", "mixed"):
        # B4: a parameter sharded on dim 1 fails in backward after resharding to fewer ranks.
        setting = _reset_fields(setting, "placement")
    if isinstance(setting.reshard, str) and 1 < int(setting.reshard) < shard_size:
        # B5: torch splits uneven shards wrongly on the smaller mesh.
        setting = replace(setting, family="even", keep_sharded=False)
    if isinstance(setting.reshard, str) and (setting.evaluate or setting.inference):
        # An evaluation leaves parameters on the smaller mesh. torch then loses their requires_grad
        # and cannot gather them after reshard_after_forward changed.
        setting = _reset_fields(setting, "toggle_reshard", "toggle_frozen")
    if shard_size == 1:
        # B3: a single shard fails with extensions and under inference mode, and divides twice.
        setting = _reset_fields(setting, "extension", "inference", "divide")
    if setting.zeros and setting.family == "unused":
        # B7: set_reduce_scatter_unused_params skips groups that were never gathered.
        setting = _reset_fields(setting, "zeros")
    if setting.family == "conditional" and not setting.zeros:
        setting = replace(setting, zeros=True)
    if setting.family == "conditional" and setting.schedule in REPLICA_SCHEDULES:
        # B1: partial reductions of changing sets of parameters are accumulated wrongly.
        setting = _reset_fields(setting, "schedule")
    return setting


def _shard_size(launch: Launch, mesh: str) -> int:
    shape = SHAPES.get((mesh, launch.world_size), (launch.world_size,))
    sizes = dict(zip(KINDS[mesh], shape, strict=True))
    return sizes.get("world", sizes.get("shard", 1)) * sizes.get("context", 1)
