"""Creates the model that a command line names, on the meta device.

The name is ``package.module:name`` of a class or function, or a configuration of transformers:
``hf:PATH`` or ``hf:Class:PATH``. ``PATH`` is a file, its folder, or JSON text in its place.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn

PREFIX = "hf:"
USAGE = "hf:path/config.json or hf:Class:JSON for a configuration of transformers"


def make_model(name: str) -> nn.Module:
    """Returns the model on the meta device.

    Raises:
        ValueError: The name, the class or the configuration is invalid.
        ImportError: The module cannot be imported, or transformers is not installed.
        OSError: The configuration cannot be read.
    """
    if name.startswith(PREFIX):
        make = _find_transformers_class(name.removeprefix(PREFIX))
    else:
        make, name = _find_callable(name), f"{name}()"
    try:
        with torch.device("meta"):
            model = make()
    except Exception as error:
        raise ValueError(f"{name} raises {type(error).__name__}: {error}") from error
    if not isinstance(model, nn.Module):
        raise ValueError(f"{name} makes a {type(model).__name__}, not a module")
    return model


def _find_callable(name: str) -> Callable[[], Any]:
    module, _, attribute = name.partition(":")
    if not attribute or module.startswith("."):
        raise ValueError(f"the model is package.module:name, or {USAGE}, not {name!r}")
    try:
        make = getattr(importlib.import_module(module), attribute, None)
    except ImportError:
        raise
    except Exception as error:
        raise ValueError(
            f"the import of {module} raises {type(error).__name__}: {error}"
        ) from error
    if not callable(make):
        raise ValueError(f"{module} has no function or class '{attribute}'")
    found: Callable[[], Any] = make
    return found


def _find_transformers_class(name: str) -> Callable[[], Any]:
    """Returns a function that makes the model. ``name`` is ``PATH`` or ``Class:PATH``."""
    try:
        import transformers  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise ImportError(f"{PREFIX} needs transformers: pip install transformers") from None
    class_name, separator, text = name.partition(":")
    if not separator or "/" in class_name or class_name.startswith("{"):
        class_name, text = "", name
    settings = _read_settings(text)
    class_name = class_name or next(iter(settings.get("architectures") or ()), "")
    model_class = getattr(transformers, class_name, None)
    if class_name and model_class is None:
        raise ValueError(f"transformers has no class '{class_name}'")
    if model_class is not None:
        return lambda: model_class(model_class.config_class.from_dict(settings))
    if "model_type" not in settings:
        raise ValueError(f"{text} has no 'architectures' and no 'model_type': use hf:Class:{text}")
    config = transformers.AutoConfig.for_model(**settings)
    return lambda: transformers.AutoModel.from_config(config)


def _read_settings(text: str) -> dict[str, Any]:
    """Returns a configuration, given the path of its file or folder, or JSON text."""
    path = Path(text)
    if not text.startswith("{"):
        text = (path / "config.json" if path.is_dir() else path).read_text()
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(settings, dict):
        raise ValueError(f"{path} is not a JSON object with a configuration")
    return settings
