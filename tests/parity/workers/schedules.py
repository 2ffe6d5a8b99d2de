"""Runs the microbatches of a step: one function for each schedule of the grid.

``SCHEDULES`` and ``WIDE_SCHEDULES`` of setting.py describe the schedules. A function calls the
methods of ``Script`` (scenario.py), which record the results of a microbatch. ``label`` names the
step in the records.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from models import tensors_in
from releases import groups_of

if TYPE_CHECKING:
    from scenario import Script


def _plain(script: Script, label: str) -> None:
    script.backward(label, script.forward(label))


def _accumulate(script: Script, label: str) -> None:
    for micro in range(2):
        script.backward(label, script.forward(label, micro))


def _no_sync(script: Script, label: str) -> None:
    for micro in range(3):
        script.model.set_requires_gradient_sync(micro == 2)
        script.backward(label, script.forward(label, micro))
        if micro < 2:
            script.record_gradients(label)


def _no_sync_some(script: Script, label: str) -> None:
    for micro in range(3):
        for unit in script.units:
            unit.set_requires_gradient_sync(micro == 2, recurse=False)
        script.backward(label, script.forward(label, micro))


def _keep_params(script: Script, label: str) -> None:
    for micro in range(2):
        script.model.set_reshard_after_backward(micro == 1)
        script.backward(label, script.forward(label, micro))


def _no_sync_keep_params(script: Script, label: str) -> None:
    for micro in range(3):
        last = micro == 2
        script.model.set_is_last_backward(last)
        script.model.set_reshard_after_backward(last)
        script.model.set_requires_gradient_sync(last)
        script.backward(label, script.forward(label, micro))


def _last_backward(script: Script, label: str) -> None:
    for micro in range(2):
        script.model.set_is_last_backward(micro == 1)
        script.backward(label, script.forward(label, micro))


def _interleaved(script: Script, label: str) -> None:
    losses = [script.forward(label, micro) for micro in range(2)]
    for loss in losses:
        script.backward(label, loss)


def _reversed(script: Script, label: str) -> None:
    losses = [script.forward(label, micro) for micro in range(2)]
    for loss in reversed(losses):
        script.backward(label, loss)


def _summed(script: Script, label: str) -> None:
    losses = [script.forward(label, micro) for micro in range(2)]
    script.backward(label, torch.stack(losses).sum())


def _retained(script: Script, label: str) -> None:
    loss = script.forward(label)
    script.backward(label, loss, retain_graph=True)
    script.backward(label, loss)


def _input_grad(script: Script, label: str) -> None:
    inputs = script.inputs(label, 0)
    inputs_with_grad = [t for t in tensors_in(inputs[0]) if t.requires_grad]
    if inputs_with_grad:
        loss = script.forward(label, 0, inputs)
        for gradient in torch.autograd.grad(loss, inputs_with_grad, allow_unused=True):
            script.recorder.tensor(f"{label} input gradient", gradient)
        script.record_registered(f"{label} after autograd.grad")
    script.backward(label, script.forward(label, 1))


def _abandoned(script: Script, label: str) -> None:
    script.forward(label, 0)
    script.backward(label, script.forward(label, 1))


def _no_all_reduce(script: Script, label: str) -> None:
    for micro in range(3):
        script.model.set_requires_all_reduce(micro == 2)
        script.backward(label, script.forward(label, micro))
        script.record_gradients(label)


def _no_all_reduce_some(script: Script, label: str) -> None:
    for micro in range(3):
        for unit in script.units:
            unit.set_requires_all_reduce(micro == 2, recurse=False)
        script.backward(label, script.forward(label, micro))


def _mixed_sync(script: Script, label: str) -> None:
    for micro in range(3):
        script.model.set_requires_gradient_sync(micro > 0)
        script.model.set_requires_all_reduce(micro == 2)
        script.backward(label, script.forward(label, micro))


def _pipeline(script: Script, label: str) -> None:
    model = script.model
    model.set_is_last_backward(False)
    model.set_reshard_after_backward(False)
    model.set_requires_gradient_sync(False)
    losses = [script.forward(label, micro) for micro in range(2)]
    for loss in losses:
        script.backward(label, loss)
    # torch's pipeline stage makes the following calls after the last backward of a step.
    model.set_is_last_backward(True)
    model.set_reshard_after_backward(True)
    model.set_requires_gradient_sync(True)
    root: Any = model._get_fsdp_state()
    for state in root._state_ctx.all_states:
        for group in groups_of(state):
            group.post_backward()
    root._root_post_backward_final_callback()


FUNCTIONS: dict[str, Callable[[Script, str], None]] = {
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
    "no_all_reduce": _no_all_reduce,
    "no_all_reduce_some": _no_all_reduce_some,
    "mixed_sync": _mixed_sync,
    "pipeline": _pipeline,
}
