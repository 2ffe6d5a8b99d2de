"""Methods of torch 2.15's ``FSDPModule``, for fsdp_c's states on all releases.

``module_methods.py`` adds the methods to the class that ``fully_shard`` makes for a module. torch's
``FSDPModule`` is unchanged. Modules that torch's own ``fully_shard`` sharded may share the class.
Such modules use torch's method, if torch has it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed.fsdp as torch_fsdp
from torch.distributed.fsdp import FSDPModule

from .fsdp_units import list_sharded_modules
from .state import State

_Handle: Any = getattr(torch_fsdp, "GradientReductionHandle", object)


class GradientReductionHandle(_Handle):
    """The reductions that ``finalize_backward(async_op=True)`` has started."""

    def __init__(self, state: State | None) -> None:
        self._state = state
        if state is not None:
            state._reduction_handle = self

    def wait(self) -> None:
        """Waits for the sharded gradients, on the current stream (on the CPU: in the caller).

        Call ``wait`` before the optimizer's step. A second call has no effect.

        Raises:
            RuntimeError: ``reset_iter_state()`` has dropped the reductions.
        """
        state = self._state
        if state is None:
            return
        if not state._state_ctx.reduction_pending or state._reduction_handle is not self:
            raise RuntimeError(
                "This gradient reduction handle was invalidated: reset_iter_state() has dropped "
                "its gradients"
            )
        state._complete_finalization()
        self._state = state._reduction_handle = None


def require_fsdp_c_state(module: Any, method: str, release: str = "2.15") -> State:
    """Returns the state of a module, which fsdp_c must have sharded.

    Raises:
        RuntimeError: torch's ``fully_shard`` was applied to the module.
    """
    state = module._get_fsdp_state()
    if not isinstance(state, State):
        raise RuntimeError(
            f"{method} needs a module that fsdp_c's fully_shard was applied to; torch "
            f"has it from release {release} on"
        )
    return state


def _get_root_state(module: Any, method: str) -> State:
    """Returns the state of ``module``. Raises torch's exception if another state is its root."""
    state = require_fsdp_c_state(module, method)
    if state._is_root is False:
        raise RuntimeError(f"{method} must be called on the root {state._state_name} module")
    return state


def set_keep_unsharded_storage(self: Any, keep: bool, *, recurse: bool = True) -> None:
    """Sets whether the memory of unsharded parameters is kept when they are resharded.

    If ``keep`` is set, the ``data_ptr()`` of unsharded parameters is the same in all steps, as CUDA
    graphs require. The cost is the memory of all unsharded parameters. ``False`` immediately frees
    memory that is not in use.

    Args:
        keep: Whether to keep the memory, which the next unshard allocates.
        recurse: Whether to change the setting of all FSDP modules below, too.

    Raises:
        RuntimeError: A module was sharded by torch's ``fully_shard``.
    """
    modules = list_sharded_modules(self) if recurse else [self]
    states = [require_fsdp_c_state(module, "set_keep_unsharded_storage") for module in modules]
    for state in states:
        for group in state._fsdp_param_groups:
            group._keep_unsharded_storage = keep


def set_manual_backward_finalization(self: Any, enabled: bool) -> None:
    """Sets whether the caller finishes backwards with ``finalize_backward``. Call it on the root.

    Backwards then reduce and reshard as configured, but their end does not wait for reductions. The
    setting applies to all later steps.

    Raises:
        RuntimeError: The module is not the root, a backward is running, or a
            :class:`GradientReductionHandle` was not waited for.
    """
    context = _get_root_state(self, "set_manual_backward_finalization")._state_ctx
    if bool(enabled) != context.manual_finalization:
        for is_active, period in (
            (context.post_backward_final_callback_queued, "during backward"),
            (context.reduction_pending, "after backward starts"),
        ):
            if is_active:
                raise RuntimeError(
                    f"set_manual_backward_finalization cannot change mode {period}: call "
                    "finalize_backward() first, and wait() of its handle, or reset_iter_state() "
                    "after an exception"
                )
    context.manual_finalization = bool(enabled)


def finalize_backward(self: Any, *, async_op: bool = False) -> GradientReductionHandle | None:
    """Reduces the gradients of backwards without synchronization, and waits for all reductions.

    Call it on the root module, after the last microbatch. Before the first forward the call has no
    effect. The current settings of each unit apply: units with
    ``set_requires_gradient_sync(False)`` keep their gradients. Reduced gradients are not
    reduced again.

    Args:
        async_op: Whether to return without waiting. The caller must wait for the handle before the
            optimizer's step and before the next finalization.

    Returns:
        A :class:`GradientReductionHandle` with ``async_op``, else ``None``.

    Raises:
        RuntimeError: Manual finalization is not enabled, or the module is not the root. A backward
            is running, or a handle was not waited for. A unit reduces without all-reducing
            (``set_requires_all_reduce(False)``).
    """
    state = _get_root_state(self, "finalize_backward")
    context, name = state._state_ctx, state._state_name
    if state._is_root is None:
        return GradientReductionHandle(None) if async_op else None
    if context.reduction_pending:
        raise RuntimeError(
            "The previous gradient reduction must be waited on before finalizing backward again: "
            "call wait() of its GradientReductionHandle, or reset_iter_state() if an exception "
            "interrupted finalize_backward()"
        )
    if not context.manual_finalization:
        raise RuntimeError(
            f"{name} finalize_backward requires manual backward finalization. Call "
            "set_manual_backward_finalization(True) before forward"
        )
    if context.post_backward_final_callback_queued:
        raise RuntimeError(f"{name} finalize_backward must be called after backward completes")
    for member in state._state_ctx.all_states:
        for group in member._fsdp_param_groups:
            if group._is_hsdp and group.reduce_grads and not group.all_reduce_grads:
                raise RuntimeError(
                    f"{name} manual backward finalization requires all-reduce for parameter group "
                    f"{group._module_fqn or '<root>'!r}. Call set_requires_all_reduce(True) before "
                    "finalization"
                )
    state._start_finalization()
    handle = GradientReductionHandle(state)
    if async_op:
        return handle
    handle.wait()
    return None


def _dispatch_by_state(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps ``method`` to call torch's method, if any, on modules that torch sharded."""
    torch_method = getattr(FSDPModule, method.__name__, None)
    if torch_method is None:
        return method

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        implementation = method if isinstance(self._get_fsdp_state(), State) else torch_method
        return implementation(self, *args, **kwargs)

    return run


METHODS = {
    method.__name__: _dispatch_by_state(method)
    for method in (set_keep_unsharded_storage, set_manual_backward_finalization, finalize_backward)
}
