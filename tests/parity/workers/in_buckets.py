"""fsdp_c with one gradient per bucket: ``FSDP_C_PARITY_IMPLEMENTATION=in_buckets:fully_shard``."""

from __future__ import annotations

from typing import Any

import fsdp_c

ONE_BYTE = 1 / 2**20
"""In MiB. With this limit each gradient fills a bucket."""


def fully_shard(module: Any, **kwargs: Any) -> Any:
    fsdp_c.fully_shard(module, **kwargs)
    for unit in module if isinstance(module, list) else [module]:
        fsdp_c.set_bucket_cap(unit, ONE_BYTE)
    return module
