"""The documents name what is there: files, functions, fields and make targets.

What stands in backticks is looked up, as far as a program can; Python blocks are run by
tests/distributed/test_readme.py.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CODE_FOLDERS = ("csrc", "fsdp_c", "tests", "benchmarks", "examples")
CODE_SUFFIXES = {".c", ".h", ".cpp", ".cu", ".cuh", ".py", ".pyi"}

FENCE = re.compile(r"^[ ]*```.*?^[ ]*```", re.M | re.S)
SPAN = re.compile(r"`([^`]+)`")
FILE = re.compile(r"[\w./*-]+\.(?:cpp|cuh|cu|c|h|pyi|py|md|toml|yaml|txt)")
FOLDER = re.compile(rf"(?:{'|'.join(CODE_FOLDERS)})/[\w./*-]*|tests/\w+")
C_NAME = re.compile(r"\b(?:fc|fct|fck|fcpy|FC|FCT|FCK)_\w*[a-zA-Z0-9]\b(?:\.(\w+))?")
DOTTED = re.compile(r"\b(?:fsdp_c|torch)(?:\.\w+)+")
CALL = re.compile(r"\b(?:\w+\.)*(\w+)\(")
TEST = re.compile(r"test_\w+")
NAME = re.compile(r"_?[a-z][a-z0-9]*(?:_[a-z0-9]+)+_?")
NOT_HERE = {"get_pending_gradients", "grad_dtype", "cpu_offload_by_budget", "prefix_noun_verb"}
"""Names that a document gives as what we lack, or as a pattern."""
MAKE = re.compile(r"\bmake((?: [a-z][a-z-]*)+)")
MAKE_LINE = re.compile(r"^\s*(?:\w+=\S+ )*make((?: [a-z][a-z-]*)+)", re.M)
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)


def documents() -> list[Path]:
    """Everything in the repository that is to be read."""
    folders = sorted((ROOT / folder) for folder in CODE_FOLDERS)
    return [*sorted(ROOT.glob("*.md")), *(p for f in folders for p in sorted(f.rglob("*.md")))]


@functools.cache
def code() -> dict[Path, str]:
    """All sources; C without its comments, which may tell of what is gone."""
    found = {}
    for folder in CODE_FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in CODE_SUFFIXES:
                text = path.read_text()
                found[path] = text if path.suffix.startswith(".py") else COMMENT.sub(" ", text)
    return found


@functools.cache
def words(c_only: bool) -> frozenset[str]:
    """Every word of the sources, or of those below csrc; what is false here is false."""
    texts = [
        text
        for path, text in code().items()
        if path != Path(__file__) and (not c_only or path.is_relative_to(ROOT / "csrc"))
    ]
    return frozenset(word for text in texts for word in re.findall(r"\w+", text))


@functools.cache
def names_of_tests() -> frozenset[str]:
    texts = (text for path, text in code().items() if path.suffix == ".py")
    return frozenset(name for text in texts for name in re.findall(r"^def (test_\w+)", text, re.M))


@functools.cache
def targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))


# ---- is it there? --------------------------------------------------------------------------------


def has_path(name: str, document: Path) -> bool:
    """From the root, from csrc or from the document's folder; a bare name from anywhere."""
    for start in (ROOT, ROOT / "csrc", document.parent):
        if any(start.glob(name.rstrip("/"))):
            return True
    return "/" not in name and any(path.name == name for path in code())


def has_field(struct: str, field: str) -> bool:
    """Whether a struct of csrc has the field; one of a struct inside of it counts."""
    for text in code().values():
        body = re.search(rf"\bstruct {struct} \{{(.*?)^\}}", text, re.M | re.S)
        if body is not None:
            return re.search(rf"\b{field}\b", body[1]) is not None
    return False


