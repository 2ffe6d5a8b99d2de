"""Dependencies between the C modules of one folder of csrc: includes, calls, layers and cycles.

A module is a source file with its header. ``python tests/c_dependencies.py`` prints the upward
dependencies and the cycles of the folders of ``LAYERS``, and the size of ``fc_group``.
``tests/unit/test_c_layers.py`` asserts that no dependency points up.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

CSRC = Path(__file__).resolve().parents[1] / "csrc"

LAYERS = {
    "core": (
        {"status", "recorder"},
        {"layout", "order", "process_group", "divide", "dtype", "chunks", "extension"},
        {"device_checksums"},
        {"param", "comm_ctx", "checksum"},
        {"callbacks", "plan", "label"},
        {"group_base", "foreach", "offload"},
        {"transfer", "unsharded", "registration", "gather_checksum"},
        {"bucket", "gather", "gradient", "reduction"},
        {"reduce"},
        {"group"},
        {"state"},
    ),
    "python": (
        {"version_cache"},
        {"objects"},
        {"dtensor"},
        {
            "errors",
            "deferred_decref",
            "dynamo",
            "check_thread",
            "shard",
            "guard",
            "clip",
            "local_lists",
            "recorder",
            "sequence",
        },
        {"attributes", "transitions", "extension"},
        {"freed_modules"},
        {"check_initialized"},
        {"slots", "tree", "comm_context", "iteration_context", "group_attributes"},
        {"param", "step"},
        {"callbacks", "hook", "state"},
        {"param_group"},
        {"module"},
    ),
    "dry_run": (
        {"record", "description"},
        {"boundary", "unit"},
        {"boundary_device", "callbacks"},
        {"model"},
        {"step"},
        {"parse"},
        {"module"},
    ),
    "transport": (
        {"hash", "op_tag", "prediction", "group_users", "capabilities", "plans"},
        {"op_label", "checksums", "label_blocks", "shm_ring", "shm_tag"},
        {"agreement", "shm_transport"},
        {"shm_collective_state", "sequence"},
        {"negotiation"},
        {"shm_all_reduce", "table", "group_negotiation"},
        {"shm_collective", "pg"},
        {"shm"},
        {"transport"},
    ),
}
"""Layers from the lowest to the highest. A module depends only on modules of lower layers.

csrc/MODULES.md describes each module.
"""

BOUNDARY = (
    "bridge/allocator.h",
    "bridge/device.h",
    "bridge/types.h",
    "bridge/error.h",
    "bridge/gil.h",
    "bridge/tensor.h",
    "bridge/stream.h",
    "bridge/group.h",
    "bridge/collective.h",
    "bridge/autograd.h",
)
"""Headers of the bridge that core, python and dry_run may include; they declare no Python objects.

Of the others, ``pyobject.h`` has Python objects, ``shm_methods.h`` is for csrc/transport, and
``progress.h`` is for the bridge.
"""

INCLUDES = {
    "core": (*BOUNDARY, "kernels/kernels.h", "transport/transport.h"),
    "kernels": (),
    "transport": (
        "bridge/collective.h",
        "bridge/error.h",
        "bridge/group.h",
        "bridge/shm_methods.h",
        "bridge/tensor.h",
        "kernels/checksum.h",
        "kernels/kernels.h",
        "kernels/ring.h",
    ),
    "bridge": ("kernels/pool.h",),
    "python": (
        *BOUNDARY,
        "bridge/pyobject.h",
        "core/*.h",
        "kernels/kernels.h",
        "kernels/kernels_jit.h",
        "kernels/norm.h",
        "kernels/pool.h",
    ),
    "dry_run": (
        *BOUNDARY,
        "core/*.h",
        "kernels/cast.h",
        "kernels/kernels.h",
        "transport/transport.h",
    ),
}
"""Headers of other folders that the files of each folder of csrc may include directly.

