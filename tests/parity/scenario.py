"""The training script that both implementations run: one setting on one rank.

``run_setting`` builds the setting's model from a fixed seed, wraps it with the given
``fully_shard``, trains three steps as the setting says and notes everything observable on the way:
losses, outputs' and gradients' dtypes and bits, parameters and how they are registered, state
dicts, hooks called, collectives issued.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from grid import DTYPES, Setting
from models import FAMILIES, Case, Inputs, tensors_in
from record import Recorder, error_entry
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

STEPS = 3
SEED = 1234

FullyShard = Callable[..., Any]


def load_implementation(name: str) -> FullyShard:
    """``fully_shard`` of torch ("torch"), of this project ("fsdp_c"), or "module:function"."""
    if name == "torch":
        name = "torch.distributed.fsdp:fully_shard"
    elif name == "fsdp_c":
        name = "fsdp_c:fully_shard"
    module, _, attribute = name.partition(":")
    return getattr(importlib.import_module(module), attribute)


def run_setting(
    setting: Setting,
    fully_shard: FullyShard,
    mesh: DeviceMesh,
    recorder: Recorder,
    ours: bool,
) -> None:
    """Run one setting into ``recorder``; an exception becomes its last entry."""
    try:
        _Script(setting, fully_shard, mesh, recorder, ours).run()
    except Exception as error:
        recorder.entries.append(error_entry(error))


class Recomputed(nn.Module):
    """Calls a (wrapped) block under torch's checkpoint()."""

    def __init__(self, block: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.block = block
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


class _Script:
    def __init__(
        self,
        setting: Setting,
        fully_shard: FullyShard,
        mesh: DeviceMesh,
        recorder: Recorder,
        ours: bool,
    ) -> None:
        self.setting = setting
        self.fully_shard = fully_shard
        self.mesh = mesh
        self.rank = mesh.get_rank()
        self.recorder = recorder
        self.ours = ours
        self.units: list[nn.Module] = []

    def run(self) -> None:
        self.case = self._build(SEED, meta=self.setting.state == "meta")
        self.model = self.case.model
        self.optimizers = self._make_optimizers()
        self._note_parameters("initial")
        for step in range(STEPS):
            if self.ours and self.setting.perturb and step == STEPS - 1:
                with torch.no_grad():
                    next(self.model.parameters())._local_tensor.add_(self.setting.perturb)
            self._change_settings(step)
            self._step(step)
        self._note_state_dict("final")
        if self.setting.state in ("copy", "assign"):
            self._continue_from_state_dict()

    # ---- building -----------------------------------------------------------------------------

    def _build(self, seed: int, meta: bool = False) -> Case:
        """The setting's model, wrapped; on meta it is materialised and filled after wrapping."""
        setting = self.setting
        torch.manual_seed(seed)
        with torch.device("meta" if meta else "cpu"):
            case = FAMILIES[setting.family]()
        case.model.to(DTYPES[setting.original])
        # Only tensors that were drawn are the same on all ranks; all ranks draw alike.
        ignored = set()
        if setting.ignored:
            named = dict(case.model.named_parameters())
            ignored = {named[name] for name in case.ignored}
        self._checkpoint(case)
        self._wrap(case, ignored)
        if meta:
            case.model.to_empty(device="cpu")
            self._fill(case.model)
        self._prefetch()
        self._set_divide(case.model)
        if setting.hooks:
            self._register_hooks(case.model)
        return case

    def _checkpoint(self, case: Case) -> None:
        """Put the setting's kind of recomputation into the model, before it is wrapped."""
        kind = self.setting.checkpoint
        if kind is None or not case.checkpointable:
            return
        for group in case.blocks:
            block = group[0]
            if kind == "inside":
                recomputed: nn.Module = checkpoint_wrapper(
                    block, checkpoint_impl=CheckpointImpl.NO_REENTRANT
                )
                group[0] = recomputed
            else:
                recomputed = Recomputed(block, kind == "reentrant")
            _replace(case.model, block, recomputed)

    def _wrap(self, case: Case, ignored: set[nn.Parameter]) -> None:
        setting = self.setting
        policy = MixedPrecisionPolicy(
            param_dtype=_dtype(setting.param),
            reduce_dtype=_dtype(setting.reduce),
            output_dtype=_dtype(setting.output),
            cast_forward_inputs=setting.cast_inputs,
        )
        # Only the root converts its outputs: an inner unit's output dtype would be seen by code
        # that multiplies it with parameters of the compute dtype.
        inner = MixedPrecisionPolicy(
            param_dtype=policy.param_dtype,
            reduce_dtype=policy.reduce_dtype,
            cast_forward_inputs=policy.cast_forward_inputs,
        )
        options: dict[str, Any] = {
            "mesh": self.mesh,
            "reshard_after_forward": setting.reshard,
            "ignored_params": ignored or None,
        }
        if setting.wrap == "deep":
            for leaf in case.leaves:
                self.fully_shard(leaf, mp_policy=inner, **options)
        self.units = []
        if setting.wrap != "root":
            for group in case.blocks:
                target = group[0] if len(group) == 1 else group
                self.fully_shard(target, mp_policy=inner, **options)
                self.units.append(group[0])
        self.fully_shard(case.model, mp_policy=policy, **options)
        self.recorder.note("classes", [type(module).__name__ for module in case.model.modules()])

    def _fill(self, model: nn.Module) -> None:
        """Give materialised parameters and buffers values that depend on rank and name only."""
        generator = torch.Generator().manual_seed(SEED + 17 * self.rank)
        with torch.no_grad():
            for parameter in model.parameters():
                local = _local(parameter)
                local.copy_(torch.randn(local.shape, generator=generator) * 0.3)
            for name, buffer in model.named_buffers():
                buffer.fill_(1 if name.endswith("var") else 0)

    def _prefetch(self) -> None:
        kind = self.setting.prefetch
        if kind in ("forward", "both"):
            for index, unit in enumerate(self.units):
                unit.set_modules_to_forward_prefetch(self.units[index + 1 : index + 3])
        if kind in ("backward", "both"):
            for index, unit in enumerate(self.units):
                unit.set_modules_to_backward_prefetch(self.units[max(0, index - 2) : index][::-1])

    def _set_divide(self, model: nn.Module) -> None:
        kind = self.setting.divide
        for module in _wrapped(model):
            if kind == "world":
                module.set_gradient_divide_factor(float(self.mesh.size()))
            if kind in ("force_sum", "force_sum_factor"):
                module.set_force_sum_reduction_for_comms(True)
            if kind in ("force_sum_factor", "fp16_factor"):
                module.set_gradient_divide_factor(6.0)

    def _register_hooks(self, model: nn.Module) -> None:
        """Hooks that note what they see: on parameters, gradients and modules."""
        recorder = self.recorder

        def on_gradient(name: str) -> Callable[[torch.Tensor], None]:
            def hook(parameter: torch.Tensor) -> None:
                recorder.tensor(f"hook {name}", parameter.grad)
                with torch.no_grad():
                    _local(parameter.grad).mul_(0.5)

            return hook

        def on_forward(name: str, when: str) -> Callable[..., None]:
            def hook(module: nn.Module, *rest: Any) -> None:
                kinds = [type(p).__name__ for p in module.parameters()]
                recorder.note(f"{when} {name}", kinds)

            return hook

        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(on_gradient(name))
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule):
                module.register_forward_pre_hook(on_forward(name, "before"))
                module.register_forward_hook(on_forward(name, "after"))
                module.register_forward_hook(on_forward(name, "first after"), prepend=True)

    def _make_optimizers(self) -> list[torch.optim.Optimizer]:
        """The setting's optimizer over the wrapped parameters, and one over the ignored ones.

        One each, because torch's foreach and fused kernels refuse a mix of DTensors and tensors.
        """
        parameters = list(self.model.parameters())
        wrapped = [p for p in parameters if isinstance(p, DTensor)]
        ignored = [p for p in parameters if not isinstance(p, DTensor)]
        return [self._make_optimizer(some) for some in (wrapped, ignored) if some]

    def _make_optimizer(self, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        kind = self.setting.optimizer
        if kind.startswith("sgd"):
            foreach = kind == "sgd_foreach"
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=foreach)
        options = {"adamw": {"foreach": False}, "adamw_foreach": {"foreach": True}}
        return torch.optim.AdamW(parameters, lr=0.01, **options.get(kind, {"fused": True}))

    # ---- one step -----------------------------------------------------------------------------

    def _change_settings(self, step: int) -> None:
        """What the setting changes between steps."""
        setting = self.setting
        if setting.toggle_reshard and step > 0:
            self.model.set_reshard_after_forward(step == 2)
        if setting.toggle_frozen and step > 0:
            for name, parameter in self.model.named_parameters():
                if name in self.case.toggled:
                    parameter.requires_grad_(not parameter.requires_grad)
        if setting.reset and step > 0:
            self.model.reset_iter_state()

    def _step(self, step: int) -> None:
        setting, label = self.setting, f"step {step}"
        self.recorder.note("begin", label)
        torch.manual_seed(SEED + step)
        self._unshard_by_hand(label)
        _SCHEDULES[setting.schedule](self, label)
        self._note_gradients(label)
        if setting.clip:
            wrapped = [p for p in self.model.parameters() if isinstance(p, DTensor)]
            norm = nn.utils.clip_grad_norm_(wrapped, 0.1)
            self.recorder.tensor(f"{label} norm", norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=setting.zero == "none")
        self._note_parameters(label)
        if setting.evaluate:
            self._evaluate(label)

    def _unshard_by_hand(self, label: str) -> None:
        kind, model = self.setting.unshard, self.model
        if kind == "sync":
            model.unshard()
        elif kind in ("async", "async_wait"):
            handles = [unit.unshard(async_op=True) for unit in (*self.units, model)]
            if kind == "async_wait":
                for handle in handles:
                    handle.wait()
        elif kind == "blocks":
            for unit in self.units:
                unit.unshard()
            self.units[-1].reshard()
        elif kind == "reshard":
            model.unshard()
            self._note_registered(f"{label} unsharded")
            model.reshard()
            self._note_registered(f"{label} resharded")

    def _inputs(self, label: str, micro: int) -> Inputs:
        setting = self.setting
        step = int(label.split()[-1])
        generator = torch.Generator().manual_seed(SEED + 101 * self.rank + 7 * step + micro)
        args, kwargs = self.case.inputs(generator, DTYPES[setting.inputs or setting.original])
        if setting.schedule == "input_grad" or setting.checkpoint == "reentrant":
            for tensor in tensors_in(args):
                if tensor.is_floating_point():
                    tensor.requires_grad_()
        return args, kwargs

    def forward(self, label: str, micro: int = 0, inputs: Inputs | None = None) -> torch.Tensor:
        """One forward; its loss, a scalar: the mean square of every output."""
        args, kwargs = inputs or self._inputs(label, micro)
        outputs = tensors_in(self.model(*args, **kwargs))
        for output in outputs:
            self.recorder.tensor(f"{label}.{micro} output", output)
        self._note_registered(f"{label}.{micro} after forward")
        losses = [output.float().square().mean() for output in outputs if output.requires_grad]
        loss = torch.stack(losses).sum()
        self.recorder.tensor(f"{label}.{micro} loss", loss)
        return loss

    def backward(self, label: str, loss: torch.Tensor, **options: Any) -> None:
        loss.backward(**options)
        self._note_registered(f"{label} after backward")

    def _evaluate(self, label: str) -> None:
        """A forward without gradients, after the optimizer's step."""
        self.model.eval()
        with torch.no_grad():
            args, kwargs = self._inputs(label, 9)
            for output in tensors_in(self.model(*args, **kwargs)):
                self.recorder.tensor(f"{label} evaluated", output)
        self.model.train()

    def _continue_from_state_dict(self) -> None:
        """Load the state into a differently seeded, newly wrapped model and train one step."""
        state = {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in self.model.state_dict().items()
        }
        self.case = self._build(SEED + 1)
        self.model = self.case.model
        result = self.model.load_state_dict(state, assign=self.setting.state == "assign")
        self.recorder.note("loaded", str(result))
        self.optimizers = self._make_optimizers()
        self._note_parameters("loaded")
        self._step(STEPS)
        self._note_state_dict("continued")

    # ---- notes --------------------------------------------------------------------------------

    def _note_parameters(self, label: str) -> None:
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            self.recorder.tensor(f"{label} parameter {name}", parameter)

    def _note_registered(self, label: str) -> None:
        """How the parameters are registered now: sharded or not, their dtype, requires_grad."""
        self.recorder.note(
            label,
            [
                (type(p).__name__, str(p.dtype), p.requires_grad, p.is_leaf)
                for p in self.model.parameters()
            ],
        )

    def _note_gradients(self, label: str) -> None:
        for name, parameter in self.model.named_parameters():
            self.recorder.tensor(f"{label} gradient {name}", parameter.grad)

    def _note_state_dict(self, label: str) -> None:
        for name, value in self.model.state_dict().items():
            self.recorder.tensor(f"{label} state {name}", value)


