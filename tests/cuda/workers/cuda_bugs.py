"""Bugs that the checks of ``ordering.py`` must report: each breaks one ordering point of fsdp_c.

A broken "wait" or "synchronize" has no effect. A broken "record" records the event on another
stream. ``python cuda_bugs.py`` prints a JSON object: for each bug the first expected finding, or
an empty text.
"""

from __future__ import annotations

import json
import os
import warnings
from typing import Any, NamedTuple

import stub_runtime

LIBRARY = "fsdp_c/_C."


class Bug(NamedTuple):
    job: str
    """Name in ``jobs.JOBS`` or ``jobs.FURTHER_JOBS``."""
    kind: str
    """Kind of the calls to break: "wait", "record" or "synchronize"."""
    path: tuple[str, ...]
    """Functions that the stack contains in this order, innermost first."""
    expected: str = ""
    """An access that the finding names."""
    blocks: int = 4


_PACK = ("fc_comm_order_streams", "fc_gather_start")
_REDUCE = ("fc_comm_order_streams", "fc_reduce_run")
BUGS = {
    "a gather does not wait for the optimizer": Bug("fsdp", "wait", ("fc_state_begin_iteration",)),
    "the event of the optimizer is recorded on another stream": Bug(
        "fsdp", "record", ("fc_state_begin_iteration",)
    ),
    "an all-gather does not wait for the pack": Bug("fsdp", "wait", _PACK, "ncclAllGather"),
    "the copy-out does not wait for the all-gather": Bug(
        "fsdp", "wait", ("fc_gather_await", "fc_group_pre_forward"), "fck_move_lines"
    ),
    "in backward, the copy-out does not wait for the all-gather": Bug(
        "fsdp", "wait", ("fc_gather_await", "fc_group_pre_backward"), "fck_move_lines"
    ),
    "the end of an all-gather is recorded on another stream": Bug(
        "fsdp", "record", ("fc_comm_record", "fc_gather_start"), "fck_move_lines"
    ),
    "a kept gather buffer is released before its copy-out": Bug(
        "fsdp", "wait", ("fc_comm_release_gather", "fc_group_wait_unshard")
    ),
    "in backward, a gather buffer is released before its copy-out": Bug(
        "fsdp", "wait", ("fc_comm_gather_streams_wait", "fc_gather_end_copy_out")
    ),
    "a reduce-scatter does not wait for the pack of the gradients": Bug(
        "fsdp", "wait", _REDUCE, "ncclReduceScatter"
    ),
    "a reduce-scatter's input is freed before it is done": Bug(
        "fsdp", "wait", ("fc_reduction_recycle",)
    ),
    "the optimizer does not wait for the last reduction": Bug(
        "fsdp", "wait", ("fc_reduce_settle", "fc_iteration_end_backward")
    ),
    "the end of a reduction is recorded on another stream": Bug(
        "fsdp", "record", ("fc_comm_record", "fc_reduce_run")
    ),
    "an all-reduce does not wait for the reduce-scatter": Bug(
        "hsdp", "wait", _REDUCE, "ncclAllReduce"
    ),
    "a smaller group's shards are gathered before their copy is done": Bug(
        "fsdp, smaller group after forward", "record", ("fc_group_post_forward",)
    ),
    "partial gradients are used before they are reduced": Bug(
        "hsdp, 4 microbatches without all-reduce", "wait", _REDUCE
    ),
    "an offloaded group's gather does not wait for its copy-in": Bug(
        "offload", "wait", _PACK, "ncclAllGather"
    ),
    "an offloaded group's copy-out does not wait for its gather": Bug(
        "offload", "wait", ("fc_gather_await", "fc_group_pre_forward"), "fck_move_lines"
    ),
    "the replicas' all-reduce does not wait for the gradients": Bug(
        "replicate", "wait", _REDUCE, "ncclAllReduce"
    ),
    "the optimizer does not wait for finalize_backward": Bug(
        "fsdp, 4 microbatches, finalize_backward",
        "wait",
        ("fc_reduce_settle", "fc_iteration_complete"),
    ),
    "a smaller group's gather does not wait for the copy of its shards": Bug(
        "fsdp, smaller group after forward",
        "wait",
        ("fc_comm_gather_streams_wait", "fc_gather_start"),
    ),
    "the end of a copy-out is recorded on another stream": Bug(
        "fsdp", "record", ("fc_comm_record", "fc_gather_end_copy_out"), "ncclAllGather"
    ),
    "the last gather buffer of a forward is released before its copy-out": Bug(
        "fsdp", "wait", ("fc_comm_release_gather", "fc_state_end_forward"), blocks=3
    ),
    "an output is released before its all-reduce is done": Bug(
        "hsdp, 4 microbatches",
        "wait",
        ("release_oldest_output", "fc_comm_keep_output"),
        "ncclAllReduce",
    ),
    "the last outputs are released before their all-reduce is done": Bug(
        "hsdp, stream shared with other code",
        "wait",
        ("release_oldest_output", "fc_comm_release_outputs"),
        "ncclAllReduce",
    ),
    "a gradient is added to before the previous microbatch's hook is done": Bug(
        "fsdp, 2 microbatches, a hook for the first",
        "wait",
        ("fc_comm_wait_and_put", "fc_reduce_run"),
        "aten::mul_",
    ),
    "the optimizer on the host does not wait for offloaded gradients": Bug(
        "offload", "synchronize", ("wait_on_host", "fc_reduce_settle"), "the host"
    ),
}


