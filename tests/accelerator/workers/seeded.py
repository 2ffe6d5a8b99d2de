"""Bugs that the simulated device has to find: each breaks one ordering point of fsdp_c.

A bug names a scenario, what goes wrong, the kind of call and functions of the extension that lead
to it. Each call that fits is broken in a run of its own, until one is found.
"""

from __future__ import annotations

import warnings
from typing import NamedTuple

import faults
import sim_tools
import simulated


class Bug(NamedTuple):
    scenario: str
    fault: str
    kind: str
    path: tuple[str, ...]
    """Functions on the stack, innermost first, others between them."""
    shows: str = "race"
    """In the finding."""


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
        "plain", "drop", "wait", ("fc_comm_order_streams", "issue_gather"), "all_gather"
    ),
    "the copy-out does not wait for the all-gather": Bug(
        "plain", "drop", "wait", ("fc_gather_await", "fc_group_pre_forward"), "unpack"
    ),
    "in backward, the copy-out does not wait for the all-gather": Bug(
        "plain", "drop", "wait", ("fc_gather_await", "fc_group_pre_backward"), "unpack"
    ),
    "the copy-out does not wait for an asynchronous all-gather": Bug(
        "asynchronous_gathers", "drop", "work wait", ("fc_link_wait", "fc_gather_await"), "unpack"
    ),
    "the end of an all-gather is recorded on another stream": Bug(
        "plain", "wrong stream", "record", ("fc_comm_record", "issue_gather"), "unpack"
    ),
    "a kept gather buffer is released before its copy-out": Bug(
        "plain", "drop", "wait", ("fc_comm_release_kept", "fc_group_wait_unshard")
    ),
    "the last gather buffer of a forward is released before its copy-out": Bug(
        "plain", "drop", "wait", ("fc_comm_release_kept", "fc_state_end_forward")
    ),
    "in backward, a gather buffer is released before its copy-out": Bug(
        "plain", "drop", "wait", ("fc_comm_gather_streams_wait", "fc_gather_end_copy_out")
    ),
    "the end of a copy-out is recorded on another stream": Bug(
        "on_a_side_stream", "wrong stream", "record", ("fc_comm_record", "fc_gather_end_copy_out")
    ),
    "a gather buffer is freed as soon as the all-gather is issued": Bug(
        "plain", "early free", "allocate", ("issue_gather", "fc_group_pre_forward"), "allocation"
    ),
    "a smaller group's shards are gathered before they are there": Bug(
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
    "an all-reduced row is reused before its cast": Bug(
        "hsdp_of_six_units", "drop", "wait", ("fc_comm_keep_row",), "allocation"
    ),
    "a reduce-scatter's input is freed before it is done": Bug(
        "plain", "drop", "wait", ("fc_reduction_recycle", "reduce"), "allocation"
    ),
    "a reduce-scatter's input is freed when it is issued": Bug(
        "plain", "early free", "allocate", ("fc_reduce_run", "call_post_backward"), "allocation"
    ),
    "the optimizer does not wait for the last reduction": Bug(
        "half", "drop", "wait", ("fc_reduce_settle", "fc_iteration_end_backward")
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
        "half", "other stream", "current", ("fc_reduce_settle", "fc_iteration_end_backward")
    ),
    "a gather buffer of the group's is freed as soon as it is issued": Bug(
        "memory_from_the_group",
        "early free",
        "allocate",
        ("issue_gather", "fc_group_pre_forward"),
        "allocation",
    ),
    "a reduce-scatter's input of the group's is freed when it is issued": Bug(
        "memory_from_the_group",
        "early free",
        "allocate",
        ("fc_reduce_run", "call_post_backward"),
        "allocation",
    ),
    "the copy-out does not wait for a gather over the group's memory": Bug(
        "memory_from_the_group",
        "drop",
        "wait",
        ("fc_gather_await", "fc_group_pre_forward"),
        "unpack",
    ),
    "a reduction over the group's memory does not wait for the gradients": Bug(
        "memory_from_the_group",
        "drop",
        "wait",
        ("fc_comm_order_streams", "fc_reduce_run"),
        "reduce_scatter",
    ),
    "an offloaded group's gather does not wait for its copy-in": Bug(
        "offload", "drop", "wait", ("fc_comm_order_streams", "issue_gather"), "all_gather"
    ),
    "an offloaded group's copy-out does not wait for its gather": Bug(
        "offload", "drop", "wait", ("fc_gather_await", "fc_group_pre_forward"), "unpack"
    ),
    "the end of what was sent to the host is recorded on another stream": Bug(
        "offload_read_at_once",
        "wrong stream",
        "record",
        ("fc_comm_record", "fc_reduce_run"),
        "of the host",
    ),
    "a finalization by hand does not wait for what was sent to the host": Bug(
        "finalized_by_hand_offloaded",
        "drop",
        "synchronize",
        ("fc_reduce_settle", "fc_iteration_complete"),
        "of the host",
    ),
    "an all-reduced row is reused before it was sent to the host": Bug(
        "offload_hsdp_of_six_units", "drop", "wait", ("fc_comm_keep_row",), "allocation"
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
        ("fc_comm_order_streams", "issue_gather", "fc_state_pre_double_backward"),
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
    "a finalization by hand does not wait for the gradients": Bug(
        "finalized_by_hand",
        "drop",
        "wait",
        ("fc_comm_order_streams", "fc_reduce_run", "fc_iteration_finalize"),
        "reduce_scatter",
    ),
    "a finalization by hand frees an input before its reduce-scatter is done": Bug(
        "finalized_by_hand",
        "drop",
        "wait",
        ("fc_reduction_recycle", "fc_iteration_finalize"),
        "allocation",
    ),
    "the handle of a finalization by hand does not wait": Bug(
        "finalized_by_hand_half",
        "drop",
        "wait",
        ("fc_reduce_settle", "fc_iteration_complete"),
    ),
}


def fits(point: faults.Point, bug: Bug) -> bool:
    """Whether the functions are on the point's stack, in their order."""
    rest = iter(point.chain)
    return point.kind == bug.kind and all(any(name in one for one in rest) for name in bug.path)


def findings(bug: Bug) -> list[str]:
    """What the device says of the bug: of the first call that fits and is found."""
    points = faults.run(bug.scenario, fault=bug.fault).points
    chosen = [index for index, point in enumerate(points) if fits(point, bug)]
    if not chosen:
        return ["the bug no longer fits: no such call"]
    for index in chosen:
        found = faults.run(bug.scenario, fault=bug.fault, at=index).findings
        told = [text for text in found if bug.shows in text]
        if told:
            return told
    return []


LATE = (
    "a gather does not wait for the optimizer",
    "an all-gather does not wait for the pack",
    "the copy-out does not wait for the all-gather",
    "in backward, the copy-out does not wait for the all-gather",
    "a reduction does not wait for the gradients",
    "the gradients are packed on another stream",
    "the optimizer does not wait for the last reduction",
)
"""Bugs by which something is read too early: they give wrong bits where writes come late."""

SEEDS = 8


def wrong_bits(bug: Bug) -> int:
    """In how many runs of all seeds the scenario trains to other bits."""
    right = faults.run(bug.scenario)
    chosen = [i for i, point in enumerate(right.points) if fits(point, bug)]
    if bug.fault == "other stream":
        points = faults.run(bug.scenario, fault=bug.fault).points
        chosen = [i for i, point in enumerate(points) if fits(point, bug)]
    wrong = 0
    for seed in range(1, SEEDS + 1):
        simulated.start().delay_writes(seed)
        for index in chosen[:4]:
            wrong += faults.run(bug.scenario, fault=bug.fault, at=index).record != right.record
    simulated.start().delay_writes(0)
    return wrong


def wrong_bits_without_a_bug(name: str) -> int:
    """The same, where nothing is broken."""
    right = faults.run(name)
    wrong = 0
    for seed in range(1, SEEDS + 1):
        simulated.start().delay_writes(seed)
        wrong += faults.run(name).record != right.record
    simulated.start().delay_writes(0)
    return wrong


EARLY = (
    "a kept gather buffer is released before its copy-out",
    "the last gather buffer of a forward is released before its copy-out",
    "in backward, a gather buffer is released before its copy-out",
    "a gather buffer is freed as soon as the all-gather is issued",
    "an all-reduced row is reused before its cast",
    "a reduce-scatter's input is freed before it is done",
    "a custom reduce-scatter's input is freed before it is done",
    "in double backward, a gather buffer is released before its copy-out",
    "a finalization by hand frees an input before its reduce-scatter is done",
)
"""Bugs by which something is overwritten too early: wrong bits where writes come early."""


def early_bits(bug: Bug) -> tuple[int, int]:
    """(writes that may come early, in all runs; the runs of them that train to the same bits)."""
    right = faults.run(bug.scenario)
    points = faults.run(bug.scenario, fault=bug.fault).points
    early = unseen = 0
    for index in [i for i, point in enumerate(points) if fits(point, bug)][:4]:
        count, shown = faults.early(bug.scenario, bug.fault, index)
        early += count
        unseen += count > 0 and shown.record == right.record
    return early, unseen


class Told(NamedTuple):
    findings: dict[str, list[str]]
    """By bug."""
    wrong: dict[str, int]
    """Runs with wrong bits under late writes, by bug."""
    clean: dict[str, int]
    """The same by scenario, without a bug."""
    early: dict[str, tuple[int, int]]
    """Of ``early_bits``, by bug."""
    clean_early: dict[str, int]
    """Writes that may come early, by scenario, without a bug."""


def run(rank: int, world_size: int) -> Told:
    """What the device says of every bug."""
    warnings.simplefilter("ignore")
    sim_tools.join_loop_group()
    simulated.use_kernels(True)
    return Told(
        {name: findings(bug) for name, bug in BUGS.items()},
        {name: wrong_bits(BUGS[name]) for name in LATE},
        {name: wrong_bits_without_a_bug(name) for name in {BUGS[b].scenario for b in LATE}},
        {name: early_bits(BUGS[name]) for name in EARLY},
        {name: faults.early(name)[0] for name in {BUGS[b].scenario for b in EARLY}},
    )
