"""Seeded bugs of the core, each caught by an assertion in a C test: the checks are believed because
they bite.

A mutation is one replacement in one file of ``csrc/core``. The file is compiled with it, linked
with everything else as it is (what ``make test-c`` has built), and a C test is run: it has to end
by the assertion that is named. A new check gets a bug that it catches, here. So do the tests of
boards, which include the source.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

pytestmark = pytest.mark.xdist_group("mutations")  # one worker builds the C tests
ROOT = Path(__file__).resolve().parents[2]
C_TESTS = ROOT / "tests/c"
BUILD = ROOT / "build/tests-c/address,undefined"
FLAGS = ["-std=c11", "-g", "-O0", "-fsanitize=address,undefined", f"-I{ROOT / 'csrc'}"]
WRAPS = [f"-Wl,--wrap={name}" for name in ("fck_cpu", "malloc", "calloc", "realloc")]
LIBRARIES = ["-lcmocka", "-lpthread", "-lm"]
# Compilers must not run under the sanitizer that `make sanitize` preloads into this process.
TOOL_ENV = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}


class Mutation(NamedTuple):
    room: str
    right: str
    """Stands there once."""
    wrong: str
    test: str
    """The C test that runs into it."""
    caught: str
    """What the assertion says."""


MUTATIONS = {
    "a skipped flip": Mutation(
        "group",
        "    g->sharded_state = FC_UNSHARDED;\n    fc_gather_retire",
        "    fc_gather_retire",
        "test_group",
        "parameter 0 has sharded state 3 in a group of sharded state 1",
    ),
    "a lost rollback": Mutation(
        "group",
        "restored = swap_one(g, changed, own, host->swap) == 0 && restored;",
        "restored = true;",
        "test_group",
        "in a group of sharded state",
    ),
    "a wrong count in flight": Mutation(
        "reduction",
        "    c->newest = r;\n    c->reductions++;",
        "    c->newest = r;",
        "test_reduce",
        "reductions are in flight; 0 were counted",
    ),
    "a stale plan": Mutation(
        "group",
        "    fc_gather_invalidate(&g->gather);\n",
        "",
        "test_check",
        "a gather plan is stale",
    ),
    "a launch for each shard": Mutation(
        "foreach",
        "if (f->sizes[i] == f->sizes[first]) {",
        "if (false) {",
        "test_foreach",
        '"fct_foreach_copy fct_foreach_copy" != "fct_foreach_copy"',
    ),
    "a leaked event": Mutation(
        "comm",
        "    FC_TRY_RAISED(fct_event_wait(e, waiter));\ndone:\n    fc_comm_put_event(c, e);",
        "    FC_TRY_RAISED(fct_event_wait(e, waiter));\ndone:\n    (void)c;",
        "test_group",
        "events_out == 0",
    ),
    "rows that survive their backward": Mutation(
        "state",
        "return status == FC_OK && last ? fc_comm_release_rows(c) : status;",
        "return status;",
        "test_train",
        "rows are kept after the backward that reduced them",
    ),
    "a launch that leaves its device current": Mutation(
        "transfer",
        "        fct_launch_leave(l->before);",
        "        (void)l->before;",
        "test_train",
        "launches",
    ),
    "a gradient that others hold is sent from where it is": Mutation(
        "reduce",
        "           fct_tensor_is_sole(plan->grads[i]);",
        "           true;",
        "test_reduce",
        "a gradient with another owner",
    ),
    "a reduction that is copied beside backward": Mutation(
        "reduce",
        "r->work != NULL && fct_work_is_copied(r->work)",
        "false",
        "test_reduce",
        "non_overlapping_reduction_completes_before_backward",
    ),
    "a gather that is copied beside backward": Mutation(
        "group",
        "fc_gather_is_copied(&g->gather, post_forward) ? FC_OK",
        "post_forward ? FC_OK",
        "test_group",
        "backward_prefetch_skips_cpu_bound_gather",
    ),
    "chunks that a failed copy-out frees": Mutation(
        "gather",
        "        fc_unsharded_return(a->members, a->flight.plan, &a->chunks);",
        "        (void)a;",
        "test_gather",
        "owned_chunks_survive_failed_copy_out",
    ),
    "buffers that are not the group's": Mutation(
        "members",
        "    FC_TRY_RAISED(has ? fct_pg_empty",
        "    FC_TRY_RAISED(numel < 0 ? fct_pg_empty",
        "test_train",
        "in memory that is not from a process group's allocator",
    ),
    "a buffer of the group's that is too large": Mutation(
        "gather",
        "fc_members_buffer(m, m->gather_memory, numel,",
        "fc_members_buffer(m, m->gather_memory, numel + chunk->numel,",
        "test_train",
        "an all-gather of ",
    ),
    "chunks in place of the group's memory": Mutation(
        "reduce",
        "FC_TRY(fc_members_has_memory(m, m->reduce_memory, &packed));",
        "(void)m;",
        "test_train",
        "chunks of 1 in memory that is not from a process group's allocator",
    ),
    "a direct post_backward whose reduction is not completed": Mutation(
        "group",
        "c->has_streams ? fc_reduce_order_compute(&g->reducer) : fc_reduction_recycle(c, 0);",
        "c->has_streams ? fc_reduce_order_compute(&g->reducer) : FC_OK;",
        "test_reduce",
        "streams || f.model->comm.reductions == 0",
    ),
    "a run that is not in its chunk's order": Mutation(
        "plan",
        "(fct_run){.chunk = chunk, .offset = offset, .numel = numel};",
        "(fct_run){.chunk = chunk, .offset = 0, .numel = numel};",
        "test_plan",
        "0x2",
    ),
    "a group whose memory is asked for and not let go": Mutation(
        "members",
        "    fc_members_set_memory(m, NULL, NULL);",
        "    m->gather_memory = m->reduce_memory;",
        "test_members",
        "1 process groups",
    ),
    "a row released before its cast": Mutation(
        "comm",
        "kept->copied != NULL && fct_event_wait(kept->copied, c->reduce_stream) != 0",
        "c->events_out == SIZE_MAX",
        "test_comm",
        "kept_rows_are_released_after_their_casts",
    ),
    "hooks on the stream that computes": Mutation(
        "gather",
        "        previous = fct_stream_set_current(*pack_stream);",
        "        previous = fct_stream_current(m->device);",
        "test_gather_extended",
        "and is not ordered after it",
    ),
    "a plan of the inputs before": Mutation(
        "gather",
        "(!extended && !plan->extended) || fc_gather_plan_fits(plan, m->params, m->count)",
        "true",
        "test_gather_extended",
        "[  FAILED  ] extension_hooks_run_before_gather",
    ),
    "hooks that are called once more for one gather": Mutation(
        "gather",
        "        drop_inputs(a->members);\n        fc_gather_abandon(a);",
        "        drop_inputs(a->members);",
        "test_gather_extended",
        "failed_extended_copy_out_abandons_gather",
    ),
    "inner tensors that keep their memory": Mutation(
        "extension",
        "    free_all(e->inner, e->inner_count);",
        "    (void)e;",
        "test_train",
        "bytes while sharded",
    ),
    "outputs replaced under what lies over them": Mutation(
        "extension",
        "if (output->tensor == NULL || !fct_storage_is_shared(output->tensor)) {",
        "if (output->tensor != name) {",
        "test_extension",
        "output_shared_with_inner_tensor_is_not_replaced",
    ),
}

RING = {
    "memory of a message that the slowest peer has not released": Mutation(
        "shm_ring",
        "        if (pending > largest) {",
        "        if (largest == 0) {",
        "test_shm_ring",
        "[  FAILED  ] reserve_waits_for_the_slowest_peer",
    ),
    "one message more than header slots": Mutation(
        "shm_ring",
        "    if (pending >= HEADER_SLOTS) {",
        "    if (pending > HEADER_SLOTS) {",
        "test_shm_ring",
        "[  FAILED  ] reserve_fails_when_all_header_slots_are_used",
    ),
    "liveness lock not taken": Mutation(
        "shm_ring",
        "        fcntl(fd, F_SETLK, &lock) == 0) {",
        "        lock.l_len == 1) {",
        "test_shm_ring",
        "[  FAILED  ] end_of_forked_child_does_not_close_the_ring",
    ),
    "child that closes the ring of its parent": Mutation(
        "shm_ring",
        "    if (ring->pid == (int64_t)getpid()) {\n        atomic_store",
        "    {\n        atomic_store",
        "test_shm_ring",
        "[  FAILED  ] end_of_forked_child_does_not_close_the_ring",
    ),
    "waiter that reads its doorbell after the check": Mutation(
        "shm_ring",
        "        const uint32_t doorbell_value = atomic_load(&own->doorbell);\n"
        "        const int64_t left_ns = deadline_ns - now_ns();\n"
        "        if (left_ns <= 0 || shm_ring_seq(ring) != seen_seq) {\n"
        "            break;\n"
        "        }\n",
        "        const int64_t left_ns = deadline_ns - now_ns();\n"
        "        if (left_ns <= 0 || shm_ring_seq(ring) != seen_seq) {\n"
        "            break;\n"
        "        }\n"
        "        const uint32_t doorbell_value = atomic_load(&own->doorbell);\n",
        "test_shm_ring_sleep",
        "[  FAILED  ] change_at_any_step_of_a_waiter_prevents_its_sleep",
    ),
    "commit without seq_cst": Mutation(
        "shm_ring",
        "    atomic_store(&own->committed, seq + 1);",
        "    atomic_store_explicit(&own->committed, seq + 1, memory_order_release);",
        "test_shm_ring_sleep",
        "[  FAILED  ] waiter_that_sleeps_at_any_step_of_a_change_is_woken",
    ),
    "close mark read after the commit counter": Mutation(
        "shm_ring",
        "        return closed != 0 ? SHM_RING_CLOSED",
        "        return atomic_load(&view->page->closed) != 0 ? SHM_RING_CLOSED",
        "test_shm_ring_sleep",
        "[  FAILED  ] peek_during_commit_and_close_returns_the_message",
    ),
    "overflow in the length check": Mutation(
        "shm_ring",
        "got.bytes > ring->capacity - got.offset",
        "got.offset + got.bytes > ring->capacity",
        "test_shm_ring_untrusted",
        "[  FAILED  ] peek_of_invalid_header_returns_corrupt",
    ),
    "segment without F_SEAL_SHRINK": Mutation(
        "shm_ring",
        "seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && ",
        "seals != 0x1000 && ",
        "test_shm_ring_untrusted",
        "[  FAILED  ] connect_refuses_files_that_are_no_rings",
    ),
}


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], cwd=C_TESTS, env=TOOL_ENV, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def objects() -> Path:
    """The folder of the C tests' object files, as they are without any mutation."""
    tests = " ".join(sorted({mutation.test for mutation in MUTATIONS.values()}))
    made = run("make", "-s", "-C", C_TESTS, "run", f"TESTS={tests}")
    assert made.returncode == 0, made.stdout + made.stderr
    return BUILD


