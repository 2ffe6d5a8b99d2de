"""Seeded bugs of csrc/core and csrc/dry_run, each with the C test that must detect it.

For each new assertion or test, add a mutation that fails it.
"""

from __future__ import annotations

from typing import NamedTuple


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
    "agreement without checksums starts after the reductions": Mutation(
        "state",
        "    if (c->checksums) {\n        FC_TRY(visit_states",
        "    if (c != NULL) {\n        FC_TRY(visit_states",
        "test_state",
        "[  FAILED  ] agreement_runs_while_reductions_complete",
    ),
    "agreement on checksums starts before the reductions": Mutation(
        "state",
        "    if (!c->checksums) {",
        "    if (c != NULL) {",
        "test_state",
        "[  FAILED  ] agreement_on_checksums_starts_after_the_reductions",
    ),
    "changed row has the checksum of the gathered rows": Mutation(
        "checksum",
        "gathered->own == packed->own ? gathered->rows : ~gathered->rows;",
        "gathered->rows;",
        "test_checksum",
        "[  FAILED  ] checksum_differs_if_the_own_row_has_changed_since_the_pack",
    ),
    "checksum omits the rows of other ranks": Mutation(
        "checksum",
        "    c->rows += fct_hash_add(of_slot, (uint64_t)row.row + 1);\n",
        "    c->rows += row.is_own ? fct_hash_add(of_slot, (uint64_t)row.row + 1) : 0;\n",
        "test_checksum",
        "[  FAILED  ] each_flipped_bit_of_a_gathered_row_changes_the_checksum",
    ),
    "checksum omits the chunks that belong to one parameter": Mutation(
        "transfer",
        "        if (!chunk->owned) {\n            continue;",
        "        if (chunk->numel > 0) {\n            continue;",
        "test_checksum",
        "[  FAILED  ] checksum_depends_on_neither_chunks_nor_blocks",
    ),
    "reset keeps the checksums": Mutation(
        "state",
        "            fc_group_base_drop_checksums(&state->groups[j]->base);\n",
        "",
        "test_checksum",
        "[  FAILED  ] reset_drops_the_checksums",
    ),
    "repeated copy-out adds its checksum again": Mutation(
        "gather",
        "        pending->checksummed = true;\n",
        "",
        "test_checksum",
        "[  FAILED  ] repeated_copy_out_adds_one_checksum",
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
        "r->work != NULL &&\n        fct_work_is_cpu_bound(r->work)",
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
    "uneven rows are rounded down to shards": Mutation(
        "layout",
        "fc_size_add(result.rows, world - 1, &rounded);",
        "fc_size_add(result.rows, 0, &rounded);",
        "test_layout",
        "[  FAILED  ] layout_of_five_rows_over_four_ranks_matches_torch_chunk",
    ),
    "strides of a shard ignore its inner dimensions": Mutation(
        "param",
        "        p->strides[d] = stride;",
        "        p->strides[d] = 1;",
        "test_param",
        "[  FAILED  ] param_init_sets_local_sizes_and_flat_numel",
    ),
    "gaps between gradients keep old memory": Mutation(
        "transfer",
        "if (!plan->chunks.split && fc_reduce_plan_gap(plan, i) > 0) {",
        "if (plan->chunks.split && fc_reduce_plan_gap(plan, i) > 0) {",
        "test_transfer",
        "[  FAILED  ] pack_gradients_fills_gaps_with_zeros",
    ),
    "sum is divided by the whole factor after a first division": Mutation(
        "divide",
        "    divide.after = total / divide.before;",
        "    divide.after = total;",
        "test_divide",
        "[  FAILED  ] product_of_all_divisors_equals_total_divisor",
    ),
    "mean over replicas is a sum": Mutation(
        "divide",
        "            divide.all_reduce_op = FCT_AVG;\n",
        "",
        "test_divide",
        "[  FAILED  ] wide_range_dtype_uses_backend_mean",
    ),
    "reduced row is not divided": Mutation(
        "reduction",
        "    if (r->divide_after != 1.0) {",
        "    if (r->divide_after == 0.0) {",
        "test_reduction",
        "[  FAILED  ] finish_divides_and_passes_gradient_once",
    ),
    "reductions that are kept are not counted": Mutation(
        "reduction",
        "    c->reductions = kept;",
        "    c->reductions = kept > 0;",
        "test_reduction",
        "[  FAILED  ] discard_keeps_order_of_other_reductions",
    ),
    "stream of a reduction's input does not wait for the input's last use": Mutation(
        "reduction",
        "    if (r->input_stream.id != current.id) {\n        FC_TRY_RAISED",
        "    if (false) {\n        FC_TRY_RAISED",
        "test_reduce",
        "[  FAILED  ] input_released_on_other_stream_is_reused_after_its_cast",
    ),
    "settled reductions drop the event for the stream of their input": Mutation(
        "reduction",
        "        if (r->input_stream.id == current.id) {\n            fc_comm_put_event",
        "        if (c->has_streams) {\n            fc_comm_put_event",
        "test_reduce",
        "[  FAILED  ] input_released_on_other_stream_is_reused_after_its_cast",
    ),
    "abandoned reduction orders only the current stream": Mutation(
        "reduction",
        "        if (r->input_stream.id != current.id) {\n            fc_comm_settle",
        "        if (false) {\n            fc_comm_settle",
        "test_reduce",
        "[  FAILED  ] input_released_on_other_stream_is_reused_after_its_cast",
    ),
    "gathers do not wait for the optimizer step": Mutation(
        "state",
        "        FC_TRY(make_gathers_wait(s, event));\n",
        "        (void)make_gathers_wait;\n",
        "test_train",
        "is not ordered after",
    ),
    "optimizer step does not change the version of a group": Mutation(
        "group_base",
        "(uint64_t)(uintptr_t)data) * prime + versions;",
        "(uint64_t)(uintptr_t)data) * prime;",
        "test_group",
        "[  FAILED  ] unshard_between_steps_gathers_written_shards_again",
    ),
    "copy-out does not wait for the gather stream": Mutation(
        "gather",
        "        FC_TRY_RAISED(fct_event_wait(a->pending.done, fct_stream_current(base->device)));",
        "        (void)a->pending.done;",
        "test_train",
        "is not ordered after",
    ),
    "reset does not wait for collectives in flight": Mutation(
        "comm_ctx",
        "        FC_TRY(fc_comm_order_streams(c, current, all[i]));",
        "        (void)current;",
        "test_comm_ctx",
        "[  FAILED  ] quiesce_orders_all_streams",
    ),
    "parameter whose swap failed is not restored": Mutation(
        "registration",
        "        size_t changed = *dirty ? base->count : i + 1;",
        "        size_t changed = *dirty ? base->count : i;",
        "test_registration",
        "[  FAILED  ] failed_swap_restores_own_state",
    ),
    "label of a reduction has no factor after the sum": Mutation(
        "label",
        "    hash = fct_hash_add(hash, bits_of(divide->after));\n",
        "",
        "test_label",
        "[  FAILED  ] label_of_reduction_depends_on_each_property",
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
