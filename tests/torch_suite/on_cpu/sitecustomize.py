"""Lets torch's tests for several GPUs run on the CPU over gloo.

Python imports this module at startup if PYTHONPATH contains this folder. The module changes torch's
test utilities after their import:

- No test is skipped because GPUs are missing.
- ``device_count()`` returns 4, and a test has at most four ranks.
- Ranks come from a fork server that has imported torch.
- DistributedDataParallel ignores device indices.

If fsdp_c is not installed, torch finds no entry point, so this module calls ``autoload()``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

DEVICES = 4


def _make_identity_decorator(*args: Any, **kwargs: Any) -> Callable[[Any], Any]:
    """Replaces a function that returns a decorator which skips tests."""
    return lambda function: function


def _adapt_common_distributed(module: Any) -> None:
    import torch

    import fsdp_c_autoload
    from fsdp_c_autoload.redirect import is_redirecting

    if not is_redirecting():
        fsdp_c_autoload.autoload()
    torch.cpu.device_count = torch.accelerator.device_count = lambda: DEVICES
    module.skip_if_lt_x_gpu = _make_identity_decorator
    module.skip_if_no_gpu = _make_identity_decorator()
    module.requires_nccl = _make_identity_decorator

    def start_ranks(self: Any) -> None:
        context = torch.multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch", "torch.testing._internal.common_fsdp"])
        self._start_processes(context.Process)

    module.MultiProcessTestCase._spawn_processes = start_ranks


def _adapt_common_fsdp(module: Any) -> None:
    import torch

    module.DEVICE_COUNT = module.FSDPTestContinuous.world_size = DEVICES

    def limit_ranks(cls: Any) -> None:
        ranks = cls.__dict__.get("world_size")
        if isinstance(ranks, property):
            cls.world_size = property(lambda self: min(ranks.__get__(self), DEVICES))

    module.FSDPTest.__init_subclass__ = classmethod(limit_ranks)
    original = torch.nn.parallel.DistributedDataParallel.__init__

    def init_without_device_ids(
        self: Any, module: Any, device_ids: Any = None, output_device: Any = None, **kwargs: Any
    ) -> None:
        original(self, module, **kwargs)

    torch.nn.parallel.DistributedDataParallel.__init__ = init_without_device_ids


ADAPTED = {
    "torch.testing._internal.common_distributed": _adapt_common_distributed,
    "torch.testing._internal.common_fsdp": _adapt_common_fsdp,
}


class AdaptingFinder(MetaPathFinder):
    """Finds the modules of ``ADAPTED``, and calls the function in ``ADAPTED`` after the import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        spec = PathFinder.find_spec(name, path) if name in ADAPTED else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def execute_and_adapt(module: ModuleType) -> None:
            execute(module)
            ADAPTED[name](module)

        spec.loader.exec_module = execute_and_adapt  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, AdaptingFinder())
