"""fsdp_c with torch's foreach operations instead of its own kernels, as on unsupported devices:
``FSDP_C_PARITY_IMPLEMENTATION=without_kernels:fully_shard``."""

from __future__ import annotations

from fsdp_c import _C, fully_shard

_C._testing.hide_kernels(True)

__all__ = ["fully_shard"]
