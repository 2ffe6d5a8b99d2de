"""fsdp_c with one gradient per bucket: ``FSDP_C_PARITY_IMPLEMENTATION=in_buckets:fully_shard``."""

from __future__ import annotations

from typing import Any

import fsdp_c


def fully_shard(module: Any, **kwargs: Any) -> Any:
    fsdp_c.fully_shard(module, **kwargs)
    for unit in module if isinstance(module, list) else [module]:
        fsdp_c.set_bucket_cap(unit, 1 / 2**20)
    return module
