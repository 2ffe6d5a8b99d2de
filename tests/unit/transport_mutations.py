"""Seeded bugs of csrc/transport, csrc/kernels and the progress thread; see core_mutations.py."""

from __future__ import annotations

from core_mutations import Mutation

RING_MUTATIONS = {
    "writer reuses memory that the slowest peer has not released": Mutation(
        "shm_ring",
        "        if (pending > largest) {",
        "        if (largest == 0) {",
        "test_shm_ring",
        "[  FAILED  ] reserve_fails_until_the_slowest_peer_has_released",
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
        "[  FAILED  ] ring_change_at_any_step_of_a_waiter_prevents_its_sleep",
    ),
    "commit uses release order instead of seq_cst": Mutation(
        "shm_ring",
        "    atomic_store(&own->committed, seq + 1);",
        "    atomic_store_explicit(&own->committed, seq + 1, memory_order_release);",
        "test_shm_ring_sleep",
        "[  FAILED  ] waiter_that_sleeps_at_any_step_of_a_ring_change_is_woken",
    ),
    "closed flag is read after the commit counter": Mutation(
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
    "counter of released messages is stored with release order": Mutation(
        "shm_ring",
        "    atomic_store(&own->released, ring->read_seq);",
        "    atomic_store_explicit(&own->released, ring->read_seq, memory_order_release);",
        "test_shm_ring_sleep",
        "[  FAILED  ] waiter_that_sleeps_at_any_step_of_a_ring_change_is_woken",
    ),
    "wrapped message overlaps the oldest message": Mutation(
        "shm_ring",
        "    return bytes <= oldest - ring->end ? ring->end : full;",
        "    return bytes <= oldest ? ring->end : full;",
        "test_shm_ring",
        "[  FAILED  ] messages_of_all_sizes_arrive_intact_and_in_order",
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
        "    hash = fct_hash_add(hash, tag->label.params);\n",
        "",
        "test_agreement",
        "[  FAILED  ] first_difference_is_described_on_all_ranks",
    ),
    "block of labels has no hash of its first half": Mutation(
        "label_blocks",
        "fct_hash_add(fct_hash_add(FCT_HASH_EMPTY, first), second)",
        "fct_hash_add(FCT_HASH_EMPTY, second)",
        "test_label_blocks",
        "[  FAILED  ] only_blocks_with_another_label_have_another_hash",
    ),
    "block with an unknown label has a hash": Mutation(
        "label_blocks",
        "first == 0 || second == 0 ? 0 : ",
        "",
        "test_label_blocks",
        "[  FAILED  ] only_blocks_with_another_label_have_another_hash",
    ),
    "equal label is said to follow equal labels only": Mutation(
        "agreement",
        "oldest > 0 && first.hash != second.hash;",
        "oldest > 0 && !is_equal(&first, &second);",
        "test_sequence",
        "[  FAILED  ] first_different_collective_is_exact_only_if_hashes_were_equal_before",
    ),
    "interrupted agreement is not finished before the next collective": Mutation(
        "negotiation",
        "    if (shm_negotiation_check_stopped(n) != 0 || finish_agreement(n, pg) != 0) {",
        "    if (shm_negotiation_check_stopped(n) != 0) {",
        "test_agreement",
        "[  FAILED  ] collective_after_an_interrupted_agreement_finishes_it",
    ),
    "interrupted agreement waits although no agreement is needed": Mutation(
        "negotiation",
        "    return op_agreement_is_needed(&n->agreement) && (finishes || compares);",
        "    return finishes || (op_agreement_is_needed(&n->agreement) && compares);",
        "test_agreement",
        "[  FAILED  ] agreement_is_not_affected_by_an_interrupted_one",
    ),
    "ranks do not compare checksums": Mutation(
        "agreement",
        "if (find_ranks(summaries, world, CHECKSUMS, 1, &ranks)) {",
        "if (world == 0 && find_ranks(summaries, world, CHECKSUMS, 1, &ranks)) {",
        "test_agreement",
        "[  FAILED  ] checksums_are_compared_per_interval",
    ),
    "all-reduces and all-gathers have one list of checksums": Mutation(
        "checksums",
        "tag->kind == FCT_OP_ALL_GATHER ? GATHERS : ALL_REDUCES",
        "tag->kind != FCT_OP_REDUCE_SCATTER ? GATHERS : ALL_REDUCES",
        "test_agreement",
        "[  FAILED  ] checksums_are_compared_per_interval",
    ),
    "dropped checksums have the numbers of later ones": Mutation(
        "checksums",
        "        c->kinds[kind].count = 0;\n",
        "        c->kinds[kind].total -= c->kinds[kind].count;\n"
        "        c->kinds[kind].count = 0;\n",
        "test_agreement",
        "[  FAILED  ] dropped_checksum_is_not_that_of_an_older_interval",
    ),
    "ranks with a flight recorder exchange hashes": Mutation(
        "negotiation",
        " (values[FLAGS] & AGREES) != 0 &&",
        "",
        "test_agreement",
        "[  FAILED  ] ranks_start_no_agreement_if_one_of_them_cannot",
    ),
    "checksum of a rank shard omits its last piece": Mutation(
        "shm_collective",
        "        sum->hash = fct_hash_add(sum->hash, fck_checksum(data, end - begin));",
        "        const size_t bytes = end == s->bytes ? 0 : end - begin;\n"
        "        sum->hash = fct_hash_add(sum->hash, fck_checksum(data, bytes));",
        "test_shm_collective",
        "[  FAILED  ] gathered_shards_have_the_checksums_of_their_bytes",
    ),
    "rank shard has a checksum before it is complete": Mutation(
        "shm_collective",
        "    return sum->complete;",
        "    return sum->hash != 0;",
        "test_shm_collective",
        "[  FAILED  ] shards_that_are_not_complete_have_no_checksum",
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
    "every size of a collective matches the prediction": Mutation(
        "sequence",
        "    return predicted != 0 && (signature == 0 || signature == predicted);\n",
        "    return predicted != 0;\n",
        "test_sequence",
        "[  FAILED  ] collective_of_another_size_than_predicted_is_a_departure",
    ),
    "ranks do not compare the exchanged sizes": Mutation(
        "sequence",
        "signatures[i] != signatures[0] ? i : *rank;",
        "signatures[i] != signatures[i] ? i : *rank;",
        "test_sequence",
        "[  FAILED  ] collective_of_different_size_raises_on_all_ranks_before_its_issue",
    ),
    "interrupted exchange counts for another collective": Mutation(
        "sequence",
        "    if (offered != signature) {",
        "    if (offered == 0) {",
        "test_sequence",
        "[  FAILED  ] interrupted_exchange_belongs_to_one_collective",
    ),
    "sizes are compared before all ranks have read the rounds": Mutation(
        "negotiation",
        "    return n->agrees && n->gathers >= n->fallback_gathers && get_state(n) == DECLINED;\n",
        "    return n->agrees && get_state(n) == DECLINED;\n",
        "test_sequence",
        "[  FAILED  ] ranks_begin_to_compare_at_the_same_collective",
    ),
    "stopped process group issues collectives": Mutation(
        "negotiation",
        "    if (n->stopped[0] != '\\0') {",
        "    if (n->stopped[0] == '\\1') {",
        "test_sequence",
        "[  FAILED  ] collectives_of_a_stopped_group_raise",
    ),
    "context with different successors predicts the first one": Mutation(
        "prediction",
        "        p->next->value = 0;\n",
        "",
        "test_prediction",
        "[  FAILED  ] context_with_different_successors_gives_no_prediction",
    ),
    "shortest context decides": Mutation(
        "prediction",
        "    int i = OP_CONTEXTS;\n",
        "    int i = 1;\n",
        "test_prediction",
        "[  FAILED  ] longest_known_context_decides_the_prediction",
    ),
    "interval of an agreement is not emptied at its start": Mutation(
        "agreement",
        "    a->count = 0;\n    a->unknown = false;",
        "    a->unknown = false;",
        "test_agreement",
        "[  FAILED  ] equal_collectives_cost_one_round_per_interval",
    ),
    "unknown label makes later intervals unknown": Mutation(
        "agreement",
        "    a->count = 0;\n    a->unknown = false;",
        "    a->count = 0;",
        "test_agreement",
        "[  FAILED  ] rank_with_unknown_collectives_is_equal_to_every_rank",
    ),
    "agreement compares all ranks with rank 0 only": Mutation(
        "agreement",
        "    while (first < world && summaries[first * SUMMARY_INTEGERS + field] == 0) {",
        "    while (first < world && world == 0) {",
        "test_agreement",
        "[  FAILED  ] rank_with_unknown_collectives_is_equal_to_every_rank",
    ),
    "agreement does not read round 1 first": Mutation(
        "negotiation",
        "    if (needed && n->capabilities != NULL &&",
        "    if (n->agreement.count == UINT64_MAX &&",
        "test_agreement",
        "[  FAILED  ] agreement_reads_round_1_first",
    ),
    "rank with the guard off takes part in agreements": Mutation(
        "negotiation",
        " && values[PLAN] != FCT_PLAN_OFF;",
        ";",
        "test_agreement",
        "[  FAILED  ] ranks_start_no_agreement_if_one_of_them_cannot",
    ),
    "unknown label of this rank differs from all": Mutation(
        "op_label",
        "    return a->unit == 0 || b->unit == 0 ||",
        "    return b->unit == 0 ||",
        "test_shm_collective",
        "[  FAILED  ] collective_without_label_matches_every_label",
    ),
    "element is split between two messages": Mutation(
        "shm_collective",
        "SHM_MAX_MESSAGE / shards_in_message(c) / CACHE_LINE * CACHE_LINE;",
        "SHM_MAX_MESSAGE / shards_in_message(c);",
        "test_shm_collective",
        "[  FAILED  ] collectives_of_all_sizes_have_the_expected_values",
    ),
    "sums are sent before the parts of peers are read": Mutation(
        "shm_all_reduce",
        "    return messages_read >= ((const shm_collective *)op)->steps[message].after;",
        "    return messages_read + 1 >= ((const shm_collective *)op)->steps[message].after;",
        "test_shm_collective",
        "[  FAILED  ] collectives_of_all_sizes_have_the_expected_values",
    ),
    "operation is complete before its last message is written": Mutation(
        "shm_transport",
        "    if (op->read == op->message_count && t->writing != op) {",
        "    if (op->read + 1 >= op->message_count && t->writing != op) {",
        "test_shm_collective",
        "[  FAILED  ] ",
    ),
}
"""Bugs in csrc/transport and in the progress thread."""

KERNEL_MUTATIONS = {
    "block that is much larger than the request is reused": Mutation(
        "pool_cpu",
        "        if (block->bytes >= bytes && block->bytes - bytes <= block->bytes / WASTE) {",
        "        if (block->bytes >= bytes) {",
        "test_pool",
        "[  FAILED  ] block_is_reused_only_for_similar_size",
    ),
    "peak of an old round limits the pool": Mutation(
        "pool_cpu",
        "    pool.peaks[pool.round] = 0;\n",
        "",
        "test_pool",
        "Test setup failed",
    ),
    "failed allocation raises the peak": Mutation(
        "pool_cpu",
        "    fck_block *removed = remove_oldest(max_pool_bytes(bytes) - bytes);\n",
        "    add_used(bytes);\n"
        "    pool.facts.used_bytes -= bytes;\n"
        "    fck_block *removed = remove_oldest(max_pool_bytes(bytes) - bytes);\n",
        "test_pool",
        "[  FAILED  ] failed_allocation_is_not_counted",
    ),
    "chunks of a gradient are not padded with zeros": Mutation(
        "kernels_cpu",
        "    if (filled < g->chunk) {",
        "    if (filled < 0) {",
        "test_kernels",
        "[  FAILED  ] ",
    ),
}
