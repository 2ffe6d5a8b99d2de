"""Rules for the C code: preconditions, globals, lengths of functions, facts with one owner."""

from __future__ import annotations

import re
from pathlib import Path

import c_sources
import pytest

CORE = c_sources.CSRC / "core"
MAX_FUNCTION_LINES = 60

# ---- preconditions -------------------------------------------------------------------------------

ASSERTING = [
    *c_sources.list_files("core", "kernels", "transport"),
    c_sources.CSRC / "bridge/progress.h",
    c_sources.CSRC / "bridge/progress.c",
]

NO_PRECONDITION = {
    "fc_iteration_init": "sets every field, whatever the memory contains",
    "fc_process_group_set": "accepts a zeroed struct, and every name",
    "fc_process_group_fini": "accepts a zeroed struct",
    "fc_param_set_sharded_data": "accepts a zeroed struct, because users can set attributes of one",
    "fc_param_set_accumulated": "likewise",
    "fc_param_set_partial": "likewise",
}
"""Exported functions without an assertion, mapped to the reason why nothing can be asserted.

Functions named ``*_check`` are excluded, because debug builds call them to verify invariants.
"""


def list_mutating_functions() -> dict[str, Path]:
    """Maps each exported function that changes its first pointer argument to its header."""
    return {
        name: header
        for header in ASSERTING
        if header.suffix == ".h"
        for name, parameters in c_sources.list_exported(header).items()
        if c_sources.is_mutating(parameters) and not name.endswith("_check")
    }


def list_definitions() -> dict[str, list[c_sources.Function]]:
    """Maps each function of the folders to its definitions; a build switch allows several."""
    found: dict[str, list[c_sources.Function]] = {}
    for path in ASSERTING:
        for function in c_sources.list_functions(path):
            found.setdefault(function.name, []).append(function)
    return found


def test_exported_mutating_functions_assert_a_precondition() -> None:
    functions, definitions = list_mutating_functions(), list_definitions()
    assert len(functions) > 180, "found too few functions: the test would check nothing"
    assert [name for name in functions if name not in definitions] == []
    without = {
        name
        for name in functions
        if not all(re.search(r"\bassert\(", f.body) for f in definitions[name])
    }
    assert without == NO_PRECONDITION.keys()


def test_headers_of_mutating_functions_state_preconditions() -> None:
    headers = set(list_mutating_functions().values())
    assert {CORE / "group.h", CORE / "gather.h"} <= headers
    assert [h.name for h in sorted(headers) if "Precondition" not in h.read_text()] == []


def test_c_function_is_mutating_if_its_first_pointer_is_not_const() -> None:
    assert c_sources.is_mutating("fc_group *g, const fc_order *order")
    assert c_sources.is_mutating("int64_t a, int64_t *out")
    assert not c_sources.is_mutating("const fc_group *g, size_t *count")
    assert not c_sources.is_mutating("int64_t a")


# ---- debug checks --------------------------------------------------------------------------------

NO_VERIFY = {
    "fc_group_init": "there is no state before it",
    "fc_group_fini": "there is no state after it",
    "fc_group_invalidate": "is called while a transition runs",
    "fc_group_check": "is the check",
    "fc_iteration_init": "there is no state before it",
    "fc_iteration_fini": "there is no state after it",
    "fc_iteration_set_states": "replaces an array, also while states are cleared",
    "fc_state_init": "there is no state before it",
    "fc_state_fini": "there is no state after it",
}
"""Functions of group.h and state.h that run no transition, mapped to the reason."""


def find_unverified_exits(module: str) -> dict[str, list[str]]:
    """Maps each exported mutating function to its ``return`` statements without a verification.

    A function without ``return`` has its body in the list.
    """
    exported = c_sources.list_exported(CORE / f"{module}.h")
    bodies = {f.name: f.body for f in c_sources.list_functions(CORE / f"{module}.c")}
    found = {}
    for name, parameters in exported.items():
        if not c_sources.is_mutating(parameters):
            continue
        body = bodies[name]
        exits = [" ".join(e.split()) for e in re.findall(r"\breturn\b([^;]*);", body)] or [body]
        unverified = [e for e in exits if not re.search(r"\bverify_\w+\(", e)]
        found[name] = [re.sub(r'""(?:\s*"")*', '""', e) for e in unverified]
    return found


REFUSALS = {
    "fc_group_set_comm": ["FC_OK", 'fc_error_set(&before->error, FC_ESTATE, "")'],
    "fc_group_to_sharded_post_forward": ['fc_error_set(&g->base.comm->error, FC_ESTATE, "")'],
    "fc_state_reset": ["first"],
}
"""Exits before anything has changed: a group that stays in its context, and refused calls."""


def test_every_exit_of_a_transition_verifies_invariants() -> None:
    exits = find_unverified_exits("group") | find_unverified_exits("state")
    assert len(exits) > 25, "found too few functions: the test would check nothing"
    unverified = {name: found for name, found in exits.items() if found}
    assert NO_VERIFY.keys() - unverified.keys() == set(), "remove the entries"
    transitions = {n: found for n, found in unverified.items() if n not in NO_VERIFY}
    assert transitions == REFUSALS


