"""Counts every ``optimizer.step()`` as a write to the shards of its parameters.

DTensor's operations write shards without incrementing version counters. Without the count, the core
would reuse a gather from before the step, for example of an evaluation, with stale values.
"""

from __future__ import annotations

from torch.optim.optimizer import register_optimizer_step_post_hook

import fsdp_c._C as _C

from . import patches


class _CountStep:
    """Calls ``_C.bump_shard_versions`` without a Python frame.

    Dynamo prints a warning if a compiled step calls the C function directly. An object of this
    class is called without a warning.
    """

    __call__ = staticmethod(_C.bump_shard_versions)
    _torchdynamo_disable = True


patches.apply_with_first_model(
    "optimizer step post hook: bump_shard_versions",
    lambda: patches.add_hook(register_optimizer_step_post_hook, _CountStep()),
)
