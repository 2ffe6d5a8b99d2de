"""Compares the names and shapes of the source with those of the model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.nn.modules.module import _IncompatibleKeys

from .source import Header, LoadingRanks, is_extra_state


def match_names(
    model: nn.Module, targets: dict[str, Any], header: Header, strict: bool, ranks: LoadingRanks
) -> _IncompatibleKeys:
    """Returns missing and unexpected names; raises the errors of ``load_state_dict``."""
    source_names = dict.fromkeys([*header.tensors, *header.objects, *header.unsent])
    tied = {  # one name of a tied parameter is sufficient
        id(value)
        for name, value in targets.items()
        if name in source_names and isinstance(value, torch.Tensor) and not is_extra_state(name)
    }
    missing = [
        name
        for name, value in targets.items()
        if name not in source_names and (is_extra_state(name) or id(value) not in tied)
    ]
    unexpected = [name for name in source_names if name not in targets]
    problems = []
    if strict and missing:
        names = ", ".join(f'"{name}"' for name in missing)
        problems.append(f"Missing key(s) in state_dict: {names}.")
    if strict and unexpected:
        names = ", ".join(f'"{name}"' for name in unexpected)
        problems.append(f"Unexpected key(s) in state_dict: {names}.")
    for name, (_, shape) in header.tensors.items():
        value = targets.get(name)
        if isinstance(value, torch.Tensor) and value.shape != shape:
            problems.append(
                f"size mismatch for {name}: copying a param with shape {shape} from checkpoint, "
                f"the shape in current model is {value.shape}."
            )
        elif name in targets and not isinstance(value, torch.Tensor):
            problems.append(f"{name}: a tensor in the checkpoint, none in the model.")
    for name in header.objects:
        if isinstance(targets.get(name), torch.Tensor) and not is_extra_state(name):
            problems.append(f"{name}: a tensor in the model, none in the checkpoint.")
    for name in header.unsent:
        if name in targets:
            problems.append(
                f"{name}: rank {ranks.src} does not send this object, because its model has no "
                "such entry."
            )
    failure = None
    if problems:
        lines = "\n\t".join(problems)
        name = type(model).__name__
        failure = RuntimeError(f"Error(s) in loading state_dict for {name}:\n\t{lines}")
    ranks.raise_if_any_failed(failure, "refused; nothing was loaded")
    return _IncompatibleKeys(missing, unexpected)