# ---- globals -------------------------------------------------------------------------------------

GLOBALS = {
    "bridge/autograd.cpp": {
        "running_node": "the innermost node of this thread whose hook runs",
    },
    "bridge/error.cpp": {
        "faults_left": "for tests: boundary calls of this thread until one fails",
    },
    "bridge/exchange.cpp": {
        "table": "object attached to each process group, until the group ends; GIL",
    },
    "bridge/gil.cpp": {
        "in_scope": "whether this thread is in a scope of bridge/gil.h",
        "saved_state": "state with which this thread takes the GIL that its scope has released",
    },
    "bridge/group.cpp": {
        "table": "handle of each process group, shared by all its users; GIL",
    },
    "bridge/memory.cpp": {
        "pool": "torch's interface to the memory pool; storages refer to it until the process ends",
    },
    "bridge/shm_backend.cpp": {
        "reduces_gradients": "marks the all-reduce that this thread issues as one of gradients",
    },
    "core/device_checksums.c": {
        "oldest": "ended intervals of all comm contexts, in the order of the process; GIL",
    },
    "core/plan.c": {
        "min_owned_chunk_bytes": "for tests: size from which a parameter gets its own chunk",
    },
    "core/recorder.c": {
        "records": "last collectives; a thread changes its own, a signal handler reads",
        "last_number": "number of the newest record; atomic",
    },
    "dry_run/record.c": {
        "fcd_current_record": "record of this thread's dry run; the boundary appends events",
    },
    "kernels/backends.c": {
        "compiled": "kernels that NVRTC compiled for this process; atomic",
        "simulated": "for tests: kernels of devices that have none; atomic",
        "hidden": "for tests: hides the kernels; atomic",
    },
    "kernels/kernels_cuda.cu": {
        "failure": "message of the last failed launch in this thread, returned to its caller",
    },
    "kernels/kernels_jit.cpp": {
        "cu_launch_kernel": "function of the CUDA driver, set with the compiled kernels; atomic",
        "move_lines": "compiled CUDA kernel, one per process; atomic",
        "cast_lines": "compiled CUDA kernel, one per process; atomic",
        "move_many_lines": "compiled CUDA kernel, or NULL; one per process; atomic",
        "cast_many_lines": "compiled CUDA kernel, or NULL; one per process; atomic",
        "add_checksums": "compiled CUDA kernel, one per process; atomic",
        "cu_stream_is_capturing": "function of the CUDA driver, set with the kernels; atomic",
        "cu_ctx_set_current": "function of the CUDA driver, set with the compiled kernels; atomic",
        "primary_context": "CUDA context in which the kernels are loaded; atomic",
    },
    "kernels/launcher.cuh": {
        "large_rejected": "whether the driver rejects large arguments, one per process; atomic",
        "small_launched": "whether a kernel is loaded, one per process; atomic",
    },
    "kernels/pool_cpu.c": {
        "pool": "memory pool: freed pages are reused by the whole process; guarded by its mutex",
        "once": "registers handlers of fork() once per process",
    },
    "python/recorder.c": {
        "signal_files": "files that the handler of each signal writes; handlers have no argument",
    },
    "transport/group_users.c": {
        "user_counts": "parameter groups per process group before its negotiation; under the GIL",
    },
    "transport/op_label.c": {
        "next_label": "label of this thread's next collective; c10d has no parameter for it",
    },
    "transport/sequence.c": {
        "handler": "departure handler: waits in Python for the other ranks to depart; transports "
        "cannot call Python directly",
    },
    "transport/shm_transport.c": {
        "once": "registers the handler of fork() once per process",
        "forks": "counts forks, so that a child recognizes objects of its parent; atomic",
    },
}
"""Variables with static storage that can change, by file of csrc, mapped to the reason for each.

State of a model, a group or a module belongs into a struct that its owner passes.
"""

CPYTHON_TABLE = re.compile(
    r"\bPy(?:MethodDef|GetSetDef|MemberDef|Type_Slot|Type_Spec|ModuleDef(?:_Slot)?"
    r"|StructSequence_(?:Field|Desc)) \w+(?:\[\])?$"
    r"|^static char \*(?:keywords|names)\[\]$"
)
"""Tables that CPython declares without const. They are constant."""


def list_globals() -> dict[str, set[str]]:
    """Maps each file of csrc to its mutable variables with static storage, if it has any."""
    found: dict[str, set[str]] = {}
    for path in c_sources.list_files():
        file = str(path.relative_to(c_sources.CSRC))
        for name, declaration in c_sources.list_mutable_globals(path).items():
            if not CPYTHON_TABLE.search(declaration):
                found.setdefault(file, set()).add(name)
    return found


def test_globals_and_thread_locals_are_listed_with_a_reason() -> None:
    assert list_globals() == {file: set(names) for file, names in GLOBALS.items()}


