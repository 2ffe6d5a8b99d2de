"""fsdp_c with every gradient reduced by itself: ``FSDP_C_PARITY_OURS=in_buckets:fully_shard``."""

from __future__ import annotations

from typing import Any

import fsdp_c


def fully_shard(module: Any, **kwargs: Any) -> Any:
    fsdp_c.fully_shard(module, **kwargs)
    for one in module if isinstance(module, list) else [module]:
        fsdp_c.set_bucket_cap(one, 1 / 2**20)
    return module
