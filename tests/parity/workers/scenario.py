"""The training script that both implementations run: one setting on one rank.

``run_setting`` builds the setting's model from a fixed seed and wraps it with the given
``fully_shard`` (building.py). The script trains three steps and records all observable results:
losses, dtypes and bits of outputs and gradients, parameters and their registration, state dicts,
calls of hooks, and collectives.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from building import (
    SEED,
    Builder,
    FullyShard,
    local_part,
    seed_generator,
)
from fsdp_units import units_of
from meshes import Meshes
from models import Inputs, tensors_in
from record import Recorder, error_entry
from releases import groups_of
from schedules import FUNCTIONS
from setting import DEVICE, DTYPES, Setting
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.tensor import DTensor

STEPS = 3

MakeOptimizer = Callable[[list[Any]], torch.optim.Optimizer]


def run_setting(
    setting: Setting,
    fully_shard: FullyShard,
    meshes: Meshes,
    recorder: Recorder,
    is_under_test: bool,
) -> None:
    """Runs one setting. An exception becomes the last entry of ``recorder``.

    ``is_under_test``: whether ``setting.perturb`` changes this run.
    """
    try:
        Script(setting, fully_shard, meshes, recorder, is_under_test).run()
    except Exception as error:
        recorder.entries.append(error_entry(error))


class Script:
    """One run of one setting. schedules.py calls its public methods."""

    def __init__(
        self,
        setting: Setting,
        fully_shard: FullyShard,
        meshes: Meshes,
        recorder: Recorder,
        is_under_test: bool,
    ) -> None:
        self.setting = setting
        self.builder = Builder(setting, fully_shard, meshes, recorder)
        self.data_rank = meshes.data_rank(setting.mesh)
        self.recorder = recorder
        self.is_under_test = is_under_test

    def run(self) -> None:
        self._start(SEED, meta=self.setting.state == "meta")
        self._record_parameters("initial")
        for step in range(STEPS):
            if self.is_under_test and self.setting.perturb and step == STEPS - 1:
                with torch.no_grad():
                    local_part(next(self.model.parameters())).add_(self.setting.perturb)
            self._change_settings(step)
            self._step(step)
        self._record_state_dict("final")
        if self.setting.state in ("copy", "assign"):
            self._continue_from_state_dict()

    def _start(self, seed: int, meta: bool = False) -> None:
        built = self.builder.build(seed, meta)
        self.case, self.units = built.case, built.units
        self.model: Any = built.case.model
        self.optimizers = self._make_optimizers()

    def _make_optimizers(self) -> list[torch.optim.Optimizer | LocalSteps]:
        """Creates one optimizer per mesh, and one for ignored parameters.

        torch's foreach and fused kernels do not accept parameters of several meshes.
        """
        ignored = [p for p in self.model.parameters() if not isinstance(p, DTensor)]
        groups = [*self._wrapped_by_mesh(), ignored]
        if self.setting.local_step:
            return [LocalSteps(group, self._make_optimizer) for group in groups if group]
        return [self._make_optimizer(group) for group in groups if group]

    def _wrapped_by_mesh(self) -> list[list[Any]]:
        """Returns the wrapped parameters of each device mesh, in the model's order."""
        groups: dict[Any, list[Any]] = {}
        for parameter in self.model.parameters():
            if isinstance(parameter, DTensor):
                groups.setdefault(parameter.device_mesh, []).append(parameter)
        return list(groups.values())

    def _make_optimizer(self, parameters: list[Any]) -> torch.optim.Optimizer:
        kind = self.setting.optimizer
        if kind.startswith("sgd"):
            foreach = kind == "sgd_foreach"
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9, foreach=foreach)
        options: dict[str, Any] = {"adamw": {"foreach": False}, "adamw_foreach": {"foreach": True}}
        return torch.optim.AdamW(parameters, lr=0.01, **options.get(kind, {"fused": True}))

    # ---- one step -----------------------------------------------------------------------------

    def _change_settings(self, step: int) -> None:
        """Applies the changes that the setting makes between steps."""
        setting = self.setting
        if setting.toggle_reshard and step > 0:
            self.model.set_reshard_after_forward(step == 2)
        if setting.toggle_frozen and step > 0:
            # torch ignores settings of parameters that an evaluation left unsharded.
            for module in units_of(self.model):
                module.reshard()
            for name, parameter in self.model.named_parameters():
                if name in self.case.toggled:
                    parameter.requires_grad_(not parameter.requires_grad)
        if setting.reset and step > 0:
            self.model.reset_iter_state()

    def _step(self, step: int) -> None:
        setting, label = self.setting, f"step {step}"
        self.recorder.record("begin", label)
        seed_generator(SEED + step)
        self._unshard_manually(label)
        FUNCTIONS[setting.schedule](self, label)
        self.record_gradients(label)
        if setting.clip:
            for wrapped in self._wrapped_by_mesh():
                norm = nn.utils.clip_grad_norm_(wrapped, 0.1)
                self.recorder.tensor(f"{label} norm", norm)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=setting.zero == "none")
        self._record_parameters(label)
        if setting.optim_event:
            event: Any = getattr(torch, DEVICE).Event()
            event.record()
            self.model.set_post_optim_event(event)
        if setting.evaluate:
            self._evaluate(label, torch.no_grad())
        if setting.inference:
            self._evaluate(label, torch.inference_mode())

    def _unshard_manually(self, label: str) -> None:
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
            self.record_registered(f"{label} unsharded")
            model.reshard()
            self.record_registered(f"{label} resharded")

    def inputs(self, label: str, micro: int) -> Inputs:
        setting = self.setting
        step = int(label.split()[-1])
        generator = torch.Generator().manual_seed(SEED + 101 * self.data_rank + 7 * step + micro)
        args, kwargs = self.case.inputs(generator, DTYPES[setting.inputs or setting.original])
        if setting.schedule == "input_grad" or setting.checkpoint == "reentrant":
            for tensor in tensors_in(args):
                if tensor.is_floating_point():
                    tensor.requires_grad_()
        return args, kwargs

    def forward(self, label: str, micro: int = 0, inputs: Inputs | None = None) -> torch.Tensor:
        """Runs one forward. Returns the sum of the mean squares of outputs that need gradients."""
        args, kwargs = inputs or self.inputs(label, micro)
        outputs = tensors_in(self.model(*args, **kwargs))
        for output in outputs:
            self.recorder.tensor(f"{label}.{micro} output", output)
        self.record_registered(f"{label}.{micro} after forward")
        losses = [output.float().square().mean() for output in outputs if output.requires_grad]
        loss = torch.stack(losses).sum()
        self.recorder.tensor(f"{label}.{micro} loss", loss)
        return loss

    def backward(self, label: str, loss: torch.Tensor, **options: Any) -> None:
        loss.backward(**options)
        self.record_registered(f"{label} after backward")

    def _evaluate(self, label: str, without_gradients: Any) -> None:
        """Runs a forward without gradients after the optimizer step."""
        self.model.eval()
        with without_gradients:
            args, kwargs = self.inputs(label, 9)
            for output in tensors_in(self.model(*args, **kwargs)):
                self.recorder.tensor(f"{label} evaluated", output)
        self.model.train()
        for root in self.case.roots or [self.model]:
            _clear_forward_order(root)

    def _continue_from_state_dict(self) -> None:
        """Loads the state dict into a new model with another seed and trains one step."""
        state = {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in self.model.state_dict().items()
        }
        self._start(SEED + 1)
        result = self.model.load_state_dict(state, assign=self.setting.state == "assign")
        self.recorder.record("loaded", str(result))
        self.optimizers = self._make_optimizers()
        self._record_parameters("loaded")
        self._step(STEPS)
        self._record_state_dict("continued")

    # ---- recording ----------------------------------------------------------------------------

    def _record_parameters(self, label: str) -> None:
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            self.recorder.tensor(f"{label} parameter {name}", parameter)

    def record_registered(self, label: str) -> None:
        """Records the registered parameters: class, dtype, requires_grad and is_leaf."""
        self.recorder.record(
            label,
            [
                (type(p).__name__, str(p.dtype), p.requires_grad, p.is_leaf)
                for p in self.model.parameters()
            ],
        )

    def record_gradients(self, label: str) -> None:
        for name, parameter in self.model.named_parameters():
            self.recorder.tensor(f"{label} gradient {name}", parameter.grad)

    def _record_state_dict(self, label: str) -> None:
        for name, value in self.model.state_dict().items():
            self.recorder.tensor(f"{label} state {name}", value)


