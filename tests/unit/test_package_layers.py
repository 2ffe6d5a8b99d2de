"""Modules of fsdp_c: fsdp_c/README.md lists all of them, and imports point to lower layers."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import build_torch

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "fsdp_c"
TOP_LEVEL = {path.stem for path in ROOT.glob("fsdp_c_*.py")}
"""Top-level modules outside the package, which work without it."""


def listed_files() -> list[str]:
    """Returns the files listed in fsdp_c/README.md, from the highest layer to the lowest."""
    return re.findall(r"^\| `([\w/]+\.py)` \|", (PACKAGE / "README.md").read_text(), re.M)


def source_files() -> list[Path]:
    return [*PACKAGE.rglob("*.py"), *(ROOT / f"{name}.py" for name in TOP_LEVEL)]


def listed_name(path: Path) -> str:
    """Returns the name of a file in the list: its path in the package, or its own name."""
    inside = path.is_relative_to(PACKAGE)
    return str(path.relative_to(PACKAGE)) if inside else path.name


def imported_modules(node: ast.AST, package: str) -> Iterator[str]:
    """Yields the dotted names that an import statement may load."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = ".".join(([package] if node.level else []) + ([node.module] if node.module else []))
        yield from (f"{base}.{a.name}" for a in node.names)


def imported_files(text: str) -> set[str]:
    """Returns the files of fsdp_c that a source text imports, also in functions and for types."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        for name in imported_modules(node, PACKAGE.name):
            top, _, inner = name.partition(".")
            if top in TOP_LEVEL:
                found.add(f"{top}.py")
            elif top == PACKAGE.name and not inner.startswith("_C"):
                found.add(file_of(inner))
    return found


def file_of(module: str) -> str:
    """Returns the file of the package that defines a dotted name below ``fsdp_c``."""
    parts = module.split(".") if module else []
    for end in range(len(parts), -1, -1):
        path = "/".join(parts[:end])
        for name in (f"{path}.py", f"{path}/__init__.py".lstrip("/")):
            if (PACKAGE / name).is_file():
                return name
    raise AssertionError(module)


def test_readme_lists_each_file_once() -> None:
    assert sorted(listed_files()) == sorted(map(listed_name, source_files()))


def test_files_import_only_lower_files() -> None:
    layer_of = {name: position for position, name in enumerate(listed_files())}
    upward = [
        f"{listed_name(path)} -> {name}"
        for path in source_files()
        for name in sorted(imported_files(path.read_text()))
        if layer_of[name] <= layer_of[listed_name(path)]
    ]
    assert upward == []


def test_imported_files_finds_every_kind_of_import() -> None:
    text = """
from . import _C, guard
from .param import Param
from ._compat import patches
import fsdp_c._C as _C, fsdp_c_redirect
def f():
    from fsdp_c.install import install
    from fsdp_c import fully_shard, __version__
"""
    files_named = {"guard.py", "param.py", "fsdp_c_redirect.py", "install.py", "fully_shard.py"}
    assert imported_files(text) == {*files_named, "_compat/patches.py", "__init__.py"}


def test_package_and_metadata_have_one_version() -> None:
    import fsdp_c

    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project and not re.findall(r"^version = ", project, re.M)
    assert build_torch.version(PACKAGE / "version.py").startswith(f"{fsdp_c.__version__}+torch")


# ---- modules that are imported on first use ------------------------------------------------------

LAZY = [
    "advice",
    "ema",
    "explain",
    "fake_step",
    "forecast",
    "load",
    "load_source",
    "optimizer_memory",
    "picture",
    "plan",
    "report",
    "safetensors",
    "sizes",
    "spans",
    "timeline",
    "timeline_picture",
    "unit_sizes",
    "wrap",
    "wrap_policy",
]
FIRST_USE = """
import sys
import torch, torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
before = set(sys.modules)
from fsdp_c import MixedPrecisionPolicy, fully_shard
model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(3)))
for layer in model:
    fully_shard(layer, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
optimizer = torch.optim.SGD(fully_shard(model).parameters())
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
print(*sorted(set(sys.modules) - before))
"""


def run_in_new_interpreter(code: str) -> list[str]:
    """Runs ``code`` in a new interpreter and returns the words that it prints."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_first_training_step_does_not_import_lazy_modules() -> None:
    """Modules for forecasts, diagrams and checkpoint files are imported by the first call."""
    assert sorted(LAZY) == sorted(name for name in LAZY if (PACKAGE / f"{name}.py").exists())
    found = run_in_new_interpreter(FIRST_USE)
    assert "fsdp_c._runtime.param_group" in found
    lazy_modules = {f"fsdp_c.{name}" for name in LAZY} | {"matplotlib", "safetensors"}
    assert sorted(lazy_modules & set(found)) == []


def test_lazy_names_resolve_to_functions_and_modules() -> None:
    code = """
import importlib, fsdp_c
importlib.import_module("fsdp_c._tools.plan_command")  # imports the modules of two functions
assert set(fsdp_c.__all__) <= set(dir(fsdp_c))
functions = [fsdp_c.plan, fsdp_c.explain, fsdp_c.auto_shard, fsdp_c.trace]
print(*(type(function).__name__ for function in functions))
print(*(function.__module__ for function in functions))
print(fsdp_c.wrap.__name__, fsdp_c.wrap.plan.__name__, hasattr(fsdp_c, "nothing"))
from fsdp_c import *
print(all(globals()[name] is getattr(fsdp_c, name) for name in fsdp_c.__all__))
"""
    assert run_in_new_interpreter(code) == [
        *["function"] * 4,
        *["fsdp_c.plan", "fsdp_c.explain", "fsdp_c.wrap", "fsdp_c._tools.timeline"],
        *["fsdp_c.wrap", "plan", "False"],
        "True",
    ]
