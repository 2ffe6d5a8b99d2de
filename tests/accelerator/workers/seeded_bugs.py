"""Bugs that the simulated device must report: each breaks one ordering point of fsdp_c.

A bug is a scenario, a fault of call_faults.py, and the kind and stack of the calls to break. Each
matching call is broken in a separate run, until the device reports the expected finding.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import call_faults
import sim_tools
import simulated


class Bug(NamedTuple):
    scenario: str
    """Name in ``sim_tools.SCENARIOS``."""
    fault: str
    """Effect on the broken call: "drop", "wrong stream", "other stream" or "early free"."""
    kind: str
    """Kind of the calls to break, such as "wait", "record" or "allocate"."""
    path: tuple[str, ...]
    """Functions that the stack contains in this order, innermost first. Other functions may be
    between them."""
    expected: str = "race"
    """Text that the finding contains."""


BUGS = {
    "a gather does not wait for the optimizer": Bug(
        "plain", "drop", "wait", ("fc_state_begin_iteration",)
    ),
    "the event of the optimizer is not recorded": Bug(
        "plain", "drop", "record", ("fc_state_begin_iteration",)
    ),
    "a gather does not wait for the optimizer's event": Bug(
        "optimizer_event", "drop", "wait", ("begin_iteration",)
    ),
    "an all-gather does not wait for the pack": Bug(
        "plain", "drop", "wait", ("fc_comm_order_streams", "fc_gather_start"), "all_gather"
    ),
    "the copy-out does not wait for the all-gather": Bug(
        "plain", "drop", "wait", ("fc_gather_await", "fc_group_pre_forward"), "unpack"
    ),
    "in backward, the copy-out does not wait for the all-gather": Bug(
        "plain", "drop", "wait", ("fc_gather_await", "fc_group_pre_backward"), "unpack"
    ),
    "the copy-out does not wait for an asynchronous all-gather": Bug(
        "asynchronous_gathers",
        "drop",
        "work wait",
        ("fc_process_group_complete", "fc_gather_await"),
        "unpack",
    ),
    "the end of an all-gather is recorded on another stream": Bug(
        "plain", "wrong stream", "record", ("fc_comm_record", "fc_gather_start"), "unpack"
    ),
    "a kept gather buffer is released before its copy-out": Bug(
        "plain", "drop", "wait", ("fc_comm_release_gather", "fc_group_wait_unshard")
    ),
    "the last gather buffer of a forward is released before its copy-out": Bug(
        "plain", "drop", "wait", ("fc_comm_release_gather", "fc_state_end_forward")
    ),
    "in backward, a gather buffer is released before its copy-out": Bug(
        "plain", "drop", "wait", ("fc_comm_gather_streams_wait", "fc_gather_end_copy_out")
    ),
    "the end of a copy-out is recorded on another stream": Bug(
        "on_a_side_stream", "wrong stream", "record", ("fc_comm_record", "fc_gather_end_copy_out")
    ),
    "a gather buffer is freed as soon as the all-gather is issued": Bug(
        "plain", "early free", "allocate", ("fc_gather_start", "fc_group_pre_forward"), "allocation"
    ),
    "a smaller group's shards are gathered before their copy is done": Bug(
        "smaller_group_after_forward", "drop", "record", ("fc_group_post_forward",)
    ),
    "a reduction does not wait for the gradients": Bug(
        "plain", "drop", "wait", ("fc_comm_order_streams", "fc_reduce_run"), "reduce_scatter"
    ),
    "the gradients are packed on another stream": Bug(
        "plain", "other stream", "current", ("fc_transfer_pack_gradients",), "pack_gradients"
    ),
    "an all-reduce does not wait for the reduce-scatter": Bug(
        "hsdp_mixed", "drop", "wait", ("fc_comm_order_streams", "fc_reduce_run"), "all_reduce"
    ),
    "an all-reduced buffer is reused before its cast": Bug(
        "hsdp_of_six_units", "drop", "wait", ("fc_comm_keep_output",), "allocation"
    ),
    "a reduce-scatter's input is freed before it is done": Bug(
        "plain", "drop", "wait", ("fc_reduction_recycle", "reduce"), "allocation"
    ),
    "a reduce-scatter's input is freed when it is issued": Bug(
        "plain", "early free", "allocate", ("fc_reduce_run", "call_post_backward"), "allocation"
    ),
    "the optimizer does not wait for the last reduction": Bug(
        "in_float16", "drop", "wait", ("fc_reduce_settle", "fc_iteration_end_backward")
    ),
    "the end of a reduction is recorded on another stream": Bug(
        "plain", "wrong stream", "record", ("fc_comm_record", "fc_reduce_run"), "allocation"
    ),
    "a post-backward hook runs on a thread with another stream": Bug(
        "plain", "other stream", "current", ("fc_reduce_run", "call_post_backward")
    ),
    "a pre-backward hook runs on a thread with another stream": Bug(
        "plain", "other stream", "current", ("fc_transfer_unpack", "fc_group_pre_backward")
    ),
    "the end of a backward runs on a thread with another stream": Bug(
        "in_float16", "other stream", "current", ("fc_reduce_settle", "fc_iteration_end_backward")
    ),
    "a gather buffer from the process group is freed as soon as the all-gather is issued": Bug(
        "memory_from_the_group",
        "early free",
        "allocate",
        ("fc_gather_start", "fc_group_pre_forward"),
        "allocation",
    ),
    "a reduce-scatter's input from the process group is freed when it is issued": Bug(
        "memory_from_the_group",
        "early free",
        "allocate",
        ("fc_reduce_run", "call_post_backward"),
        "allocation",
    ),
    "the copy-out does not wait for an all-gather in the process group's memory": Bug(
        "memory_from_the_group",
        "drop",
        "wait",
        ("fc_gather_await", "fc_group_pre_forward"),
        "unpack",
    ),
    "a reduction in the process group's memory does not wait for the gradients": Bug(
        "memory_from_the_group",
        "drop",
        "wait",
        ("fc_comm_order_streams", "fc_reduce_run"),
        "reduce_scatter",
    ),
    "an offloaded group's gather does not wait for its copy-in": Bug(
        "offload", "drop", "wait", ("fc_comm_order_streams", "fc_gather_start"), "all_gather"
    ),
    "an offloaded group's copy-out does not wait for its gather": Bug(
        "offload", "drop", "wait", ("fc_gather_await", "fc_group_pre_forward"), "unpack"
    ),
    "the end of the gradients' copy to the host is recorded on another stream": Bug(
        "offload_read_at_once",
        "wrong stream",
        "record",
        ("fc_comm_record", "fc_reduce_run"),
        "of the host",
    ),
    "a manual finalization does not wait for the gradients' copy to the host": Bug(
        "manual_finalization_offloaded",
        "drop",
        "synchronize",
        ("fc_reduce_settle", "fc_iteration_complete"),
        "of the host",
    ),
    "an all-reduced buffer is reused before its copy to the host": Bug(
        "offload_hsdp_of_six_units", "drop", "wait", ("fc_comm_keep_output",), "allocation"
    ),
    "an offloaded gradient is used before it is on the host": Bug(
        "offload_read_at_once",
        "drop",
        "synchronize",
        ("fc_iteration_end_backward",),
        "of the host",
    ),
    "a custom reduce-scatter's input is freed before it is done": Bug(
        "custom_collectives", "drop", "wait", ("fc_reduce_run",), "reduce_scatter"
    ),
    "a reduce hook does not wait for the reduce-scatter": Bug(
        "reduce_hook", "drop", "wait", ("fc_comm_order_streams", "fc_reduce_run"), "mul"
    ),
    "in double backward, an all-gather does not wait for the pack": Bug(
        "double_backward",
        "drop",
        "wait",
        ("fc_comm_order_streams", "fc_gather_start", "fc_state_pre_double_backward"),
        "all_gather",
    ),
    "in double backward, the copy-out does not wait for the all-gather": Bug(
        "double_backward",
        "drop",
        "wait",
        ("fc_gather_await", "fc_state_pre_double_backward"),
        "unpack",
    ),
    "in double backward, a gather buffer is released before its copy-out": Bug(
        "double_backward",
        "drop",
        "wait",
        ("fc_gather_end_copy_out", "fc_state_pre_double_backward"),
        "allocation",
    ),
    "a manual finalization does not wait for the gradients": Bug(
        "manual_finalization",
        "drop",
        "wait",
        ("fc_comm_order_streams", "fc_reduce_run", "fc_iteration_finalize"),
        "reduce_scatter",
    ),
    "a manual finalization frees an input before its reduce-scatter is done": Bug(
        "manual_finalization",
        "drop",
        "wait",
        ("fc_reduction_recycle", "fc_iteration_finalize"),
        "allocation",
    ),
    "a manual finalization frees an input before it is done for the stream that packed it": Bug(
        "manual_finalization_on_another_stream",
        "drop",
        "wait",
        ("fc_reduction_recycle", "fc_iteration_complete"),
        "allocation",
    ),
    "the handle of a manual finalization does not wait": Bug(
        "manual_finalization_in_float16",
        "drop",
        "wait",
        ("fc_reduce_settle", "fc_iteration_complete"),
    ),
}


def matches(call: call_faults.CallSite, bug: Bug) -> bool:
    """Returns whether the call has the bug's kind and its stack contains ``bug.path`` in order."""
    functions = iter(call.stack)
    return call.kind == bug.kind and all(
        any(name in function for function in functions) for name in bug.path
    )