class LocalSteps:
    """An optimizer over the local shards of parameters. The first ``step()`` creates it."""

    def __init__(self, parameters: list[Any], make: MakeOptimizer) -> None:
        self.parameters = parameters
        self.make = make
        self.shards: list[Any] = []

    def step(self) -> None:
        if not self.shards:
            self.shards = [
                nn.Parameter(local_part(parameter).detach()) for parameter in self.parameters
            ]
            self.optimizer = self.make(self.shards)
        for parameter, shard in zip(self.parameters, self.shards, strict=True):
            assert shard.data_ptr() == local_part(parameter).data_ptr(), "the shard has moved"
            shard.grad = None if parameter.grad is None else local_part(parameter.grad)
        self.optimizer.step()

    def zero_grad(self, set_to_none: bool) -> None:
        for parameter in self.parameters:
            if set_to_none:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.zero_()


def _clear_forward_order(root: Any) -> None:
    """Clears the entries that a forward without gradients left in torch's prefetch order.

    torch never clears them (tests/TORCH_BUGS.md, B6), and therefore gathers a group without need
    in the next backward. With this function its collectives are those of training only.
    """
    state = root._get_fsdp_state()
    if type(state) is FSDPState:
        state._comm_ctx.post_forward_order.clear()
        for fsdp_state in state._state_ctx.all_states:
            for group in groups_of(fsdp_state):
                group._post_forward_indices.clear()
