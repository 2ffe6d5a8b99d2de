"""``set_guard``: switches the detection of ranks that diverge."""

from __future__ import annotations

from typing import Literal

from ._runtime import plan_hash

GuardMode = Literal["on", "off"]


def set_guard(mode: GuardMode) -> None:
    """Switches the comparison of models and collectives between ranks.

    The function applies to models whose first forward comes later. It replaces the environment
    variable ``FSDP_C_GUARD``. Call it with the same argument on all ranks: if one rank has
    ``"off"``, the other ranks do not compare with that rank.

    Args:
        mode: ``"on"``, the default: before the first collective of a model, the ranks of each
            process group compare their models. Over shared memory and over gloo on the CPU they
            also compare each collective, over NCCL some seconds later. A difference raises
            ``RuntimeError`` on every rank.
            ``"off"``: no comparison, as in torch.

    Raises:
        ValueError: ``mode`` is another value.
    """
    if mode not in ("on", "off"):
        raise ValueError(f'mode should be "on" or "off", not {mode!r}')
    plan_hash.set_enabled(mode == "on")
