"""A script that uses every public name of fsdp_c. test_typing.py type-checks it without running."""

from __future__ import annotations

import sys
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, size_based_auto_wrap_policy
from torch.distributed.tensor import Shard

import fsdp_c
from fsdp_c import (
    CPUOffloadPolicy,
    Explanation,
    FSDPModule,
    GradientReductionHandle,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardedEMA,
    StepTrace,
    UnitReport,
    UnshardHandle,
    auto_shard,
    clip_grad_norm_,
    explain,
    full_params,
    fully_shard,
    generate_with,
    is_active,
    load_full_state_dict,
    names,
    no_sync,
    optim,
    plan,
    register_fsdp_forward_method,
    release_memory,
    replicate,
    set_bucket_cap,
    set_guard,
    set_reduction_overlap,
    set_transport,
    trace,
)

if TYPE_CHECKING:
    from torch.distributed._composable.replicate_with_fsdp import ReplicateModule


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def generate(self, prompt: torch.Tensor) -> torch.Tensor:
        tokens: torch.Tensor = self(prompt)
        return tokens


policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
offload: OffloadPolicy = CPUOffloadPolicy(pin_memory=False)
mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("replicate", "shard"))


def shard_each_layer() -> None:
    model = Model()
    for layer in model.layers:
        unit: FSDPModule = fully_shard(layer, mesh=mesh, mp_policy=policy, offload_policy=offload)
        unit.set_requires_gradient_sync(False)
    pair: list[FSDPModule] = fully_shard([model.layers[0], model.layers[1]])
    pair[0].set_modules_to_forward_prefetch(pair[1:])
    root: FSDPModule = fully_shard(
        model,
        reshard_after_forward=2,
        shard_placement_fn=lambda param: Shard(1) if param.ndim > 1 else None,
        ignored_params=set(model.layers[0].parameters()),
    )
    handle: UnshardHandle | None = root.unshard(async_op=True)
    if handle is not None:
        handle.wait()
    register_fsdp_forward_method(model, "generate")


def shard_by_policy() -> Model:
    auto_shard(Model())
    auto_shard(Model(), "blocks", mp_policy=policy, mesh=mesh, max_transient=2**30)
    auto_shard(Model(), 512 * 2**20, frozen="error", ignored_modules=[nn.Linear(1, 1)])
    auto_shard(Model(), nn.Linear, keep_originals=False, offload_policy=offload)
    auto_shard(Model(), {nn.Linear, nn.Conv2d}, full_precision_classes=(nn.BatchNorm2d,))
    auto_shard(Model(), ModuleWrapPolicy({nn.Linear}))
    auto_shard(Model(), partial(size_based_auto_wrap_policy, min_num_params=100))
    auto_shard(Model(), min_unit=2**20, separate_ends=False, ignored_params=Model().parameters())
    auto_shard(Model(), reshard_after_forward=2, shard_placement_fn=lambda param: Shard(0))
    return auto_shard(Model(), shard_fn=replicate, bucket_cap_mb=10)


def train() -> None:
    model = shard_by_policy()
    replica: ReplicateModule = replicate(Model(), bucket_cap_mb=float("inf"))
    replica.set_is_last_backward(True)
    optimizer = torch.optim.AdamW(model.parameters())
    ema = ShardedEMA(model, 0.999)
    with no_sync(model):
        model(torch.ones(2, 8)).sum().backward()
    norm: torch.Tensor = clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    ema.update(model)
    with torch.no_grad(), full_params(model) as full:
        full["layers.0.weight"].mul_(norm)
    with generate_with(model) as generating, ema.applied(model):
        tokens: torch.Tensor = generating.generate(torch.ones(1, 8))
        assert tokens is not None
    load_full_state_dict(model, "model.safetensors", rename=names.clean_tensor_name)
    fsdp_c.install()
    active: bool = is_active(model)
    assert active
    fsdp_c.uninstall()


def analyze() -> None:
    model = Model()
    optimizer = optim.accelerate(torch.optim.SGD(model.parameters()))
    rate: dict[str, object] = optimizer.defaults
    explanation: Explanation = explain(model, optimizer, batch=torch.ones(2, 8), memory="80GiB")
    explanation.plot("memory.png")
    fits: bool | None = plan(
        Model(), mesh=(2, 4), optimizer="sgd", mp_policy=policy, max_transient=2**30, min_unit=2**20
    ).fits
    plan(Model(), nn.Linear, world_size=8, device="cpu", loss=torch.sum, file=sys.stderr)
    advice: str = str(plan(Model(), world_size=16, microbatches=4, ranks_per_node=8).advice[0])
    units: list[UnitReport] = explanation.units
    assert units and rate and advice and fits is not None
    with trace(model) as step:
        model(torch.ones(2, 8)).sum().backward()
    step_trace: StepTrace = step
    step_trace.plot("step.png")
    step_trace.save("step.json")
    set_transport(model, "gloo")
    set_bucket_cap(model, 256.0)
    set_guard("off")
    set_guard("hash")
    set_reduction_overlap(model, overlap=False)
    release_memory()


def use_methods_of_newer_torch(root: FSDPModule, handle: GradientReductionHandle) -> None:
    handle.wait()
    root.reset_iter_state()


def make_type_errors() -> None:
    """Each line has a type error, which a checker would not report if fsdp_c's types were Any."""
    auto_shard(Model(), "block")  # type: ignore[arg-type]
    auto_shard(Model(), mp_polcy=policy)  # type: ignore[call-arg]
    auto_shard(Model(), mesh=8)  # type: ignore[arg-type]
    fully_shard(Model(), mp_policy=torch.bfloat16)  # type: ignore[call-overload]
    fully_shard(Model(), ignored_params=[])  # type: ignore[call-overload]
    replicate(Model(), bucket_cap_mb="25")  # type: ignore[call-overload]
    clip_grad_norm_(Model(), None)  # type: ignore[arg-type]
    set_transport(Model(), "nccl")  # type: ignore[arg-type]
    set_guard("all")  # type: ignore[arg-type]
    auto_shard(Model(), min_unit="1 MiB")  # type: ignore[arg-type]
