"""Methods of torch 2.15's ``FSDPModule``, for our states and under any release.

``compat.complete_class`` puts them on the class that ``fully_shard`` has made of a module's own;
torch's ``FSDPModule`` itself is left alone. Such a class may be that of modules which torch's own
function has sharded, too: where torch has the method, it is what they get.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch.distributed.fsdp as torch_fsdp
from torch.distributed.fsdp import FSDPModule

from .state import State
from .units import sharded_modules

_Handle: Any = getattr(torch_fsdp, "GradientReductionHandle", object)


class GradientReductionHandle(_Handle):
    """The reductions that ``finalize_backward(async_op=True)`` has started."""

    def __init__(self, state: State) -> None:
        self._state: State | None = state

    def wait(self) -> None:
        """Makes the sharded gradients ready, for the current stream (on the CPU: for the caller).

        To be called before the optimizer's step. A second call does nothing, and neither does one
        after ``reset_iter_state()``.
        """
        state, self._state = self._state, None
        if state is not None and state._state_ctx.reduction_pending:
            state._complete_finalization()


def _state_of(module: Any, method: str) -> State:
    state = module._get_fsdp_state()
    if not isinstance(state, State):
        raise RuntimeError(
            f"{method} needs a module that fsdp_c's fully_shard was applied to; torch "
            "has it from release 2.15 on"
        )
    return state


def _root_state(module: Any, method: str) -> State:
    state = _state_of(module, method)
    if state._is_root is False:
        raise RuntimeError(f"{method} must be called on the root FSDP module")
    if state._state_ctx.post_backward_final_callback_queued:
        raise RuntimeError(f"{method} cannot be called while a backward is running")
    if state._state_ctx.reduction_pending:
        raise RuntimeError(
            f"{method}: gradients are still being reduced; call wait() of the "
            "GradientReductionHandle first"
        )
    return state


def set_keep_unsharded_storage(self: Any, keep: bool, *, recurse: bool = True) -> None:
    """Sets whether the memory of unsharded parameters stays when they are resharded.

    Their ``data_ptr()`` is then the same in all steps, as captured graphs of kernels need it, and
    each unshard writes to the same addresses. The price is the memory of all unsharded parameters.
    Switched off, what is not in use is freed at once.

    Args:
        keep: Whether the memory stays. It is allocated by the next unshard.
        recurse: Whether to set it for all FSDP modules below, too.
    """
    modules = sharded_modules(self) if recurse else [self]
    states = [_state_of(module, "set_keep_unsharded_storage") for module in modules]
    for state in states:
        for group in state._fsdp_param_groups:
            group._keep_unsharded_storage = keep


def set_manual_backward_finalization(self: Any, enabled: bool) -> None:
    """Sets whether the caller finishes backwards with ``finalize_backward``; for the root.

    Backwards then reduce and reshard as they are set to, but their end waits for nothing. It stays
    set for the steps to come.

    Raises:
        RuntimeError: this is not the root, a backward is running, or reductions were started that
            nobody has waited for.
    """
    state = _root_state(self, "set_manual_backward_finalization")
    state._state_ctx.manual_finalization = bool(enabled)


def finalize_backward(self: Any, *, async_op: bool = False) -> GradientReductionHandle | None:
    """Reduces the gradients that backwards have left (those without gradient synchronisation),
    and waits for all reductions; for the root, after the last microbatch.

    What each unit is set to now decides: those with ``set_requires_gradient_sync(False)`` keep
    their gradients. Gradients that were reduced already are not reduced again.

    Args:
        async_op: Return without waiting. The handle must be waited for before the optimizer's step
            and before the next finalization.

    Returns:
        A :class:`GradientReductionHandle` with ``async_op``, else ``None``.

    Raises:
        RuntimeError: manual finalization is not enabled, this is not the root, a backward is
            running, reductions were started that nobody has waited for, or a unit is still set to
            reduce without all-reducing (``set_requires_all_reduce(False)``).
    """
    state = _root_state(self, "finalize_backward")
    if not state._state_ctx.manual_finalization:
        raise RuntimeError(
            "finalize_backward requires manual backward finalization: call "
            "set_manual_backward_finalization(True) before forward"
        )
    for one in state._state_ctx.all_states:
        for group in one._fsdp_param_groups:
            if group._is_hsdp and group.reduce_grads and not group.all_reduce_grads:
                raise RuntimeError(
                    "finalize_backward cannot leave partial reductions (of "
                    f"'{group._module_fqn}'): call set_requires_all_reduce(True) first"
                )
    state._start_finalization()
    handle = GradientReductionHandle(state)
    if async_op:
        return handle
    handle.wait()
    return None


def _or_torchs(method: Callable[..., Any]) -> Callable[..., Any]:
    """The method; for modules of torch's own function torch's, where it has one."""
    theirs = getattr(FSDPModule, method.__name__, None)
    if theirs is None:
        return method

    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        chosen = method if isinstance(self._get_fsdp_state(), State) else theirs
        return chosen(self, *args, **kwargs)

    return run


METHODS = {
    method.__name__: _or_torchs(method)
    for method in (set_keep_unsharded_storage, set_manual_backward_finalization, finalize_backward)
}