def resolves(name: str) -> bool:
    """Whether modules and attributes of this dotted name are there."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: Any = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            found = getattr(found, part, None)
        return found is not None
    return False


def is_known(name: str) -> bool:
    """A name of ours, or of the parts of torch that the documents speak of."""
    import torch.distributed.fsdp as fsdp
    from torch.nn.parallel import DistributedDataParallel

    fsdp1 = fsdp.FullyShardedDataParallel
    owners = (fsdp, fsdp.FSDPModule, fsdp1, DistributedDataParallel)
    return (
        name in words(c_only=False)
        or any(hasattr(owner, name) for owner in owners)
        or name in inspect.signature(fsdp1).parameters
    )


# ---- what a document names -----------------------------------------------------------------------


def false_names_of(span: str, document: Path) -> Iterator[str]:
    for match in DOTTED.finditer(span):
        if not resolves(match[0]) and not FILE.fullmatch(match[0]):
            yield match[0]
    if FILE.fullmatch(span) or FOLDER.fullmatch(span):
        if not has_path(span, document):
            yield span
        return
    for match in C_NAME.finditer(span):
        name, _, field = match[0].partition(".")
        if name not in words(c_only=True) or (field and not has_field(name, field)):
            yield match[0]
    if TEST.fullmatch(span):
        if span not in names_of_tests():
            yield span
    elif NAME.fullmatch(span) and not is_known(span) and span not in NOT_HERE:
        yield span
    for match in CALL.finditer(span):
        if not C_NAME.fullmatch(match[1]) and not is_known(match[1]):
            yield f"{match[1]}()"


def false_names(text: str, document: Path) -> list[str]:
    """What the text of a document names, and nobody has; each once, in order."""
    prose = FENCE.sub("", text)
    spans = [re.sub(r"\s+", " ", span) for span in SPAN.findall(prose)]
    found = [name for span in spans for name in false_names_of(span, document)]
    commands = [words for span in spans for words in MAKE.findall(span)]
    commands += [words for fence in FENCE.findall(text) for words in MAKE_LINE.findall(fence)]
    found += [f"make {name}" for one in commands for name in one.split() if name not in targets()]
    return list(dict.fromkeys(found))


# ---- the tests -----------------------------------------------------------------------------------


def case(document: Path) -> Any:
    return pytest.param(document, id=str(document.relative_to(ROOT)))


@pytest.mark.parametrize("document", [case(one) for one in documents()])
def test_what_a_document_names_is_there(document: Path) -> None:
    assert false_names(document.read_text(), document) == []


FALSE = """
Read `core/nowhere.h`, `nowhere.py`, `tests/nowhere` and `csrc/core/nowhere_*.c`; call
`fc_nothing`, `fct_nothing(n)`, `fsdp_c.no_such_call(model)`, `torch.distributed.nothing`, set
`fc_group.nothing`, `no_such_method()`, run `test_that_is_not_there`, `no_such_word`, and `make
nothing`. Then:

```
FSDP_C_DEBUG=1 make build missing
```
"""

TRUE = """
Read `core/group.h`, `group.c`, `tests/c`, `csrc/torch/*.cpp`; call `fc_group_unshard`,
`fct_fault_arm(n)`, `fsdp_c.auto_shard(model)`, `fc_param.partial`, `zero_grad()`, `make
test`, the prefixes `fc_` and `fct_`, `model`, run
`test_a_false_name_is_found`. Not a name: `a = b`.

```
make demo     # trains a small GPT
```
"""


def test_a_false_name_is_found() -> None:
    assert false_names(FALSE, ROOT / "README.md") == [
        "core/nowhere.h",
        "nowhere.py",
        "tests/nowhere",
        "csrc/core/nowhere_*.c",
        "fc_nothing",
        "fct_nothing",
        "fsdp_c.no_such_call",
        "no_such_call()",
        "torch.distributed.nothing",
        "fc_group.nothing",
        "no_such_method()",
        "test_that_is_not_there",
        "no_such_word",
        "make nothing",
        "make missing",
    ]


def test_a_true_name_is_none_of_them() -> None:
    assert false_names(TRUE, ROOT / "README.md") == []
