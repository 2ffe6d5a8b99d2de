"""Lets a collective never end, NCCL report an asynchronous error, or the device stop.

``python watchdog.py IMPLEMENTATION CASE`` prints a JSON object: the outcomes of the step with the
failure and of the next step, and the parameters that are unsharded after a reset. In the case
"tear down" the watchdog of ProcessGroupNCCL ends the process.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
import time
import warnings
from importlib.metadata import version
from typing import Any

import stub_runtime
from failures import outcome_of, unsharded_parameters

REMOTE_ERROR = 6
"""ncclRemoteError: another rank has failed."""
TIMEOUT = datetime.timedelta(seconds=2)
CLEAN_UP = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "2"}
"""The watchdog aborts the communicators, and the process continues."""
NO_DUMP = {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "1000"}
"""The watchdog of torch 2.14 waits for a dump also if there is none, by default for 60 s."""
BLOCKING = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}
"""``wait()`` of a collective raises after the time-out. Before torch 2.15, FSDP2's collectives have
no ``wait()``, and the process waits for the device."""
CASES: dict[str, tuple[dict[str, str], dict[str, int]]] = {
    # case: (environment, settings of the device for one step)
    # The second collective is an all-gather of the forward. The sixth one is in the backward.
    "tear down": ({}, {"hang_nccl": 2}),
    "clean up": (CLEAN_UP, {"hang_nccl": 6}),
    "blocking wait, forward": (BLOCKING, {"hang_nccl": 2}),
    "blocking wait, backward": (BLOCKING, {"hang_nccl": 6}),
    "asynchronous error": (CLEAN_UP, {"nccl_async": REMOTE_ERROR}),
    "device": ({}, {"fail_device": 20}),
}
LONGEST_WAIT = 100
"""Seconds until the watchdog must have ended the process, or aborted a communicator."""


def start_hanging_collective(device: stub_runtime.Device) -> None:
    """Starts a collective that never ends: the watchdog asks NCCL for errors of open ones only."""
    import torch

    device.set(hang_nccl=1)
    torch.distributed.all_reduce(torch.ones(8, device="cuda"), async_op=True)


def wait_for_abort(device: stub_runtime.Device) -> None:
    """Returns when a communicator was aborted."""
    end = time.monotonic() + LONGEST_WAIT
    while not device.counts().get("communicator abort", 0):
        if time.monotonic() > end:
            raise TimeoutError("no communicator was aborted")
        time.sleep(0.05)


def main(implementation: str, case: str) -> dict[str, Any]:
    environment, settings = CASES[case]
    release = tuple(int(number) for number in version("torch").split(".")[:2])
    if environment is BLOCKING and release < (2, 15):
        return {"skipped": f"torch {version('torch')} does not wait in FSDP2's collectives"}
    os.environ.update(environment | NO_DUMP)
    device = stub_runtime.start()
    import jobs

    jobs.join_group(timeout=TIMEOUT)
    training = jobs.Training(implementation, jobs.JOBS["fsdp"])
    training.step()
    training.step()
    if "nccl_async" in settings:
        start_hanging_collective(device)
    device.set(**settings)
    if "nccl_async" in settings:
        wait_for_abort(device)
        device.set(nccl_async=0)
    failed = outcome_of(training.step)
    if "hang_nccl" in settings:
        wait_for_abort(device)  # the watchdog may end the process instead
    following = outcome_of(training.step)
    device.set(stopped=0)
    training.model.reset_iter_state()
    return {"failed": failed, "next": following, "unsharded": unsharded_parameters(training.model)}


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps(main(sys.argv[1], sys.argv[2])), flush=True)
    os._exit(0)
