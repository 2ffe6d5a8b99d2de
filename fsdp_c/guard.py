"""``set_guard``: switches the detection of ranks that diverge and of corrupted data."""

from __future__ import annotations

from typing import get_args

from ._runtime import plan_hash
from ._runtime.plan_hash import GuardMode


def set_guard(mode: GuardMode) -> None:
    """Switches the comparison of models and collectives between ranks.

    The function applies to models whose first forward comes later. It replaces the environment
    variable ``FSDP_C_GUARD``. Call it with the same argument on all ranks: if one rank has
    ``"off"``, the other ranks do not compare with that rank. If some ranks have ``"on"`` and others
    ``"hash"``, the comparison of their models raises. The first model over a process group decides
    whether later models over it are compared.

    Args:
        mode: ``"on"``, the default: before the first collective of a model, the ranks of each
            process group compare their models. Over shared memory and over gloo on the CPU they
            also compare each collective, over NCCL some seconds later. A difference raises
            ``RuntimeError`` on every rank.
            ``"hash"``: the same, and the ranks compare 64-bit checksums of gathered parameters
            and of all-reduced gradients. They detect data that changed in memory or on its way
            between ranks. A difference raises ``RuntimeError`` on every rank: on the CPU at the
            end of the backward, before the optimizer runs, on CUDA with NCCL some seconds later.
            ``"off"``: no comparison, as in torch.

    Raises:
        ValueError: ``mode`` is another value.
    """
    if mode not in get_args(GuardMode):
        raise ValueError(f'mode should be "on", "hash" or "off", not {mode!r}')
    plan_hash.set_mode(mode)