# ---- schedules: how a step's microbatches are run -----------------------------------------------


def _plain(script: _Script, label: str) -> None:
    script.backward(label, script.forward(label))


def _accumulate(script: _Script, label: str) -> None:
    for micro in range(2):
        script.backward(label, script.forward(label, micro))


def _no_sync(script: _Script, label: str) -> None:
    for micro in range(3):
        script.model.set_requires_gradient_sync(micro == 2)
        script.backward(label, script.forward(label, micro))
        if micro < 2:
            script._note_gradients(label)


def _no_sync_some(script: _Script, label: str) -> None:
    for micro in range(3):
        for unit in script.units:
            unit.set_requires_gradient_sync(micro == 2, recurse=False)
        script.backward(label, script.forward(label, micro))


def _keep_params(script: _Script, label: str) -> None:
    for micro in range(2):
        script.model.set_reshard_after_backward(micro == 1)
        script.backward(label, script.forward(label, micro))


def _no_sync_keep_params(script: _Script, label: str) -> None:
    for micro in range(3):
        last = micro == 2
        script.model.set_is_last_backward(last)
        script.model.set_reshard_after_backward(last)
        script.model.set_requires_gradient_sync(last)
        script.backward(label, script.forward(label, micro))


def _last_backward(script: _Script, label: str) -> None:
    for micro in range(2):
        script.model.set_is_last_backward(micro == 1)
        script.backward(label, script.forward(label, micro))


