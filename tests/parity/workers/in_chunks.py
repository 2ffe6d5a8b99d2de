"""fsdp_c without a minimum size of parameters that have their own chunk.

``FSDP_C_PARITY_IMPLEMENTATION=in_chunks:fully_shard`` selects it.
"""

from __future__ import annotations

from fsdp_c import _C, fully_shard

_C._testing.set_min_owned_chunk_bytes(1)

__all__ = ["fully_shard"]
