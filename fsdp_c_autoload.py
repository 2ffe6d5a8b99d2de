"""The switch ``FSDP_C=1``, which must run without importing ``fsdp_c`` or torch.

torch calls :func:`autoload` at the end of ``import torch`` (entry point group ``torch.backends``).
With ``FSDP_C`` unset, empty or ``0`` that is all that happens. Otherwise an import hook waits for
the torch modules of :data:`TARGETS` and redirects their functions to fsdp_c, which is imported by
the first call: a process that never shards anything pays for no import, and none comes too early.

That first call goes by name (``importlib.import_module("fsdp_c")``), the one step up from here: a
plug-in must not import what it leads to.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import logging
import os
import sys
from collections.abc import Callable, Sequence
from types import FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fsdp_c_redirect import Redirection

ENVIRONMENT_SWITCH = "FSDP_C"

TARGETS: dict[str, tuple[str, ...]] = {
    "torch.distributed.fsdp._fully_shard._fully_shard": (
        "fully_shard",
        "register_fsdp_forward_method",
        "share_comm_ctx",
    ),
    "torch.distributed._composable.replicate_with_fsdp": ("replicate",),
}
"""Module -> functions that fsdp_c has under the same name (those it does not have stay torch's)."""

logger = logging.getLogger("torch.distributed.fsdp.fully_shard")

# ---- what is redirected now ----------------------------------------------------------------------

_active: dict[str, Redirection] = {}  # "module.name" of each redirected function
_wanted = False
_announced = False


def redirect_all() -> None:
    """Redirects the functions of all targets, of modules not imported yet as soon as they are."""
    global _wanted
    if not _wanted:
        _wanted = True
        sys.meta_path.insert(0, _finder)
    for module_name in TARGETS:
        module = sys.modules.get(module_name)
        if module is not None:
            _redirect_module(module)


def restore_all() -> None:
    """Undoes :func:`redirect_all`."""
    global _wanted, _announced
    if _wanted:
        sys.meta_path.remove(_finder)
    for redirection in _active.values():
        redirection.undo()
    _active.clear()
    _wanted = _announced = False


def announce() -> None:
    """Logs, once, what is replaced. Imports fsdp_c."""
    global _announced
    if _announced:
        return
    _announced = True
    version = importlib.import_module("fsdp_c").__version__  # may import more of the targets
    names = [key for key, redirection in _active.items() if _ours(redirection) is not None]
    logger.info("fsdp_c %s replaces %s", version, ", ".join(names) or "nothing yet")


def _redirect_module(module: ModuleType) -> None:
    from fsdp_c_redirect import Redirection  # not before: most processes redirect nothing

    for name in TARGETS[module.__name__]:
        key = f"{module.__name__}.{name}"
        function = getattr(module, name, None)
        if isinstance(function, FunctionType) and key not in _active:
            _active[key] = Redirection(function, _target(key))


def _ours(redirection: Redirection) -> Callable[..., Any] | None:
    """fsdp_c's function of the same name; None where it has none, or hands torch's on."""
    function = redirection.function
    ours = getattr(importlib.import_module("fsdp_c"), function.__name__, function)
    return None if ours is function else ours


def _target(key: str) -> Callable[..., Any]:
    def call_ours(*args: Any, **kwargs: Any) -> Any:
        redirection = _active[key]
        announce()
        return (_ours(redirection) or redirection.original)(*args, **kwargs)

    return call_ours


class _Finder(importlib.abc.MetaPathFinder):
    """Sees the target modules go by and redirects them once they have been executed."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in TARGETS:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


class _Loader(importlib.abc.Loader):
    """A module's own loader, and then the redirection."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:  # get_source, is_package and the like
        return getattr(self._loader, name)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader  # what everybody else should see
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        if _wanted:
            _redirect_module(module)


_finder = _Finder()


def autoload() -> None:
    """What torch calls at the end of ``import torch``."""
    if os.environ.get(ENVIRONMENT_SWITCH, "") not in ("", "0"):
        redirect_all()
