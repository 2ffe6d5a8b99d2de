"""``state_dict`` detaches sharded parameters without asking the dispatcher what a detach does.

For a model of small parameters that is most of what ``state_dict`` takes. torch has no hook there:
its method is wrapped when the first unit is made. Where anything of a module is special, or
somebody looks at operators, it runs as it is.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn as nn

import fsdp_c._C as _C


@functools.cache
def detach_quickly() -> None:
    """From now on modules save their sharded parameters by ``_C.save_parameters``."""
    save = nn.Module._save_to_state_dict

    @functools.wraps(save)
    def save_to_state_dict(
        self: nn.Module, destination: dict[str, Any], prefix: str, keep_vars: bool
    ) -> None:
        if torch.compiler.is_compiling() or keep_vars or _is_special(self) or _is_watched():
            save(self, destination, prefix, keep_vars)
        else:
            _C.save_parameters(self._parameters, destination, prefix)

    nn.Module._save_to_state_dict = save_to_state_dict  # type: ignore[method-assign]


def _is_special(module: nn.Module) -> bool:
    """Whether ``module`` saves anything but parameters."""
    return bool(module._buffers) or type(module).get_extra_state is not nn.Module.get_extra_state


def _is_watched() -> bool:
    """Whether anything but plain execution happens to operators."""
    return (
        torch._C._len_torch_dispatch_stack() > 0
        or torch._C._len_torch_function_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch.is_inference_mode_enabled()
        or torch._C._get_tracing_state() is not None
    )
