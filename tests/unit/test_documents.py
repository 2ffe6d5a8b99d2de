"""Files, functions, fields and make targets that documents name in backticks exist.

tests/distributed/test_readme.py runs the Python blocks of the documents.
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
import torch

ROOT = Path(__file__).resolve().parents[2]
CODE_FOLDERS = ("csrc", "fsdp_c", "tests", "benchmarks", "examples")
CODE_SUFFIXES = {".c", ".h", ".cpp", ".hpp", ".cu", ".cuh", ".py", ".pyi"}

PRIVATE_SURFACE = ROOT / "docs/private-surface.md"

FENCE = re.compile(r"^[ ]*```.*?^[ ]*```", re.M | re.S)
SPAN = re.compile(r"`([^`]+)`")
FILE = re.compile(r"[\w./*-]+\.(?:cpp|hpp|cuh|cu|c|h|pyi|py|md|toml|yaml|txt)")
FOLDER = re.compile(rf"(?:{'|'.join(CODE_FOLDERS)})/[\w./*-]*|tests/\w+")
C_NAME = re.compile(
    r"\b(?:fc|fct|fck|fcpy|shm|progress|FC|FCT|FCK|SHM)_\w*[a-zA-Z0-9]\b(?:\.(\w+))?"
)
DOTTED = re.compile(r"\b(?:fsdp_c|torch)(?:\.\w+)+")
CALL = re.compile(r"\b(?:\w+\.)*(\w+)\(")
TEST = re.compile(r"test_\w+")
NAME = re.compile(r"_?[a-z][a-z0-9]*(?:_[a-z0-9]+)+_?")
# Names that a document gives as missing features, or as a naming pattern.
EXEMPT = {"get_pending_gradients", "grad_dtype", "cpu_offload_by_budget", "prefix_noun_verb"}
OTHER_PROJECTS = {
    # FSDP1 and DeepSpeed, in docs/migrate.md
    *("Init()", "gradient_clipping", "offload_param", "offload_optimizer"),
    *("zero_hpz_partition_size", "zero_to_fp32", "zero_to_fp32.py"),
    # libraries, in docs/private-surface.md
    *("nn/fsdp/fsdp2.py", "functions.py", "_tools/fsdp2_mem_tracker.py", "guards.py", "stage.py"),
    *("fsdp2_summon_full_parameters", "is_fsdp_managed_module", "pipeline_stage.py"),
    *("fsdp_mixin.py", "ac_compile_parallelize.py", "core_utils.py", "pre_quant_weight.py"),
    *("engine/veomni/utils.py", "fsdp2_graph_storage.py", "monkeypatch/fsdp2_qlora.py"),
    # torch's open pull requests, in docs/upstream.md
    *("set_all_gather_layout", "_all_gather_output_fn", "all_gather_output_fn"),
}
"""Names of files and functions of other projects, which user documents mention."""
MAKE = re.compile(r"\bmake((?: [a-z][a-z-]*)+)")
MAKE_LINE = re.compile(r"^\s*(?:\w+=\S+ )*make((?: [a-z][a-z-]*)+)", re.M)
COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)


def documents() -> list[Path]:
    """Returns all Markdown files of the repository."""
    folders = sorted((ROOT / folder) for folder in (*CODE_FOLDERS, "docs"))
    return [*sorted(ROOT.glob("*.md")), *(p for f in folders for p in sorted(f.rglob("*.md")))]


@functools.cache
def sources() -> dict[Path, str]:
    """Returns the text of all source files, C without comments, which may name removed things."""
    texts = {}
    for folder in CODE_FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in CODE_SUFFIXES:
                text = path.read_text()
                texts[path] = text if path.suffix.startswith(".py") else COMMENT.sub(" ", text)
    return texts


@functools.cache
def words(c_only: bool) -> frozenset[str]:
    """Returns all words of the source files, or of those below csrc, except for this file's."""
    texts = [
        text
        for path, text in sources().items()
        if path != Path(__file__) and (not c_only or path.is_relative_to(ROOT / "csrc"))
    ]
    return frozenset(word for text in texts for word in re.findall(r"\w+", text))


@functools.cache
def names_of_tests() -> frozenset[str]:
    texts = (text for path, text in sources().items() if path.suffix == ".py")
    return frozenset(name for text in texts for name in re.findall(r"^def (test_\w+)", text, re.M))


@functools.cache
def make_targets() -> frozenset[str]:
    return frozenset(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))


@functools.cache
def torch_files() -> frozenset[str]:
    """Returns the paths of torch's Python files in its package."""
    package = Path(torch.__file__).parent
    return frozenset(str(path.relative_to(package)) for path in package.rglob("*.py"))


# ---- existence of a name -------------------------------------------------------------------------


