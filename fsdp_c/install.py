"""``install`` and ``uninstall``: torch's own ``fully_shard`` and friends lead to fsdp_c.

A job imports ``torch.distributed.fsdp`` and need not know of fsdp_c. There are three ways to
switch it over: ``FSDP_C=1`` in its environment (where fsdp_c is installed with pip), ``python -m
fsdp_c script.py``, or a call of :func:`install`. All three do the same; see ``fsdp_c_autoload``.
"""

from __future__ import annotations

import fsdp_c_autoload


def install() -> None:
    """Makes ``torch.distributed.fsdp.fully_shard`` run fsdp_c's, for whoever holds it.

    The function objects stay the same, so code that imported them earlier is switched over too;
    ``register_fsdp_forward_method``, ``share_comm_ctx`` and ``replicate`` follow where fsdp_c has
    its own. Modules that were sharded before keep their implementation. A second call does nothing.

    One INFO line on the logger ``torch.distributed.fsdp.fully_shard`` names what was replaced.
    """
    fsdp_c_autoload.redirect_all()
    fsdp_c_autoload.announce()


def uninstall() -> None:
    """Undoes :func:`install`, ``FSDP_C=1`` and ``python -m fsdp_c``: all is as torch made it.

    Modules that fsdp_c has sharded stay as they are and go on working.
    """
    fsdp_c_autoload.restore_all()
