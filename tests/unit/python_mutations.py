"""Seeded bugs of the Python package, each with the test that must detect it."""

from __future__ import annotations

from typing import NamedTuple


class PythonMutation(NamedTuple):
    file: str
    """The mutated file, relative to the package ``fsdp_c``."""
    original: str
    """The original text; it occurs once in the file."""
    replacement: str
    test: str
    """The test that must fail: a file of ``tests`` and, after ``::``, a part of the name."""
    message: str
    """Text in the output of the failed test."""


PYTHON_MUTATIONS = {
    "step of an accelerated optimizer does not change version counters": PythonMutation(
        "optim.py",
        "        torch.autograd.graph.increment_version(params)\n",
        "",
        "unit/test_optim.py::test_backward_of_graph_from_before_a_step_raises",
        "DID NOT RAISE",
    ),
    "recipe of an optimizer ignores whether an option is zero": PythonMutation(
        "optim.py",
        "return type(value), bool(value), value < 0",
        "return (type(value),)",
        "unit/test_optim.py::test_accelerated_step_after_option_changes",
        "IndexError: list index out of range",
    ),
    "momentum keeps the local tensor as its key": PythonMutation(
        "optim.py",
        "stored = optimizer.state.pop(local, None)",
        "stored = optimizer.state.get(local)",
        "unit/test_optim.py::test_checkpoint_moves_between_accelerated_and_torch_optimizer",
        "KeyError",
    ),
    "moving average uses the decay as the weight of the new value": PythonMutation(
        "ema.py",
        "_foreach_lerp_(averages, weights, 1 - decay)",
        "_foreach_lerp_(averages, weights, decay)",
        "unit/test_contexts_and_ema.py::test_ema_is_bit_equal_to_averaged_model_of_torch",
        "torch.equal",
    ),
    "no_sync leaves all-reduces off": PythonMutation(
        "no_sync.py",
        "            group.all_reduce_grads = all_reduce_grads\n",
        "",
        "unit/test_contexts_and_ema.py::test_nested_no_sync_restores_settings_after_exception",
        "At index 0 diff: (True, False) != (True, True)",
    ),
    "rank that writes a report answers no departing rank": PythonMutation(
        "_runtime/stall_monitor.py",
        "            if not self._stopped:  # ranks that depart",
        "            if False:  # ranks that depart",
        "unit/test_stall_monitor.py::test_rank_that_writes_a_report_answers_departing_ranks",
        "assert []",
    ),
    "infinity norm of an empty shard is infinite": PythonMutation(
        "_runtime/grad_norm.py",
        "neutral_norm = 0.0 if norm_type > 0 else math.inf",
        "neutral_norm = math.inf",
        "unit/test_clip.py::test_clip_of_empty_shards_by_infinity_norm_succeeds",
        "assert tensor(inf) == 0.0",
    ),
    "shard of a rank begins at a multiple of its own rows": PythonMutation(
        "_runtime/param_shard.py",
        "start = self._shard_rank * self.chunk_rows",
        "start = self._shard_rank * self.local_rows",
        "unit/test_param_template.py::test_shards_of_uneven_rows",
        "torch.equal",
    ),
    "every bucket of a load has the first rows of the tensor": PythonMutation(
        "_checkpoint/buckets.py",
        "tensor.narrow(0, chunk.first_row, chunk.sizes[0])",
        "tensor.narrow(0, 0, chunk.sizes[0])",
        "unit/test_load.py::test_load_with_random_shapes_placements_and_bucket_sizes_fills_own",
        "AssertionError: p0",
    ),
    "failed call does not restore hooks and parameters": PythonMutation(
        "_runtime/transaction.py",
        "            self.values[name].update(content)\n",
        "",
        "unit/test_keyboard_interrupt.py::test_sharding_call_interrupted_at_sampled_lines",
        "== []",
    ),
    "failed assignment to a mesh info keeps the new value": PythonMutation(
        "_runtime/meshes.py",
        "            object.__setattr__(self, name, previous)\n",
        "            pass\n",
        "unit/test_process_groups.py",
        "shard_process_group",
    ),
    "padding of all ranks is not counted": PythonMutation(
        "_auto_shard/budget.py",
        "return -(-rows // ranks) * ranks * ",
        "return rows * ",
        "unit/test_plan.py::test_max_transient_includes_padding_of_all_ranks",
        "DID NOT RAISE",
    ),
    "requires_grad of a parameter is not part of the plan": PythonMutation(
        "_runtime/plan_hash.py",
        'frozen = "" if param.sharded_param.requires_grad else ", frozen"',
        'frozen = ""',
        "distributed/test_divergence.py::test_different_models",
        "ranks have different messages",
    ),
    "rank that leaves does not decrement the counter": PythonMutation(
        "_runtime/departures.py",
        "            store.add(key, -1)\n",
        "",
        "unit/test_departures.py",
        "assert 2 == (True + ",
    ),
    "open request of a rank does not shorten the wait for the next comparison": PythonMutation(
        "_runtime/label_comparison.py",
        " or get_departures().has_open_requests()",
        "",
        "unit/test_label_comparison.py",
        "assert False == True",
    ),
    "request names a block that the neighbor drops before its answer": PythonMutation(
        "_runtime/label_comparison.py",
        " + 3 * self._issued",
        "",
        "unit/test_label_comparison.py",
        "the neighbor has dropped the block",
    ),
    "rank issues the collective although another rank leaves": PythonMutation(
        "_runtime/departures.py",
        "or not self._decide(store, key)",
        "",
        "unit/test_departures.py::test_departing_rank_stores_its_decision_before_it_issues",
        "KeyError: 'key/decision'",
    ),
    "stop request is published once": PythonMutation(
        "_runtime/departures.py",
        "                    self.publish(request)\n",
        "                    pass\n",
        "unit/test_departures.py",
        "assert [('group', 'the text')] == ",
    ),
    "corrupted data stops other process groups": PythonMutation(
        "_runtime/other_groups.py",
        "(collective mismatch|",
        "(collective mismatch|different data after|",
        "unit/test_other_groups.py",
        "The other process groups of the model are stopped",
    ),
    "process groups without further ranks are stopped": PythonMutation(
        "_runtime/other_groups.py",
        "if not ranks.issuperset(dist.get_process_group_ranks(process_group)):",
        "if ranks:",
        "unit/test_other_groups.py",
        "first extra item: 'part'",
    ),
    "position of a rank has the wait that began last": PythonMutation(
        "_runtime/stall_report.py",
        "wait = min(waits,",
        "wait = max(waits,",
        "unit/test_stall.py::test_position_in_stall_report_has_the_longest_wait",
        "all-gather of 'a'",
    ),
    "failure is searched in the newest collective only": PythonMutation(
        "_runtime/stall_report.py",
        "key=lambda record: record.end or record.waiting",
        "key=lambda record: record.number",
        "unit/test_stall.py::test_stall_report_failure",
        "assert None == Record(",
    ),
    "message swaps the values of the ranks": PythonMutation(
        "_runtime/plan_hash.py",
        "{has} {value}; {other_has} {other_value}",
        "{has} {other_value}; {other_has} {value}",
        "distributed/test_divergence.py::test_different_models",
        "CPU offload of unit 'blocks.0': rank 0 has",
    ),
    "state of freed modules stays in the list of states": PythonMutation(
        "_runtime/weak_modules.py",
        " if other is not state]",
        "]",
        "unit/test_reference_counts.py::test_deleted_model_is_freed_at_once",
        "== []",
    ),
    "state of freed modules stays a target of prefetches": PythonMutation(
        "_runtime/weak_modules.py",
        "if state in targets:",
        "if state not in targets:",
        "unit/test_reference_counts.py::test_replaced_unit_leaves_the_lists_of_the_other_states",
        "== []",
    ),
    "hooks of a list of modules own the modules": PythonMutation(
        "_runtime/forward_hooks.py",
        "cell.cell_contents = _WeakKey(content)",
        "pass",
        "unit/test_reference_counts.py::test_deleted_model_is_freed_at_once",
        "== []",
    ),
    "pass of a freed root is forgotten": PythonMutation(
        "_runtime/weak_modules.py",
        "roots.note_freed(state)",
        "pass",
        "unit/test_stall.py::test_interrupted_pass_of_a_freed_model_is_kept",
        "'' == 'forward'",
    ),
}
