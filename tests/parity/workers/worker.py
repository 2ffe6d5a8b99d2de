"""Runs many settings on the ranks of one launch, and survives those that fail, crash or hang.

Every rank appends one pickled record per setting to its own file, so that what was done before a
crash is kept: ``run_grid`` marks the setting in flight as crashed and starts new ranks behind it.
New ranks are also started behind a setting that has left them at different collectives.
"""

from __future__ import annotations

import faulthandler
import gc
import pickle
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from building import FullyShard, load_implementation
from launch import RanksFailed, run_ranks
from meshes import Meshes, drop_new_groups, existing_groups
from record import Entry, Recorder, Tap, recorded_collectives
from scenario import run_setting
from setting import Launch, Setting

SETTING_SECONDS = 240
"""A setting that takes longer than this has hung: its rank prints all stacks and dies. Generous,
since a setting of half a second takes twenty on a machine with other work."""
COLLECTIVE_SECONDS = 60
"""How long a rank waits for peers that have left the setting with an exception."""
MAX_CRASHES = 6
SAME_BITS_ANYWHERE = {"MKL_CBWR": "COMPATIBLE"}
"""MKL's matrix products depend in the last bit on where in memory their arguments lie, unless told
otherwise. Where threads share one heap, that changes from run to run."""

RankRecords = list[list[Entry]]
"""The records of one setting, one per rank."""


def run_grid(
    implementation: str,
    settings: list[Setting],
    launch: Launch,
    folder: Path,
    ours: bool,
    max_crashes: int = MAX_CRASHES,
    collective_seconds: float = COLLECTIVE_SECONDS,
    target: Callable[..., float] | None = None,
    backend: str = "gloo",
    env: dict[str, str] | None = None,
    fresh: bool = False,
) -> list[RankRecords]:
    """Run the settings under one implementation; per setting, the records of all ranks.

    ``target`` and ``backend`` are for ranks on another device than the CPU. ``fresh``: as in
    launch.py; where threads are ranks it is so, for MKL reads its environment once.

    A setting during which a rank died has, on every rank, one entry ("crash", report); settings
    that were not reached after ``max_crashes`` crashes have one entry ("not run", reason).
    """
    results: list[RankRecords] = []
    launches = crashes = 0
    world_size = launch.world_size
    while len(results) < len(settings):
        part = folder / f"{implementation}_{launch}_{ours}_{launches}"
        part.mkdir(parents=True)
        rest = settings[len(results) :]
        crash: Entry | None = None
        try:
            run_ranks(
                target or (run_on_threads if launch.threads else run_on_processes),
                1 if launch.threads else world_size,
                (world_size, implementation, rest, str(part), ours),
                timeout=2 * SETTING_SECONDS + 10.0 * len(rest),
                collective_timeout=collective_seconds,
                env=(env or {}) | (SAME_BITS_ANYWHERE if launch.threads else {}),
                backend=backend,
                fresh=fresh or launch.threads,
            )
        except RanksFailed as failure:
            crash = ("crash", str(failure))
        per_rank = [_read(part / f"{rank}.records") for rank in range(world_size)]
        # Only settings that every rank has ended count.
        done = min(len(records) for records in per_rank)
        results += [[records[i] for records in per_rank] for i in range(done)]
        launches += 1
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


def run_on_processes(
    rank: int,
    _: int,
    world_size: int,
    implementation: str,
    settings: list[Setting],
    folder: str,
    ours: bool,
) -> float:
    """The part of one process: every setting in turn, each with fresh models; seconds taken."""
    begin = time.perf_counter()
    store = dist.FileStore(str(Path(folder) / "status"), world_size)

    def agree(index: int, ending: str) -> bool:
        store.set(f"{index}/{rank}", ending)
        keys = [f"{index}/{peer}" for peer in range(world_size)]
        store.wait(keys, timedelta(seconds=SETTING_SECONDS + COLLECTIVE_SECONDS))
        return len({store.get(key) for key in keys}) == 1

    with recorded_collectives() as tap:
        runner = _Rank(load_implementation(implementation), ours, tap, agree, threads=False)
        runner.run(settings, Path(folder) / f"{rank}.records")
    return time.perf_counter() - begin


def run_on_threads(
    _rank: int,
    _: int,
    world_size: int,
    implementation: str,
    settings: list[Setting],
    folder: str,
    ours: bool,
) -> float:
    """As ``run_on_processes``, all ranks in this process."""
    import thread_ranks

    begin = time.perf_counter()
    dist.destroy_process_group()
    fully_shard = load_implementation(implementation)
    barrier = threading.Barrier(world_size)
    endings: dict[int, set[str]] = {}

    def agree(index: int, ending: str) -> bool:
        endings.setdefault(index, set()).add(ending)
        if ending != ENDED_WELL:
            thread_ranks.stop_peers(RuntimeError("another rank failed"))
        barrier.wait(SETTING_SECONDS)
        return endings[index] == {ENDED_WELL}

    with thread_ranks.recorded_methods() as tap:

        def run(rank: int) -> None:
            runner = _Rank(fully_shard, ours, tap, agree, threads=True)
            runner.run(settings, Path(folder) / f"{rank}.records")

        thread_ranks.run_threads(world_size, run)
    return time.perf_counter() - begin


ENDED_WELL = "well"


class _Rank:
    """Runs settings on one rank, for as long as all ranks can go on together."""

    def __init__(
        self,
        fully_shard: FullyShard,
        ours: bool,
        tap: Tap,
        agree: Callable[[int, str], bool],
        threads: bool,
    ) -> None:
        self.fully_shard = fully_shard
        self.ours = ours
        self.tap = tap
        self.agree = agree
        self.threads = threads

    def run(self, settings: list[Setting], path: Path) -> None:
        """Run the settings into ``path``; stops behind one that left the ranks out of step."""
        meshes = Meshes(dist.get_world_size())
        with path.open("wb") as file:
            for index, setting in enumerate(settings):
                meshes.prepare(setting)
                groups = existing_groups()
                entries = self._run_one(setting, meshes)
                pickle.dump(entries, file)
                file.flush()
                if not self.agree(index, _ending(entries)):
                    break
                # All ranks are done with the groups that this setting has made. Those of threads
                # cannot be destroyed one thread at a time; their process takes them along.
                if not self.threads and existing_groups() != groups:
                    gc.collect()
                    drop_new_groups(groups)

    def _run_one(self, setting: Setting, meshes: Meshes) -> list[Entry]:
        recorder = Recorder()
        self.tap.recorder = recorder
        faulthandler.dump_traceback_later(SETTING_SECONDS, exit=True)
        try:
            run_setting(setting, self.fully_shard, meshes, recorder, self.ours)
        except SystemExit as stopped:  # of a threaded group whose other rank failed
            recorder.note("error", str(stopped))
        finally:
            faulthandler.cancel_dump_traceback_later()
            self.tap.recorder = None
        return recorder.entries


def _ending(entries: list[Entry]) -> str:
    """How a setting ended here. An error that all ranks raise after the same collectives does no
    harm to the others; any other leaves them waiting for each other."""
    if not entries or entries[-1][0] != "error":
        return ENDED_WELL
    issued = sum(label.startswith("collective") for label, _ in entries)
    return f"after {issued} collectives, {entries[-1][1]}"


torch.set_num_threads(1)