def mutate(mutation: Mutation, folder: Path, to: Path) -> Path:
    """The source of a room with its bug, in another folder."""
    source = folder / f"{mutation.room}.c"
    text = source.read_text()
    assert text.count(mutation.right) == 1, "the mutation no longer fits the code"
    mutated = to / source.name
    mutated.write_text(text.replace(mutation.right, mutation.wrong))
    return mutated


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_seeded_bug_is_caught_by_an_assertion(name: str, objects: Path, tmp_path: Path) -> None:
    mutation = MUTATIONS[name]
    mutated = mutate(mutation, ROOT / "csrc/core", tmp_path)
    core = [path for path in sorted((objects / "core").glob("*.o")) if path.stem != mutation.room]
    core = [path for path in core if (ROOT / "csrc/core" / f"{path.stem}.c").exists()]
    simulation = [objects / "tests" / f"{path.stem}.o" for path in sorted(C_TESTS.glob("sim*.c"))]
    linked = run(
        *("gcc", *FLAGS, f"-I{ROOT / 'csrc/core'}", *WRAPS, mutated, *core, *simulation),
        *(objects / f"kernels/{name}.o" for name in ("kernels_cpu", "backends")),
        objects / "tests" / f"{mutation.test}.o",
        *(*LIBRARIES, "-o", tmp_path / "mutated"),
    )
    assert linked.returncode == 0, linked.stderr
    done = run(tmp_path / "mutated")
    assert done.returncode != 0
    assert mutation.caught in done.stdout + done.stderr


@pytest.mark.parametrize("name", RING)
def test_seeded_bug_of_the_shared_memory_ring_is_caught(name: str, tmp_path: Path) -> None:
    mutation = RING[name]
    folder = tmp_path / "transport"
    folder.mkdir()
    (folder / "shm_ring.h").write_text((ROOT / "csrc/transport/shm_ring.h").read_text())
    mutate(mutation, ROOT / "csrc/transport", folder)
    linked = run(
        *("gcc", f"-I{tmp_path}", *FLAGS, C_TESTS / f"{mutation.test}.c"),
        *(*LIBRARIES, "-o", tmp_path / "mutated"),
    )
    assert linked.returncode == 0, linked.stderr
    done = run(tmp_path / "mutated")
    assert done.returncode != 0
    assert mutation.caught in done.stdout + done.stderr
