"""The rooms of the Python package: fsdp_c/README.md lists them all, and imports point down."""

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
BESIDE = {path.stem for path in ROOT.glob("fsdp_c_*.py")}
"""Modules beside the package, which run without it."""


def rooms() -> list[str]:
    """The files of the map, from the top down."""
    return re.findall(r"^\| `([\w/]+\.py)` \|", (PACKAGE / "README.md").read_text(), re.M)


def files() -> list[Path]:
    return [*PACKAGE.rglob("*.py"), *(ROOT / f"{name}.py" for name in BESIDE)]


def room_of(path: Path) -> str:
    """The name of a file in the map: relative to the package, or the name of one beside it."""
    inside = path.is_relative_to(PACKAGE)
    return str(path.relative_to(PACKAGE)) if inside else path.name


def modules_named(node: ast.AST, package: str) -> Iterator[str]:
    """Dotted names of what an import statement may load."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = ".".join(([package] if node.level else []) + ([node.module] if node.module else []))
        yield from (f"{base}.{a.name}" for a in node.names)


def imports(text: str) -> set[str]:
    """The files of ours that a file imports, anywhere in it: in functions and for types too."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        for name in modules_named(node, PACKAGE.name):
            top, _, inner = name.partition(".")
            if top in BESIDE:
                found.add(f"{top}.py")
            elif top == PACKAGE.name and not inner.startswith("_C"):
                found.add(file_of(inner))
    return found


def file_of(module: str) -> str:
    """The file of the package that holds a dotted name below ``fsdp_c``."""
    parts = module.split(".") if module else []
    for end in range(len(parts), -1, -1):
        path = "/".join(parts[:end])
        for name in (f"{path}.py", f"{path}/__init__.py".lstrip("/")):
            if (PACKAGE / name).is_file():
                return name
    raise AssertionError(module)


def test_the_map_names_every_file_once() -> None:
    assert sorted(rooms()) == sorted(map(room_of, files()))


def test_a_file_imports_only_what_stands_below_it() -> None:
    floor = {name: place for place, name in enumerate(rooms())}
    upward = [
        f"{room_of(path)} -> {name}"
        for path in files()
        for name in sorted(imports(path.read_text()))
        if floor[name] <= floor[room_of(path)]
    ]
    assert upward == []


def test_imports_of_every_kind_are_seen() -> None:
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
    assert imports(text) == {*files_named, "_compat/patches.py", "__init__.py"}


def test_the_package_and_its_metadata_have_one_version() -> None:
    import fsdp_c

    project = (ROOT / "pyproject.toml").read_text()
    assert 'dynamic = ["version"]' in project and not re.findall(r"^version = ", project, re.M)
    assert build_torch.version(PACKAGE / "version.py").startswith(f"{fsdp_c.__version__}+torch")


# ---- what comes later ----------------------------------------------------------------------------

LATER = [
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


def loaded_by(code: str) -> list[str]:
    """What a fresh interpreter prints, word by word."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_first_use_imports_only_what_it_needs() -> None:
    """Forecasts, pictures and files come with the first call that needs them."""
    assert sorted(LATER) == sorted(name for name in LATER if (PACKAGE / f"{name}.py").exists())
    found = loaded_by(FIRST_USE)
    assert "fsdp_c.param_group" in found
    unwanted = {f"fsdp_c.{name}" for name in LATER} | {"matplotlib", "safetensors"}
    assert sorted(unwanted & set(found)) == []


def test_names_that_come_later_are_what_they_were() -> None:
    code = """
import importlib, fsdp_c
importlib.import_module("fsdp_c.plan_command")  # which imports the rooms of two functions
assert set(fsdp_c.__all__) <= set(dir(fsdp_c))
functions = [fsdp_c.plan, fsdp_c.explain, fsdp_c.auto_shard, fsdp_c.trace]
print(*(type(one).__name__ for one in functions))
print(*(one.__module__ for one in functions))
print(fsdp_c.wrap.__name__, fsdp_c.wrap.plan.__name__, hasattr(fsdp_c, "nothing"))
from fsdp_c import *
print(all(globals()[name] is getattr(fsdp_c, name) for name in fsdp_c.__all__))
"""
    assert loaded_by(code) == [
        *["function"] * 4,
        *["fsdp_c.plan", "fsdp_c.explain", "fsdp_c.wrap", "fsdp_c.timeline"],
        *["fsdp_c.wrap", "plan", "False"],
        "True",
    ]