def _interleaved(script: _Script, label: str) -> None:
    losses = [script.forward(label, micro) for micro in range(2)]
    for loss in losses:
        script.backward(label, loss)


def _reversed(script: _Script, label: str) -> None:
    losses = [script.forward(label, micro) for micro in range(2)]
    for loss in reversed(losses):
        script.backward(label, loss)


def _summed(script: _Script, label: str) -> None:
    losses = [script.forward(label, micro) for micro in range(2)]
    script.backward(label, torch.stack(losses).sum())


def _retained(script: _Script, label: str) -> None:
    loss = script.forward(label)
    script.backward(label, loss, retain_graph=True)
    script.backward(label, loss)


def _input_grad(script: _Script, label: str) -> None:
    inputs = script._inputs(label, 0)
    wanted = [t for t in tensors_in(inputs[0]) if t.requires_grad]
    if wanted:
        loss = script.forward(label, 0, inputs)
        for gradient in torch.autograd.grad(loss, wanted, allow_unused=True):
            script.recorder.tensor(f"{label} input gradient", gradient)
        script._note_registered(f"{label} after autograd.grad")
    script.backward(label, script.forward(label, 1))


def _abandoned(script: _Script, label: str) -> None:
    script.forward(label, 0)
    script.backward(label, script.forward(label, 1))


_SCHEDULES: dict[str, Callable[[_Script, str], None]] = {
    "plain": _plain,
    "accumulate": _accumulate,
    "no_sync": _no_sync,
    "no_sync_some": _no_sync_some,
    "keep_params": _keep_params,
    "no_sync_keep_params": _no_sync_keep_params,
    "last_backward": _last_backward,
    "interleaved": _interleaved,
    "reversed": _reversed,
    "summed": _summed,
    "retained": _retained,
    "input_grad": _input_grad,
    "abandoned": _abandoned,
}


# ---- small things -------------------------------------------------------------------------------


def _dtype(name: str | None) -> torch.dtype | None:
    return None if name is None else DTYPES[name]


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def _wrapped(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


def _replace(root: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put ``new`` wherever ``old`` is a child of a module below ``root``."""
    for parent in list(root.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)