All entries except those of ``BOUNDARY`` are in use.
"""

_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
_STRING = re.compile(r'"(?:[^"\\\n]|\\.)*"')
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.M)
_DEFINITION = re.compile(r"^(?!static\b|typedef\b|#)[A-Za-z_][\w *]*?\b(\w+)\([^;{}]*\)\s*\{", re.M)
_TABLE = re.compile(r"^(?!static\b)(?:const )?\w+ (\w+)(?:\[\])? = ", re.M)
"""A table of functions, or another constant with external linkage."""
_NAME = re.compile(r"\b[a-z]\w*\b")


def strip_comments(path: Path) -> str:
    """Returns the text of a file without comments."""
    return _COMMENT.sub(" ", path.read_text())


def list_modules(folder: str) -> dict[str, list[Path]]:
    """Maps the name of each module of ``csrc/folder`` to its files."""
    modules: dict[str, list[Path]] = {}
    for path in sorted((CSRC / folder).glob("*.[ch]")):
        modules.setdefault(path.stem, []).append(path)
    return modules


def find_other_folders(folder: str) -> dict[str, set[str]]:
    """Maps each header of another folder that ``csrc/folder`` includes to the including files."""
    found: dict[str, set[str]] = {}
    for path in sorted((CSRC / folder).iterdir()):
        for header in _INCLUDE.findall(strip_comments(path)):
            if "/" in header:
                found.setdefault(header.removeprefix("../"), set()).add(path.name)
    return found


def find_dependencies(modules: dict[str, list[Path]]) -> dict[str, dict[str, set[str]]]:
    """Maps module -> module that it depends on -> headers, functions and tables that it uses."""
    texts = {module: [strip_comments(path) for path in paths] for module, paths in modules.items()}
    defined_in = {
        name: module
        for module, parts in texts.items()
        for text in parts
        for name in _DEFINITION.findall(text) + _TABLE.findall(text)
    }
    dependencies: dict[str, dict[str, set[str]]] = {module: {} for module in modules}
    for module, parts in texts.items():
        for text in parts:
            for header in _INCLUDE.findall(text):
                stem = Path(header).stem
                if "/" not in header and stem in modules and stem != module:
                    dependencies[module].setdefault(stem, set()).add(header)
            for name in set(_NAME.findall(_STRING.sub('""', text))):
                if defined_in.get(name, module) != module:
                    dependencies[module].setdefault(defined_in[name], set()).add(name)
    return dependencies


def find_upward(
    dependencies: dict[str, dict[str, set[str]]], layers: tuple[set[str], ...]
) -> dict[str, set[str]]:
    """Maps ``"from -> to"`` of each dependency on the same or a higher layer to the names used."""
    layer_of = {module: level for level, modules in enumerate(layers) for module in modules}
    return {
        f"{module} -> {other}": names
        for module, others in dependencies.items()
        for other, names in others.items()
        if layer_of[other] >= layer_of[module]
    }


def find_cycles(dependencies: dict[str, dict[str, set[str]]]) -> list[set[str]]:
    """Returns the sets of modules that depend on one another."""
    reach = {module: set(others) for module, others in dependencies.items()}
    for middle in reach:
        for module in reach:
            if middle in reach[module]:
                reach[module] |= reach[middle]
    found: list[set[str]] = []
    for module in reach:
        cycle = {other for other in reach[module] if module in reach.get(other, ())}
        if cycle and cycle not in found:
            found.append(cycle)
    return found


def count_functions_taking(struct: str, folder: str = "core") -> dict[str, int]:
    """Maps module to the number of functions in its header that take a pointer to ``struct``."""
    pattern = re.compile(rf"\b\w+\([^;{{}}]*\b{struct} \*[^;{{}}]*\);")
    counts = {
        path.stem: len(pattern.findall(strip_comments(path)))
        for path in (CSRC / folder).glob("*.h")
    }
    return {module: count for module, count in sorted(counts.items()) if count}


def list_fields(struct: str, header: Path) -> list[str]:
    """Returns the field declarations of ``typedef struct NAME { ... } NAME``."""
    text = strip_comments(header)
    body = re.search(rf"typedef struct {struct} {{(.*?)}} {struct};", text, re.S)
    if body is None:
        raise ValueError(f"no struct {struct} in {header.name}")
    return [" ".join(line.split()) for line in body.group(1).split(";") if line.strip()]


def main() -> None:
    for folder in LAYERS:
        modules = list_modules(folder)
        dependencies = find_dependencies(modules)
        count = sum(map(len, dependencies.values()))
        print(f"csrc/{folder}: {len(modules)} modules, {count} dependencies")
        print(f"  cycles: {find_cycles(dependencies) or 'none'}")
        print(f"  upward dependencies: {find_upward(dependencies, LAYERS[folder]) or 'none'}")
    fields = list_fields("fc_group", CSRC / "core/group.h")
    booleans = [field for field in fields if field.startswith("bool ")]
    print(f"fc_group: {len(fields)} fields, {len(booleans)} booleans of its own")
    print(f"functions that take fc_group *: {count_functions_taking('fc_group')}")


if __name__ == "__main__":
    sys.exit(main())