def matches(call: stub_runtime.CallSite, bug: Bug) -> bool:
    functions = iter(call.stack)
    return call.kind == bug.kind and all(
        any(name in function for function in functions) for name in bug.path
    )


def is_covered(call: stub_runtime.CallSite) -> bool:
    """Returns true if a bug of :data:`BUGS` breaks this call, or if c10d makes the call."""
    is_in_c10d = any(name.startswith("fc_process_group_") for name in call.stack)
    return is_in_c10d or any(matches(call, bug) for bug in BUGS.values())


class Trainings:
    """One training per job and number of blocks. Its steps run with or without a broken call."""

    def __init__(self) -> None:
        self.device = stub_runtime.start()
        self._by_job: dict[tuple[str, int], Any] = {}

    def run(self, bug: Bug, at: int) -> list[str]:
        """Runs one step in which call ``at`` is broken, and the next. Returns the findings."""
        import jobs
        import torch

        key = (bug.job, bug.blocks)
        if key not in self._by_job:
            job = (jobs.JOBS | jobs.FURTHER_JOBS)[bug.job]
            self._by_job[key] = jobs.Training("fsdp_c", job, blocks=bug.blocks)
            self._by_job[key].step()
        torch.cuda.synchronize()
        self.device.reset()
        self.device.observe()
        self.device.log_calls(LIBRARY, bug.kind, at)
        self._by_job[key].step()
        self._by_job[key].step()
        findings = self.device.findings()
        self.device.observe(False)
        return findings

    def calls(self) -> list[stub_runtime.CallSite]:
        """Returns the calls of the latest run."""
        import fsdp_c._C as _C

        return self.device.calls(str(_C.__file__))


def expected_finding(trainings: Trainings, bug: Bug) -> str:
    """Breaks the matching calls in turn. Returns the first expected finding, or an empty text."""
    others = trainings.run(bug, -1)
    if others:
        return f"without a bug: {others[0]}"
    indices = [i for i, call in enumerate(trainings.calls()) if matches(call, bug)]
    for index in indices:
        for finding in trainings.run(bug, index):
            if bug.expected in finding:
                return finding
    return "" if indices else "the bug matches no call"


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    all_trainings = Trainings()
    import jobs

    jobs.join_group()
    names = jobs.JOBS | jobs.FURTHER_JOBS  # some need torch 2.15
    known = {name: bug for name, bug in BUGS.items() if bug.job in names}
    print(json.dumps({n: expected_finding(all_trainings, b) for n, b in known.items()}), flush=True)
    os._exit(0)
