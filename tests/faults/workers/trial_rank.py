"""A rank of a trial of ``failure_trials.py``: it trains until it raises or is ended.

The argument is a JSON document, the fields of ``Plan``. The rank appends its events to a file, one
JSON document per line. Times are seconds of the monotonic clock, which all processes share.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import signal
import sys
import time
import traceback
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

BLOCKS = 4
"""Units of the model beside the root."""


@dataclass
class Plan:
    """The part of one rank in a trial."""

    rank: int
    world: int
    port: int
    prefix: str
    """Prefix of the trial's keys in the store."""
    limit: float
    """Time limit of the process group in seconds."""
    events: str
    """Path of the file for events."""
    raises_and: str = ""
    """"ends": the rank raises and its process ends. "stays": the process catches the exception and
    then waits. "": the rank does not raise."""
    pause: float = 0.0
    """Seconds for which the rank pauses."""
    step: int = 0
    block: int = 0
    """The rank raises or pauses in the forward of this block in this step."""
    finishes: bool = False
    """Whether the training ends three steps after ``step``. Otherwise only a fault ends it."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class UserError(Exception):
    pass


class EventFile(logging.Handler):
    """Writes events. A logged report about the places of all ranks is an event, too."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self.path = Path(path)

    def write(self, kind: str, text: str = "") -> None:
        line = json.dumps({"kind": kind, "at": time.monotonic(), "text": text})
        with self.path.open("a") as file:
            file.write(line + "\n")

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "The ranks of the job" in text:
            self.write("report", text)


def main(plan: Plan) -> None:
    import torch
    import torch.distributed as dist
    import torch.nn as nn

    from fsdp_c import fully_shard

    torch.set_num_threads(1)
    events = EventFile(plan.events)
    logging.getLogger("torch.distributed.fsdp.fully_shard").addHandler(events)
    store = dist.PrefixStore(plan.prefix, dist.TCPStore("127.0.0.1", plan.port, is_master=False))
    store.set(f"joined/{plan.rank}", "")  # the time limit of the process group is short
    store.wait([f"joined/{rank}" for rank in range(plan.world)], timedelta(seconds=60))
    dist.init_process_group(
        "gloo",
        store=store,
        rank=plan.rank,
        world_size=plan.world,
        timeout=timedelta(seconds=plan.limit),
    )
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 8)) for _ in range(BLOCKS)]
    model: Any = nn.Sequential(*blocks, nn.Linear(8, 8))
    for block in blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    step = 0

    def raise_or_pause(*unused: Any) -> None:
        if step == plan.step:
            events.write("fault")
            if not plan.pause:
                raise UserError
            time.sleep(plan.pause)

    def begin(*unused: Any) -> None:
        if step == 0:
            events.write("began")

    model.register_forward_pre_hook(begin)
    if plan.raises_and or plan.pause:
        blocks[plan.block][0].register_forward_hook(raise_or_pause)
    events.write("ready")
    try:
        with contextlib.suppress(*((UserError,) if plan.raises_and == "stays" else ())):
            while not plan.finishes or step <= plan.step + 3:
                model(torch.ones(2, 8)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
    except Exception as error:
        events.write("raised", f"{type(error).__name__}: {error}")
        traceback.print_exc()
        sys.exit(1)
    if plan.finishes:
        dist.destroy_process_group()
        return
    while True:
        time.sleep(1)


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    main(Plan(**json.loads(sys.argv[1])))
