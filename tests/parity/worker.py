"""Runs many settings on the ranks of one launch, and survives those that crash or hang.

Every rank appends one pickled record per setting to its own file, so that what was done before a
crash is kept: ``run_grid`` marks the setting in flight as crashed and starts again behind it.
"""

from __future__ import annotations

import faulthandler
import pickle
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from grid import Setting
from launch import RanksFailed, run_ranks
from record import Entry, Recorder, recorded_collectives
from scenario import load_implementation, run_setting
from torch.distributed.device_mesh import init_device_mesh

SETTING_SECONDS = 240
"""A setting that takes longer than this has hung: its rank prints all stacks and dies. Generous,
since a setting of half a second takes twenty on a machine with other work."""
COLLECTIVE_SECONDS = 60
"""How long a rank waits for peers that have left the setting with an exception."""
MAX_CRASHES = 6

RankRecords = list[list[Entry]]
"""The records of one setting, one per rank."""


def run_grid(
    implementation: str,
    settings: list[Setting],
    world_size: int,
    folder: Path,
    ours: bool,
    max_crashes: int = MAX_CRASHES,
) -> list[RankRecords]:
    """Run the settings under one implementation; per setting, the records of all ranks.

    A setting during which a rank died has, on every rank, one entry ("crash", report); settings
    that were not reached after ``max_crashes`` crashes have one entry ("not run", reason).
    """
    results: list[RankRecords] = []
    crashes = 0
    while len(results) < len(settings):
        part = folder / f"{implementation}_{world_size}_{ours}_{crashes}"
        part.mkdir(parents=True)
        rest = settings[len(results) :]
        crash: Entry | None = None
        try:
            run_ranks(
                run_settings,
                world_size,
                (implementation, rest, str(part), ours),
                timeout=2 * SETTING_SECONDS + 10.0 * len(rest),
                collective_timeout=COLLECTIVE_SECONDS,
            )
        except RanksFailed as failure:
            crash = ("crash", str(failure))
        per_rank = [_read(part / f"{rank}.records") for rank in range(world_size)]
        # Only settings that every rank has ended count.
        done = min(len(records) for records in per_rank)
        results += [[records[i] for records in per_rank] for i in range(done)]
        if crash is None:
            continue
        crashes += 1
        if len(results) < len(settings):
            results.append([[crash]] * world_size)
        if crashes == max_crashes:
            missing: Entry = ("not run", f"after {crashes} crashes")
            results += [[[missing]] * world_size] * (len(settings) - len(results))
    return results


def _read(path: Path) -> list[list[Entry]]:
    records = []
    if path.exists():
        with path.open("rb") as file:
            try:
                while True:
                    records.append(pickle.load(file))
            except (EOFError, pickle.UnpicklingError):
                pass
    return records


def run_settings(
    rank: int,
    world_size: int,
    implementation: str,
    settings: list[Setting],
    folder: str,
    ours: bool,
) -> float:
    """The part of one rank: every setting in turn, each with fresh models; seconds taken."""
    begin = time.perf_counter()
    fully_shard = load_implementation(implementation)
    store = dist.FileStore(str(Path(folder) / "status"), world_size)
    mesh = init_device_mesh("cpu", (world_size,))
    with recorded_collectives() as receivers, (Path(folder) / f"{rank}.records").open("wb") as file:
        for index, setting in enumerate(settings):
            recorder = Recorder()
            receivers.append(recorder)
            faulthandler.dump_traceback_later(SETTING_SECONDS, exit=True)
            run_setting(setting, fully_shard, mesh, recorder, ours)
            faulthandler.cancel_dump_traceback_later()
            receivers.clear()
            pickle.dump(recorder.entries, file)
            file.flush()
            failed = bool(recorder.entries) and recorder.entries[-1][0] == "error"
            if _any_rank(store, index, rank, world_size, failed):
                # The ranks may have stopped at different collectives: begin with a new group.
                dist.destroy_process_group()
                dist.init_process_group(
                    "gloo",
                    store=dist.PrefixStore(f"group {index}", store),
                    rank=rank,
                    world_size=world_size,
                    timeout=timedelta(seconds=COLLECTIVE_SECONDS),
                )
                mesh = init_device_mesh("cpu", (world_size,))
    return time.perf_counter() - begin


def _any_rank(store: dist.Store, index: int, rank: int, world_size: int, failed: bool) -> bool:
    """Wait until all ranks have ended setting ``index``; whether it failed on any of them."""
    store.set(f"{index}/{rank}", "1" if failed else "0")
    keys = [f"{index}/{peer}" for peer in range(world_size)]
    store.wait(keys, timedelta(seconds=SETTING_SECONDS + COLLECTIVE_SECONDS))
    return any(store.get(key) == b"1" for key in keys)


torch.set_num_threads(1)