def path_exists(name: str, document: Path) -> bool:
    """Returns whether the path exists below the root, csrc or the document's folder, or in torch.

    A bare file name may be that of any source file.
    """
    of_torch = (f"/{path}".endswith(f"/{name}") for path in torch_files())
    if document == PRIVATE_SURFACE and any(of_torch):
        return True
    for start in (ROOT, ROOT / "csrc", document.parent):
        if any(start.glob(name.rstrip("/"))):
            return True
    return "/" not in name and any(path.name == name for path in sources())


def has_field(struct: str, field: str) -> bool:
    """Returns whether a struct of csrc has the field. Fields of nested structs count."""
    for text in sources().values():
        body = re.search(rf"\bstruct {struct} \{{(.*?)^\}}", text, re.M | re.S)
        if body is not None:
            return re.search(rf"\b{field}\b", body[1]) is not None
    return False


def resolves(name: str) -> bool:
    """Returns whether the modules and attributes of a dotted name exist."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            resolved: Any = importlib.import_module(".".join(parts[:length]))
        except ImportError:
            continue
        for part in parts[length:]:
            resolved = getattr(resolved, part, None)
        return resolved is not None
    return False


def is_known(name: str) -> bool:
    """Returns whether the sources, or torch's FSDP and DistributedDataParallel, use the name."""
    import torch.distributed.fsdp as fsdp
    from torch.nn.parallel import DistributedDataParallel

    fsdp1 = fsdp.FullyShardedDataParallel
    owners = (fsdp, fsdp.FSDPModule, fsdp1, DistributedDataParallel)
    return (
        name in words(c_only=False)
        or any(hasattr(owner, name) for owner in owners)
        or name in inspect.signature(fsdp1).parameters
    )


# ---- names in a document -------------------------------------------------------------------------


def unknown_names_in_span(span: str, document: Path) -> Iterator[str]:
    """Yields the names within one pair of backticks that do not exist."""
    for match in DOTTED.finditer(span):
        if not resolves(match[0]) and not FILE.fullmatch(match[0]):
            yield match[0]
    if FILE.fullmatch(span) or FOLDER.fullmatch(span):
        if not path_exists(span, document):
            yield span
        return
    for match in C_NAME.finditer(span):
        name, _, field = match[0].partition(".")
        if name not in words(c_only=True) or (field and not has_field(name, field)):
            yield match[0]
    if TEST.fullmatch(span):
        if span not in names_of_tests():
            yield span
    elif NAME.fullmatch(span) and not is_known(span) and span not in EXEMPT:
        yield span
    for match in CALL.finditer(span):
        if not C_NAME.fullmatch(match[1]) and not is_known(match[1]):
            yield f"{match[1]}()"


def unknown_names(text: str, document: Path) -> list[str]:
    """Returns the names in a document that do not exist, in order and without duplicates."""
    prose = FENCE.sub("", text)
    spans = [re.sub(r"\s+", " ", span) for span in SPAN.findall(prose)]
    unknown = [name for span in spans for name in unknown_names_in_span(span, document)]
    targets = [found for span in spans for found in MAKE.findall(span)]
    targets += [found for fence in FENCE.findall(text) for found in MAKE_LINE.findall(fence)]
    named_targets = " ".join(targets).split()
    unknown += [f"make {target}" for target in named_targets if target not in make_targets()]
    return [name for name in dict.fromkeys(unknown) if name not in OTHER_PROJECTS]


# ---- the tests -----------------------------------------------------------------------------------


def case(document: Path) -> Any:
    return pytest.param(document, id=str(document.relative_to(ROOT)))


@pytest.mark.parametrize("document", [case(document) for document in documents()])
def test_document_contains_only_existing_names(document: Path) -> None:
    assert unknown_names(document.read_text(), document) == []


DOCUMENT_WITH_UNKNOWN_NAMES = """
Read `core/nowhere.h`, `nowhere.py`, `tests/nowhere` and `csrc/core/nowhere_*.c`; call
`fc_nothing`, `fct_nothing(n)`, `fsdp_c.no_such_call(model)`, `torch.distributed.nothing`, set
`fc_group.nothing`, `no_such_method()`, run `test_that_is_not_there`, `no_such_word`, and `make
nothing`. Then:

```
FSDP_C_DEBUG=1 make build missing
```
"""

DOCUMENT_WITH_KNOWN_NAMES = """
Read `core/group.h`, `group.c`, `tests/c`, `csrc/bridge/*.cpp`; call `fc_group_unshard`,
`fct_fault_arm(n)`, `fsdp_c.auto_shard(model)`, `fc_param.partial`, `zero_grad()`, `make
test`, the prefixes `fc_` and `fct_`, `model`, run
`test_names_unknown_in_document_are_returned_in_order`. Not a name: `a = b`.

```
make demo     # trains a small GPT
```
"""


def test_names_unknown_in_document_are_returned_in_order() -> None:
    assert unknown_names(DOCUMENT_WITH_UNKNOWN_NAMES, ROOT / "README.md") == [
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


def test_unknown_names_of_document_with_known_names_only_is_empty() -> None:
    assert unknown_names(DOCUMENT_WITH_KNOWN_NAMES, ROOT / "README.md") == []
