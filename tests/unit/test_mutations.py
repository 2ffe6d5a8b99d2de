"""Mutation tests of the C code: each seeded bug must fail the named assertion of a C test.

A mutation is one replacement in one file of csrc. The test compiles the file with the
mutation, links it with the unmodified objects of ``make test-c``, and runs one C test. For each new
check, add a mutation that it detects. The C tests of the shared-memory rings include the mutated
source instead.
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
    module: str
    original: str
    """The original text; it occurs once in the file."""
    replacement: str
    test: str
    """The C test that must fail."""
    message: str
    """Text that the failed assertion prints."""


MUTATIONS = {
    "group keeps its sharded state after unshard": Mutation(
        "group",
        "    g->sharded_state = FC_UNSHARDED;\n    fc_gather_complete",
        "    fc_gather_complete",
        "test_group",
        "parameter 0 has sharded state 3 in a group of sharded state 1",
    ),
    "failed rollback of a parameter swap is ignored": Mutation(
        "registration",
        "restored = swap_one(base, changed, own, callbacks->swap) == 0 && restored;",
        "restored = true;",
        "test_group",
        "in a group of sharded state",
    ),
    "reduction is not counted": Mutation(
        "reduction",
        "    c->newest = r;\n    c->reductions++;",
        "    c->newest = r;",
        "test_reduce",
        "(c->oldest == NULL) == (c->reductions == 0)",
    ),
    "gather plan is not invalidated": Mutation(
        "group",
        "    fc_gather_invalidate(&g->gather);\n",
        "",
        "test_check",
        "a gather plan is stale",
    ),
    "changed deferral of casts is not copied to the group": Mutation(
        "group",
        "    fc_group_base_refresh(&g->base);\n",
        "",
        "test_gradient",
        "change_of_deferred_cast_requires_invalidate",
    ),
    "every backward visits parameters that defer no cast": Mutation(
        "gradient",
        "base->defers_casts && i < base->count; i++) {\n        FC_TRY(fc_param_begin_grad",
        "i < base->count; i++) {\n        FC_TRY(fc_param_begin_grad",
        "test_gradient",
        "null pointer",
    ),
    "one foreach copy is issued per shard": Mutation(
        "foreach",
        "if (f->sizes[i] == f->sizes[first]) {",
        "if (false) {",
        "test_foreach",
        '"fct_foreach_copy fct_foreach_copy" != "fct_foreach_copy"',
    ),
    "event is not returned to the pool": Mutation(
        "comm_ctx",
        "    FC_TRY_RAISED(fct_event_wait(e, waiter));\ndone:\n    fc_comm_put_event(c, e);",
        "    FC_TRY_RAISED(fct_event_wait(e, waiter));\ndone:\n    (void)c;",
        "test_group",
        "events_out == 0",
    ),
    "gathered rows are not released after backward": Mutation(
        "state",
        "return status == FC_OK && last ? fc_comm_release_rows(c) : status;",
        "return status;",
        "test_train",
        "rows are kept after the backward that reduced them",
    ),
    "backward ends without the agreement of the ranks": Mutation(
        "state",
        "    FC_TRY(await_agreements(it, &c->error));\n",
        "    (void)await_agreements;\n",
        "test_state",
        "[  FAILED  ] different_collectives_of_ranks_fail_the_backward",
    ),
    "agreement starts before the last reduction": Mutation(
        "state",
        "    FC_TRY(visit_states(it->states, it->count, false, start_agreement));\n"
        "    FC_TRY(visit_comms(it, c, end_backward_in_comm, last));\n",
        "    FC_TRY(visit_comms(it, c, end_backward_in_comm, last));\n"
        "    FC_TRY(visit_states(it->states, it->count, false, start_agreement));\n",
        "test_state",
        "[  FAILED  ] agreement_runs_while_reductions_complete",
    ),
    "launch does not restore the current device": Mutation(
        "transfer",
        "        fct_launch_leave(l->before);",
        "        (void)l->before;",
        "test_train",
        "launches",
    ),
    "gradient with other references is sent without a copy": Mutation(
        "reduce",
        "           fct_tensor_is_sole(plan->grads[i]);",
        "           true;",
        "test_reduce",
        "a gradient with another owner",
    ),
    "CPU-bound reduction overlaps with backward": Mutation(
        "reduce",
        "r->work != NULL && fct_work_is_cpu_bound(r->work)",
        "false",
        "test_reduce",
        "non_overlapping_reduction_completes_before_backward",
    ),
    "CPU-bound gather overlaps with backward": Mutation(
        "group",
        "fc_gather_is_cpu_bound(&g->gather, post_forward) ? FC_OK",
        "post_forward ? FC_OK",
        "test_group",
        "backward_prefetch_skips_cpu_bound_gather",
    ),
    "failed copy-out does not return its chunks": Mutation(
        "gather",
        "        fc_unsharded_return(a->base, a->pending.plan, &a->chunks);",
        "        (void)a;",
        "test_gather",
        "owned_chunks_survive_failed_copy_out",
    ),
    "buffers are not allocated from the process group": Mutation(
        "group_base",
        "    FC_TRY_RAISED(has ? fct_allocator_empty",
        "    FC_TRY_RAISED(numel < 0 ? fct_allocator_empty",
        "test_train",
        "in memory that is not from a process group's allocator",
    ),
    "gather buffer is allocated for another process group": Mutation(
        "gather",
        "fc_group_base_buffer(base, base->gather_memory, pending->pg,",
        "fc_group_base_buffer(base, base->gather_memory, &a->base->shard,",
        "test_train",
        "in memory for collectives of",
    ),
    "process group buffer is too large": Mutation(
        "gather",
        "fc_group_base_buffer(base, base->gather_memory, pending->pg, numel,",
        "fc_group_base_buffer(base, base->gather_memory, pending->pg, numel + chunk->numel,",
        "test_train",
        "an all-gather of ",
    ),
    "reduction uses chunks instead of process group memory": Mutation(
        "reduce",
        "FC_TRY(fc_group_base_has_memory(base, base->reduce_memory, &packed));",
        "(void)base;",
        "test_train",
        "chunks of 1 in memory that is not from a process group's allocator",
    ),
    "reduction of a direct post_backward is not recycled": Mutation(
        "group",
        "c->has_streams ? fc_reduce_order_compute(&g->reducer) : fc_reduction_recycle(c, 0);",
        "c->has_streams ? fc_reduce_order_compute(&g->reducer) : FC_OK;",
        "test_reduce",
        "streams || f.model->comm.reductions == 0",
    ),
    "run has offset 0 in its chunk": Mutation(
        "plan",
        "(fct_run){.chunk = chunk, .offset = offset, .numel = numel};",
        "(fct_run){.chunk = chunk, .offset = 0, .numel = numel};",
        "test_plan",
        "0x2",
    ),
    "process group of a memory pool is not released": Mutation(
        "group_base",
        "    fc_group_base_set_memory(base, NULL, NULL);",
        "    base->gather_memory = base->reduce_memory;",
        "test_group_base",
        "1 process groups",
    ),
    "row is released before its cast has finished": Mutation(
        "comm_ctx",
        "fct_event_wait(c->kept_rows[0].copied, c->reduce_stream) != 0",
        "c->events_out == SIZE_MAX",
        "test_comm_ctx",
        "kept_rows_are_released_after_their_casts",
    ),
    "extension hooks run on the compute stream": Mutation(
        "gather",
        "        previous = fct_stream_set_current(*pack_stream);",
        "        previous = fct_stream_current(base->device);",
        "test_gather_extended",
        "and is not ordered after it",
    ),
    "gather plan of earlier extension inputs is reused": Mutation(
        "gather",
        "(!extended && !plan->extended) ||\n                                "
        "fc_gather_plan_fits(plan, base->params, base->count)",
        "true",
        "test_gather_extended",
        "[  FAILED  ] extension_hooks_run_before_gather",
    ),
    "failed copy-out does not abandon the gather": Mutation(
        "gather",
        "        drop_inputs(a->base);\n        fc_gather_abandon(a);",
        "        drop_inputs(a->base);",
        "test_gather_extended",
        "failed_extended_copy_out_abandons_gather",
    ),
    "inner tensors of an extension keep their memory": Mutation(
        "extension",
        "    free_all(e->inner, e->inner_count);",
        "    (void)e;",
        "test_train",
        "bytes while sharded",
    ),
    "gathered outputs with shared storage are replaced": Mutation(
        "extension",
        "if (output->tensor == NULL || !fct_storage_is_shared(output->tensor)) {",
        "if (output->tensor != name) {",
        "test_extension",
        "output_shared_with_inner_tensor_is_not_replaced",
    ),
    "pre-backward does not refresh the group that it prefetches": Mutation(
        "state",
        "        FC_TRY(fc_group_visit_targets(s->groups[i], visit));",
        "        (void)s;",
        "test_train",
        "runs in a hook that has not refreshed the group",
    ),
    "chunk of a single rank is held after its reduction": Mutation(
        "reduce",
        "        fct_tensor_retain(r->output);\n        goto done;",
        "        fct_tensor_retain(r->output);\n        return FC_OK;",
        "test_train",
        "chunks after its reduction",
    ),
}

DRY_RUN_MUTATIONS = {
    "gather buffer is freed after its copy-out has ended": Mutation(
        "boundary_device",
        "    return issue_collective(FCD_ALL_GATHER, pg, output, work);",
        "    fct_tensor_retain(output);\n    fcd_defer_release(output);\n"
        "    return issue_collective(FCD_ALL_GATHER, pg, output, work);",
        "test_dry_run_model",
        "[  FAILED  ] gather_buffer_is_freed_at_the_end_of_its_copy_out",
    ),
    "moved memory is counted twice": Mutation(
        "boundary",
        "    from->storage->bytes = 0;\n    to->storage->number",
        "    to->storage->number",
        "test_dry_run_boundary",
        "[  FAILED  ] moved_memory_is_counted_once",
    ),
    "gradients of sharded parameters are not released": Mutation(
        "model",
        "    fct_tensor_release(p->grad);",
        "    (void)p;",
        "test_dry_run_model",
        "[  FAILED  ] all_objects_are_released_after_any_call",
    ),
    "memory of a gradient stays an activation": Mutation(
        "step",
        "    fcd_storage_reassign(storage, bytes, FCD_GRADIENTS);",
        "    fcd_storage_reassign(storage, bytes, FCD_ACTIVATIONS);",
        "test_dry_run_model",
        "[  FAILED  ] storage_becomes_the_memory_of_a_gradient",
    ),
}

RING_MUTATIONS = {
    "writer reuses memory that the slowest peer has not released": Mutation(
        "shm_ring",
        "        if (pending > largest) {",
        "        if (largest == 0) {",
        "test_shm_ring",
        "[  FAILED  ] reserve_waits_for_the_slowest_peer",
    ),
    "writer reserves one message more than header slots": Mutation(
        "shm_ring",
        "    if (pending >= HEADER_SLOTS) {",
        "    if (pending > HEADER_SLOTS) {",
        "test_shm_ring",
        "[  FAILED  ] reserve_fails_when_all_header_slots_are_used",
    ),
    "liveness lock is not taken": Mutation(
        "shm_ring",
        "        fcntl(fd, F_SETLK, &lock) == 0) {",
        "        lock.l_len == 1) {",
        "test_shm_ring",
        "[  FAILED  ] end_of_forked_child_does_not_close_the_ring",
    ),
    "forked child closes the ring of its parent": Mutation(
        "shm_ring",
        "    if (ring->pid == (int64_t)getpid()) {\n        atomic_store",
        "    {\n        atomic_store",
        "test_shm_ring",
        "[  FAILED  ] end_of_forked_child_does_not_close_the_ring",
    ),
    "waiter reads its doorbell after the check for messages": Mutation(
        "shm_ring",
        "        const uint32_t doorbell_value = atomic_load(&own->doorbell);\n"
        "        const int64_t remaining_ns = deadline_ns - now_ns();\n"
        "        if (remaining_ns <= 0 || shm_ring_seq(ring) != seen_seq) {\n"
        "            break;\n"
        "        }\n",
        "        const int64_t remaining_ns = deadline_ns - now_ns();\n"
        "        if (remaining_ns <= 0 || shm_ring_seq(ring) != seen_seq) {\n"
        "            break;\n"
        "        }\n"
        "        const uint32_t doorbell_value = atomic_load(&own->doorbell);\n",
        "test_shm_ring_sleep",
        "[  FAILED  ] change_at_any_step_of_a_waiter_prevents_its_sleep",
    ),
    "commit uses release order instead of seq_cst": Mutation(
        "shm_ring",
        "    atomic_store(&own->committed, seq + 1);",
        "    atomic_store_explicit(&own->committed, seq + 1, memory_order_release);",
        "test_shm_ring_sleep",
        "[  FAILED  ] waiter_that_sleeps_at_any_step_of_a_change_is_woken",
    ),
    "close mark is read after the commit counter": Mutation(
        "shm_ring",
        "        return closed != 0 ? SHM_RING_CLOSED",
        "        return atomic_load(&view->page->closed) != 0 ? SHM_RING_CLOSED",
        "test_shm_ring_sleep",
        "[  FAILED  ] peek_during_commit_and_close_returns_the_message",
    ),
    "length check of a message overflows": Mutation(
        "shm_ring",
        "copy.bytes > ring->capacity - copy.offset",
        "copy.offset + copy.bytes > ring->capacity",
        "test_shm_ring_untrusted",
        "[  FAILED  ] peek_of_invalid_header_returns_corrupt",
    ),
    "segment without F_SEAL_SHRINK is accepted": Mutation(
        "shm_ring",
        "seals >= 0 && (seals & F_SEAL_SHRINK) != 0 && ",
        "seals != 0x1000 && ",
        "test_shm_ring_untrusted",
        "[  FAILED  ] connect_refuses_files_that_are_not_rings",
    ),
}


TRANSPORT_MUTATIONS = {
    "ranks accept shared memory without connected rings": Mutation(
        "negotiation",
        "shm_transport_connect(transport, (int)fct_pg_rank(pg), world, handles);",
        "(int)fct_pg_rank(pg) < world;",
        "test_negotiation",
        "t->world > 1",
    ),
    "hash of issued collectives has no parameters": Mutation(
        "agreement",
        "    hash = fct_hash_add(hash, label->params);\n",
        "",
        "test_agreement",
        "[  FAILED  ] first_difference_is_described_on_all_ranks",
    ),
    "ranks with a flight recorder exchange hashes": Mutation(
        "negotiation",
        " (values[FLAGS] & AGREES) != 0 &&",
        "",
        "test_agreement",
        "[  FAILED  ] ranks_do_not_agree_if_one_of_them_cannot",
    ),
    "reduce-scatter runs the steps of an all-reduce": Mutation(
        "shm_collective",
        "request->kind == FCT_OP_ALL_REDUCE ? shm_all_reduce_plan(c)",
        "request->kind != FCT_OP_ALL_GATHER ? shm_all_reduce_plan(c)",
        "test_shm_collective",
        "r->kind == FCT_OP_ALL_REDUCE",
    ),
    "queue of the progress thread holds no reference to its task": Mutation(
        "progress",
        "    progress_task_retain(task); /* for the queue */\n",
        "",
        "test_progress",
        "progress_task_",
    ),
}
"""Bugs in csrc/transport and in the progress thread that assertions of preconditions detect."""


def run(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(part) for part in command], cwd=C_TESTS, env=TOOL_ENV, capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def objects() -> Path:
    """Returns the folder of the object files of the C tests, built without mutations."""
    mutations = [
        mutation
        for table in (MUTATIONS, DRY_RUN_MUTATIONS, TRANSPORT_MUTATIONS)
        for mutation in table.values()
    ]
    tests = " ".join(sorted({mutation.test for mutation in mutations}))
    made = run("make", "-s", "-C", C_TESTS, "run", f"TESTS={tests}")
    assert made.returncode == 0, made.stdout + made.stderr
    return BUILD


def mutate(mutation: Mutation, folder: Path, to: Path) -> Path:
    """Writes the mutated source of a module to folder ``to`` and returns its path."""
    source = folder / f"{mutation.module}.c"
    text = source.read_text()
    assert text.count(mutation.original) == 1, "the mutation no longer fits the code"
    mutated = to / source.name
    mutated.write_text(text.replace(mutation.original, mutation.replacement))
    return mutated


def check_failure(mutation: Mutation, folder: Path, *sources: str | Path) -> None:
    """Links options, sources and objects. The program must fail with the message."""
    program = folder / "mutated"
    linked = run("gcc", *sources, *LIBRARIES, "-o", program)
    assert linked.returncode == 0, linked.stderr
    completed = run(program)
    assert completed.returncode != 0
    assert mutation.message in completed.stdout + completed.stderr


@pytest.mark.parametrize("name", MUTATIONS)
def test_mutation_of_the_core_fails_the_named_assertion(
    name: str, objects: Path, tmp_path: Path
) -> None:
    mutation = MUTATIONS[name]
    mutated = mutate(mutation, ROOT / "csrc/core", tmp_path)
    core = [path for path in sorted((objects / "core").glob("*.o")) if path.stem != mutation.module]
    core = [path for path in core if (ROOT / "csrc/core" / f"{path.stem}.c").exists()]
    simulation = [objects / "tests" / f"{path.stem}.o" for path in sorted(C_TESTS.glob("sim*.c"))]
    check_failure(
        mutation,
        tmp_path,
        *(*FLAGS, f"-I{ROOT / 'csrc/core'}", *WRAPS, mutated, *core, *simulation),
        *(objects / f"kernels/{name}.o" for name in ("kernels_cpu", "backends")),
        objects / "tests" / f"{mutation.test}.o",
    )


@pytest.mark.parametrize("name", DRY_RUN_MUTATIONS)
def test_mutation_of_the_dry_run_fails_the_named_assertion(
    name: str, objects: Path, tmp_path: Path
) -> None:
    mutation = DRY_RUN_MUTATIONS[name]
    mutated = mutate(mutation, ROOT / "csrc/dry_run", tmp_path)
    core = [objects / f"core/{path.stem}.o" for path in (ROOT / "csrc/core").glob("*.c")]
    dry_run = [objects / f"dry_run/{path.stem}.o" for path in (ROOT / "csrc/dry_run").glob("*.c")]
    others = [path for path in dry_run if path.exists() and path.stem != mutation.module]
    check_failure(
        mutation,
        tmp_path,
        *(*FLAGS, f"-I{ROOT / 'csrc/dry_run'}", mutated, *core, *others),
        objects / "tests" / f"{mutation.test}.o",
    )


@pytest.mark.parametrize("name", TRANSPORT_MUTATIONS)
def test_mutation_of_the_transport_fails_the_named_assertion(
    name: str, objects: Path, tmp_path: Path
) -> None:
    mutation = TRANSPORT_MUTATIONS[name]
    folder = "bridge" if mutation.module == "progress" else "transport"
    mutated = mutate(mutation, ROOT / "csrc" / folder, tmp_path)
    others = [
        path
        for path in sorted((objects / "transport").glob("*.o"))
        if folder == "transport"
        and path.stem != mutation.module
        and (ROOT / f"csrc/transport/{path.stem}.c").exists()
        # Only these tests define the functions of the bridge that these modules call.
        and (
            path.stem not in ("agreement", "negotiation")
            or mutation.test in ("test_agreement", "test_negotiation")
        )
    ]
    check_failure(
        mutation,
        tmp_path,
        *(*FLAGS, f"-I{ROOT / 'csrc' / folder}", mutated, *others),
        *(objects / f"kernels/{name}.o" for name in ("kernels_cpu", "backends", "ring_cpu")),
        *(objects / "kernels/kernels_none.o", objects / "tests" / f"{mutation.test}.o"),
    )


@pytest.mark.parametrize("name", RING_MUTATIONS)
def test_mutation_of_the_shared_memory_ring_fails_the_named_assertion(
    name: str, tmp_path: Path
) -> None:
    mutation = RING_MUTATIONS[name]
    folder = tmp_path / "transport"
    folder.mkdir()
    for header in ("shm_ring.h", "op_tag.h"):
        (folder / header).write_text((ROOT / "csrc/transport" / header).read_text())
    (tmp_path / "bridge").symlink_to(ROOT / "csrc/bridge")
    mutate(mutation, ROOT / "csrc/transport", folder)
    check_failure(
        mutation,
        tmp_path,
        *(f"-I{tmp_path}", *FLAGS, C_TESTS / f"{mutation.test}.c"),
    )