def matching_calls(bug: Bug) -> list[int]:
    """Returns the indices of the calls that match the bug.

    The run has the bug's fault, because the fault selects the kinds of calls that the device logs.
    The run has no index, so no call fails.
    """
    calls = call_faults.run(bug.scenario, fault=bug.fault).calls
    return [index for index, call in enumerate(calls) if matches(call, bug)]


def expected_findings(bug: Bug) -> list[str]:
    """Breaks the matching calls in turn until the device reports a finding that contains
    ``bug.expected``. Returns these findings."""
    indices = matching_calls(bug)
    if not indices:
        return ["the bug matches no call of the scenario"]
    for index in indices:
        findings = call_faults.run(bug.scenario, fault=bug.fault, at=index).findings
        expected = [finding for finding in findings if bug.expected in finding]
        if expected:
            return expected
    return []


EARLY_READS = (
    "a gather does not wait for the optimizer",
    "an all-gather does not wait for the pack",
    "the copy-out does not wait for the all-gather",
    "in backward, the copy-out does not wait for the all-gather",
    "a reduction does not wait for the gradients",
    "the gradients are packed on another stream",
    "the optimizer does not wait for the last reduction",
)
"""Bugs by which memory is read too early. These bugs change bits if the device delays writes."""

SEEDS = 8


