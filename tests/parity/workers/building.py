"""Builds the model of a setting and applies fully_shard: everything before the first forward."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed.fsdp as torch_fsdp
import torch.nn as nn
from comms import RecordingAllGather, RecordingReduceScatter, ReduceHook
from extensions import extend
from fsdp_units import units_of
from meshes import Meshes, has_tensor_dim, is_spmd
from models import FAMILIES, Case
from models_wide import WIDE_FAMILIES
from record import Recorder
from releases import ShardPlacementResult
from setting import DEVICE, DTYPES, Setting
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from toy_models import Checkpointed

SEED = 1234

FullyShard = Callable[..., Any]

# Thread ranks share torch's global generator, so only one of them may seed it and draw at a time.
_generator_lock = threading.Lock()


def seed_generator(seed: int) -> None:
    """Seeds torch's global generator while no other thread draws a model's weights from it."""
    with _generator_lock:
        torch.manual_seed(seed)


def load_implementation(name: str) -> FullyShard:
    """Returns the ``fully_shard`` of "torch", of "fsdp_c" or of "module:function"."""
    if name == "torch":
        name = "torch.distributed.fsdp:fully_shard"
    elif name == "fsdp_c":
        name = "fsdp_c:fully_shard"
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


@dataclass
class Built:
    """A model after fully_shard, with the modules that the schedules need."""

    case: Case
    units: list[Any]
    """The wrapped modules below the roots, in forward order, one per parameter group."""


class Builder:
    """Builds the models of one setting on one rank."""

    def __init__(
        self, setting: Setting, fully_shard: FullyShard, meshes: Meshes, recorder: Recorder
    ) -> None:
        self.setting = setting
        self.fully_shard = fully_shard
        self.meshes = meshes
        self.recorder = recorder

    def build(self, seed: int, meta: bool = False) -> Built:
        """Builds and wraps the setting's model. A meta model gets its values after wrapping."""
        setting = self.setting
        builder = (FAMILIES | WIDE_FAMILIES)[setting.family]
        with _generator_lock, torch.device("meta" if meta else "cpu"):
            torch.manual_seed(seed)
            case = builder()
        model = case.model
        model.to(DTYPES[setting.original])
        if setting.extension:
            extend(model, setting.extension)
        self._parallelize(case)
        if DEVICE != "cpu" and not meta:
            model.to(DEVICE)  # does not move ignored parameters
        named = dict(model.named_parameters())
        self._ignored = {named[name] for name in case.ignored} if setting.ignored else None
        self._experts = {named[name] for name in case.experts}
        if setting.checkpoint and case.checkpointable:
            self._checkpoint(case)
        if setting.compiled == "blocks":
            for group in case.blocks:
                group[0].compile(backend="eager")
        built = Built(case, self._wrap(case))
        if setting.compiled == "root":
            model.compile(backend="eager")
        if meta:
            model.to_empty(device=DEVICE)
            self._fill(model)
        self._prefetch(built.units)
        self._set_divide(model)
        self._set_communication(case)
        if setting.hooks:
            self._register_hooks(model)
        return built

    # ---- before wrapping ----------------------------------------------------------------------

    def _parallelize(self, case: Case) -> None:
        """Makes the parameters DTensors if the setting's mesh has a tensor or SPMD dimension."""
        kind = self.setting.mesh
        if has_tensor_dim(kind):
            styles = {
                "column": ColwiseParallel,
                "row": RowwiseParallel,
                "gathered": lambda: ColwiseParallel(output_layouts=Replicate()),
            }
            plan = {name: styles[style]() for name, style in case.parallel.items()}
            parallelize_module(case.model, self.meshes.tensor(kind), plan)
        elif is_spmd(kind):
            self._distribute(case)

    def _distribute(self, case: Case) -> None:
        """Distributes all parameters over the whole mesh. The model's inputs and outputs stay
        plain tensors."""
        mesh = self.meshes.whole(self.setting.mesh)
        names = mesh.mesh_dim_names or ()
        tensor_dim = {"column": 0, "gathered": 0, "row": 1}

        def partition(name: str, module: nn.Module, mesh: Any) -> None:
            style = next(
                (
                    style
                    for pattern, style in case.parallel.items()
                    if _matches(pattern, name) and isinstance(module, nn.Linear)
                ),
                None,
            )
            for key, parameter in list(module.named_parameters(recurse=False)):
                placements: list[Any] = [Replicate() for _ in names]
                if style and "tensor" in names and (parameter.ndim == 2 or style != "row"):
                    placements[names.index("tensor")] = Shard(tensor_dim[style])
                distributed = torch.distributed.tensor.distribute_tensor(
                    parameter.detach(), mesh, placements, src_data_rank=None
                )
                module.register_parameter(
                    key, nn.Parameter(distributed, requires_grad=parameter.requires_grad)
                )

        batch = [Replicate() if name == "tensor" else Shard(0) for name in names]

        def to_mesh(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
            return tuple(DTensor.from_local(arg, mesh, batch, run_check=False) for arg in args)

        def to_local(module: nn.Module, args: Any, output: DTensor) -> torch.Tensor:
            return output.redistribute(placements=batch).to_local(grad_placements=batch)

        distribute_module(case.model, mesh, partition)
        case.model.register_forward_pre_hook(to_mesh)
        case.model.register_forward_hook(to_local)

    def _checkpoint(self, case: Case) -> None:
        """Adds the setting's kind of activation checkpointing before the model is wrapped."""
        kind = self.setting.checkpoint
        for group in case.blocks:
            block = group[0]
            if kind == "inside":
                recomputed: nn.Module = checkpoint_wrapper(
                    block, checkpoint_impl=CheckpointImpl.NO_REENTRANT
                )
                group[0] = recomputed
            else:
                recomputed = Checkpointed(block, kind == "reentrant")
            _replace(case.model, block, recomputed)

    # ---- wrapping -----------------------------------------------------------------------------

    def _wrap(self, case: Case) -> list[nn.Module]:
        setting = self.setting
        policy = MixedPrecisionPolicy(
            param_dtype=_dtype(setting.param),
            reduce_dtype=_dtype(setting.reduce),
            output_dtype=_dtype(setting.output),
            cast_forward_inputs=setting.cast_inputs,
        )
        # Only the root casts its outputs. Code between units multiplies inner outputs with
        # parameters of the compute dtype.
        inner = MixedPrecisionPolicy(
            param_dtype=policy.param_dtype,
            reduce_dtype=policy.reduce_dtype,
            cast_forward_inputs=policy.cast_forward_inputs,
        )
        options = self._options()
        if setting.wrap == "deep":
            for leaf in case.leaves:
                self.fully_shard(leaf, mp_policy=inner, **options)
        units = []
        if setting.wrap != "root":
            for group in case.blocks:
                target = group[0] if len(group) == 1 else group
                self.fully_shard(target, mp_policy=inner, **options)
                units.append(group[0])
        for root in case.roots or [case.model]:
            self.fully_shard(root, mp_policy=policy, **options)
        classes = [type(module).__name__ for module in case.model.modules()]
        self.recorder.record("classes", classes)
        for module, name in case.methods:
            torch_fsdp.register_fsdp_forward_method(module, name)
        if case.roots:
            # share_comm_ctx needs roots whose lazy initialization has run.
            roots: list[Any] = case.roots
            for root in roots:
                root._get_fsdp_state()._lazy_init()
            torch_fsdp.share_comm_ctx(roots)
        return units

    def _options(self) -> dict[str, Any]:
        """Returns the arguments of fully_shard other than modules and mp_policy."""
        setting = self.setting
        reshard: Any = setting.reshard
        options: dict[str, Any] = {
            "mesh": self.meshes.data(setting.mesh),
            "reshard_after_forward": int(reshard) if isinstance(reshard, str) else reshard,
            "ignored_params": self._ignored,
        }
        if setting.placement:
            options["shard_placement_fn"] = self._placement
        if setting.offload:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=DEVICE != "cpu")
        if is_spmd(setting.mesh):
            options["dp_mesh_dims"] = self.meshes.dims(setting.mesh)
        return options

    def _placement(self, parameter: nn.Parameter) -> Any:
        """Implements shard_placement_fn for the setting."""
        local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
        size = self.meshes.shard_size(self.setting.mesh)
        if self.setting.placement == "experts":
            if parameter in self._experts:
                return ShardPlacementResult(placement=None, mesh_info=self.meshes.experts())
            return None
        if local.ndim < 2 or local.shape[-1] % size:
            return None
        if self.setting.placement == "last":
            return Shard(-1)
        return Shard(1) if local.shape[1] > local.shape[0] else Shard(0)

    # ---- after wrapping -----------------------------------------------------------------------

    def _fill(self, model: nn.Module) -> None:
        """Fills materialized parameters with values that depend on shard and index only."""
        with torch.no_grad():
            for index, parameter in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(
                    SEED + index + 97 * _shard_index(parameter)
                )
                local = local_part(parameter)
                local.copy_(torch.randn(local.shape, generator=generator) * 0.3)
            for name, buffer in model.named_buffers():
                buffer.fill_(1 if name.endswith("var") else 0)

    def _prefetch(self, units: list[Any]) -> None:
        kind = self.setting.prefetch
        if kind in ("forward", "both"):
            for index, unit in enumerate(units):
                unit.set_modules_to_forward_prefetch(units[index + 1 : index + 3])
        if kind in ("backward", "both"):
            for index, unit in enumerate(units):
                unit.set_modules_to_backward_prefetch(units[max(0, index - 2) : index][::-1])

    def _set_divide(self, model: nn.Module) -> None:
        kind = self.setting.divide
        for module in units_of(model):
            if kind == "world":
                # gloo has no PREMUL_SUM, so only torch's default factor, an average, is possible.
                module.set_gradient_divide_factor(float(self.meshes.shard_size(self.setting.mesh)))
            if kind in ("force_sum", "force_sum_factor"):
                module.set_force_sum_reduction_for_comms(True)
            if kind in ("force_sum_factor", "fp16_factor"):
                module.set_gradient_divide_factor(6.0)

    def _set_communication(self, case: Case) -> None:
        setting, recorder = self.setting, self.recorder
        roots: list[Any] = case.roots or [case.model]
        for root in roots:
            if setting.comm == "separate":
                root.set_separate_reduce_scatter_group()
            if setting.comm == "buffers":
                root.set_reduce_scatter_max_input_buffers(3)
            if setting.zeros:
                root.set_reduce_scatter_unused_params(True)
            if setting.async_op:
                root._set_unshard_async_op(True)
        for index, module in enumerate(units_of(case.model)):
            if setting.comm == "custom":
                module.set_custom_all_gather(RecordingAllGather(recorder))
                module.set_custom_reduce_scatter(RecordingReduceScatter(recorder))
            if setting.comm == "memory":
                module.set_allocate_memory_from_process_group_for_comm(True)
            if setting.reduce_hook:
                module.set_all_reduce_hook(ReduceHook(recorder, str(index)))
        if setting.keep_sharded:
            unneeded: list[Any] = case.unneeded
            for module in unneeded:
                module.set_unshard_in_backward(False)

    def _register_hooks(self, model: nn.Module) -> None:
        """Registers hooks that halve and record gradients, and hooks that record forwards."""
        recorder = self.recorder

        def on_gradient(name: str) -> Callable[[torch.Tensor], None]:
            def hook(parameter: torch.Tensor) -> None:
                recorder.tensor(f"hook {name}", parameter.grad)
                with torch.no_grad():
                    assert parameter.grad is not None
                    local_part(parameter.grad).mul_(0.5)

            return hook

        def on_forward(name: str, when: str) -> Callable[..., None]:
            def hook(module: nn.Module, *rest: Any) -> None:
                types = [type(p).__name__ for p in module.parameters()]
                recorder.record(f"{when} {name}", types)

            return hook

        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(on_gradient(name))
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                module.register_forward_pre_hook(on_forward(name, "before"))
                module.register_forward_hook(on_forward(name, "after"))
                module.register_forward_hook(on_forward(name, "first after"), prepend=True)


# ---- helpers ------------------------------------------------------------------------------------


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns a DTensor's local shard, or a plain tensor itself."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else DTYPES[name]


def _shard_index(parameter: torch.Tensor) -> int:
    """Returns the index of this rank's shard. Ranks with equal shards have equal indices."""
    if not isinstance(parameter, DTensor):
        return 0
    coordinate = parameter.device_mesh.get_coordinate()
    assert coordinate is not None
    shard_index = 0
    for placement, size, place in zip(
        parameter.placements, parameter.device_mesh.shape, coordinate, strict=True
    ):
        if not isinstance(placement, (Replicate, Partial)):
            shard_index = shard_index * size + place
    return shard_index


def _matches(pattern: str, name: str) -> bool:
    """Returns whether a module name matches a pattern, in which ``*`` stands for one part."""
    pattern_parts, parts = pattern.split("."), name.split(".")
    return len(pattern_parts) == len(parts) and all(
        expected in ("*", part) for expected, part in zip(pattern_parts, parts, strict=True)
    )


def _replace(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Replaces ``old`` by ``new`` wherever it is a child of a module below ``root``."""
    for parent in list(root.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)