def test_mutable_globals_and_functions_of_every_scope_are_listed(tmp_path: Path) -> None:
    source = tmp_path / "sample.cpp"
    source.write_text("""
// static int comment;
typedef struct row { int field; } row;
enum { SIZE = 3 };
static const char *const fixed[] = {"a", "b"};
static const row zero = {0};
constexpr int limit = 1;
static int declared(int x);
static row *pointer;
static int (*hook)(const char *text);
static int (*const fixed_hook)(void) = run;
static int calls_back(int (*hook_of_caller)(void), int x);
static int one = 1, *two, three[2];
static std::map<int, int> map;
bool operator==(row a, row b) { return a.field == b.field; }
template <typename T = int> T convert(int x) { return x; }
void empty(void) {}
static struct { int a; } pair = { .a = 1 };
namespace fct {
thread_local std::vector<int> handles;
class Work {
    int field_ = 0;
    static inline int members = 0;
  private:
    static int labelled;
    int count() { static long calls; return ++calls; }
};
} // namespace fct
extern "C" {
int run(void) {
    int local = 0;
    for (int i = 0; i < 3; i++) { local += i; }
    static _Atomic(int) once = 0;
    static auto *const created = new std::map<int, int>();
    static const auto *const fixed_object = new std::map<int, int>();
    static auto *const fixed_pointer = find(map);
    return local;
}
}
""")
    assert c_sources.list_mutable_globals(source).keys() == {
        "pointer",
        "hook",
        "one",
        "two",
        "three",
        "map",
        "pair",
        "handles",
        "members",
        "labelled",
        "calls",
        "once",
        "created",
    }
    assert [(f.name, f.lines) for f in c_sources.list_functions(source)] == [
        ("operator", 1),
        ("convert", 1),
        ("count", 1),
        ("run", 9),
    ]


def test_list_exported_finds_functions_with_function_pointer_parameters(tmp_path: Path) -> None:
    header = tmp_path / "sample.h"
    header.write_text("void attach(void *object, void (*release)(void *));\nint value(void);\n")
    assert c_sources.list_exported(header) == {
        "attach": "void *object, void (*release)(void *)",
        "value": "void",
    }


# ---- lengths -------------------------------------------------------------------------------------


def test_functions_have_at_most_max_lines() -> None:
    functions = [
        (path.name, function.name, function.lines)
        for path in c_sources.list_files()
        for function in c_sources.list_functions(path)
    ]
    assert len(functions) > 1000, "found too few functions: the test would check nothing"
    assert [f for f in functions if f[2] > MAX_FUNCTION_LINES] == []


# ---- facts with one owner ------------------------------------------------------------------------

TRANSPORT_WORDS = {
    *("transport", "transports", "shm", "memfd", "futex", "doorbell", "mailbox", "board", "boards"),
    *("ring", "rings", "segment", "segments", "socket", "sockets", "tcp", "ibverbs"),
    *("gloo", "nccl", "mpi", "ucc", "c10d", "negotiation", "progress", "peer", "peers"),
}


@pytest.mark.parametrize("module", ["group", "gather", "reduce"])
@pytest.mark.parametrize("suffix", [".c", ".h"])
def test_core_files_gather_reduce_and_group_mention_no_transport(module: str, suffix: str) -> None:
    """These modules use plans and process groups. The process group selects the transport."""
    text = (CORE / f"{module}{suffix}").read_text()
    words = {w.lower() for w in re.findall(r"[A-Za-z][a-z0-9]*|[A-Z]+", text.replace("_", " "))}
    assert {"fc", "status"} <= words, "found too few words: the test would check nothing"
    assert words & TRANSPORT_WORDS == set()


DEVICE_COMPARISON = re.compile(
    r"device(?:_?type)?\b[\w.>\-]*\s*[!=]=\s*(?!NULL)[A-Z0-9]|\bFC[TK]_DEVICE_\w+"
    r"|\btype\s*[!=]=|[!=]=\s*[\w.>\-]*device\w*(?:\.|->)type"
)


def test_core_compares_no_device_type() -> None:
    """The bridge (device.h) and the kernels own facts of devices; the core calls functions."""
    found = [
        f"{path.name}: {match.group()}"
        for path in c_sources.list_files("core")
        for match in DEVICE_COMPARISON.finditer(c_sources.strip(path.read_text()))
    ]
    assert found == []


def test_device_comparison_pattern_matches_comparisons_only() -> None:
    for line in (
        "device.type == FCT_DEVICE_CPU",
        "base->device.type != FCT_DEVICE_MTIA",
        "facts.device.type == device.type",
        "if (FCT_DEVICE_CUDA == d.type)",
        "device.type == 1",
    ):
        assert DEVICE_COMPARISON.search(line), line
    for line in ("fck_backend_of(device.type) == NULL", "fct_device_is_same_type(a, b)"):
        assert not DEVICE_COMPARISON.search(line), line