def count_wrong_runs(bug: Bug) -> int:
    """Runs the scenario with the bug and delayed writes, over all seeds. Returns the number of
    records that differ from the record of a run without bug and delays."""
    expected = call_faults.run(bug.scenario).record
    indices = matching_calls(bug)
    wrong = 0
    for seed in range(1, SEEDS + 1):
        simulated.start().delay_writes(seed)
        for index in indices[:4]:
            record = call_faults.run(bug.scenario, fault=bug.fault, at=index).record
            wrong += record != expected
    simulated.start().delay_writes(0)
    return wrong


def count_wrong_runs_without_bug(name: str) -> int:
    """Runs the scenario with delayed writes, over all seeds. Returns the number of records that
    differ from the record of a run without delays."""
    expected = call_faults.run(name).record
    wrong = 0
    for seed in range(1, SEEDS + 1):
        simulated.start().delay_writes(seed)
        wrong += call_faults.run(name).record != expected
    simulated.start().delay_writes(0)
    return wrong


EARLY_OVERWRITES = (
    "a kept gather buffer is released before its copy-out",
    "the last gather buffer of a forward is released before its copy-out",
    "in backward, a gather buffer is released before its copy-out",
    "a gather buffer is freed as soon as the all-gather is issued",
    "an all-reduced buffer is reused before its cast",
    "a reduce-scatter's input is freed before it is done",
    "a custom reduce-scatter's input is freed before it is done",
    "in double backward, a gather buffer is released before its copy-out",
    "a manual finalization frees an input before its reduce-scatter is done",
)
"""Bugs by which memory is overwritten too early. These bugs change bits if the device executes
recorded writes before earlier readers (``replay_early_writes``)."""


def count_early_writes(bug: Bug) -> tuple[int, int]:
    """Counts writes that can come early, in runs with the bug.

    Returns the number of such writes in all runs. The second value is the number of runs with such
    writes whose record equals that of a run without the bug.
    """
    expected = call_faults.run(bug.scenario).record
    writes = unchanged_runs = 0
    for index in matching_calls(bug)[:4]:
        count, replay = call_faults.replay_early_writes(bug.scenario, bug.fault, index)
        writes += count
        unchanged_runs += count > 0 and replay.record == expected
    return writes, unchanged_runs


class Results(NamedTuple):
    findings: dict[str, list[str]]
    """Result of ``expected_findings`` by bug."""
    wrong_under_delay: dict[str, int]
    """Result of ``count_wrong_runs`` by bug."""
    wrong_without_bug: dict[str, int]
    """Result of ``count_wrong_runs_without_bug`` by scenario."""
    early_writes: dict[str, tuple[int, int]]
    """Result of ``count_early_writes`` by bug."""
    early_writes_without_bug: dict[str, int]
    """Writes that can come early without a bug, by scenario."""


def run(rank: int, world_size: int) -> Results:
    """Runs every bug in a rank."""
    warnings.simplefilter("ignore")
    sim_tools.init_loopback_group()
    simulated.use_kernels(True)
    read_scenarios = {BUGS[name].scenario for name in EARLY_READS}
    overwrite_scenarios = {BUGS[name].scenario for name in EARLY_OVERWRITES}
    return Results(
        {name: expected_findings(bug) for name, bug in BUGS.items()},
        {name: count_wrong_runs(BUGS[name]) for name in EARLY_READS},
        {name: count_wrong_runs_without_bug(name) for name in read_scenarios},
        {name: count_early_writes(BUGS[name]) for name in EARLY_OVERWRITES},
        {name: call_faults.replay_early_writes(name)[0] for name in overwrite_scenarios},
    )
