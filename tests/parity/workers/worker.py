"""Runs many settings on the ranks of one launch, and continues after failures, crashes and hangs.

Every rank appends one pickled record per setting to its own file, so that earlier records survive a
crash. After a crash ``run_grid`` marks the current setting as crashed and starts new ranks for the
next one. New ranks also start after a setting that left the ranks at different collectives.
"""

from __future__ import annotations

import faulthandler
import gc
import pickle
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from building import FullyShard, load_implementation
from launch import RanksFailed, run_ranks
from meshes import Meshes, drop_new_groups, existing_groups
from record import CollectiveRecorder, Entry, Recorder, recorded_collectives
from scenario import run_setting
from setting import Launch, Setting

SETTING_SECONDS = 240
"""Time limit of a setting. Its rank then prints all stacks and exits. The limit is high because a
setting of half a second takes twenty seconds on a loaded machine."""
COLLECTIVE_SECONDS = 60
"""Time for which a rank waits for peers that have left the setting with an exception."""
MAX_CRASHES = 6
SAME_BITS_ANYWHERE = {"MKL_CBWR": "COMPATIBLE"}
"""Without this variable the last bits of MKL's matrix products depend on memory addresses. With
threads that share a heap, the addresses differ between runs."""

RankRecords = list[list[Entry]]
"""The records of one setting, one per rank."""


def run_grid(
    implementation: str,
    settings: list[Setting],
    launch: Launch,
    folder: Path,
    is_under_test: bool,
    max_crashes: int = MAX_CRASHES,
    collective_seconds: float = COLLECTIVE_SECONDS,
    target: Callable[..., None] | None = None,
    backend: str = "gloo",
    env: dict[str, str] | None = None,
    fresh: bool = False,
) -> list[RankRecords]:
    """Runs the settings under one implementation. Returns, per setting, the records of all ranks.

    ``target`` replaces the function that runs in each rank. ``backend`` is for ranks on another
    device than the CPU. ``fresh`` is passed to run_ranks. Thread ranks always need fresh
    interpreters, because MKL reads its environment once.

    If a rank died during a setting, all its ranks have the single entry ("crash", report). Settings
    after ``max_crashes`` crashes have the single entry ("not run", reason). Raises RuntimeError if
    ranks end without a record, as a thread does after an exception that no setting records. Raises
    it also if a rank crashes after its last setting.
    """
    results: list[RankRecords] = []
    launches = crashes = 0
    world_size = launch.world_size
    while len(results) < len(settings):
        launch_folder = folder / f"{implementation}_{launch}_{is_under_test}_{launches}"
        launch_folder.mkdir(parents=True)
        remaining = settings[len(results) :]
        crash: Entry | None = None
        try:
            run_ranks(
                target or (run_on_threads if launch.threads else run_on_processes),
                1 if launch.threads else world_size,
                (world_size, implementation, remaining, str(launch_folder), is_under_test),
                timeout=2 * SETTING_SECONDS + 10.0 * len(remaining),
                collective_timeout=collective_seconds,
                env=(env or {}) | (SAME_BITS_ANYWHERE if launch.threads else {}),
                backend=backend,
                fresh=fresh or launch.threads,
            )
        except RanksFailed as failure:
            crash = ("crash", str(failure))
        per_rank = [_read(launch_folder / f"{rank}.records") for rank in range(world_size)]
        # Only settings that every rank has completed count.
        completed = min(len(records) for records in per_rank)
        results += [[records[i] for records in per_rank] for i in range(completed)]
        launches += 1
        if crash is None:
            if completed == 0:  # a new launch would end in the same way
                raise RuntimeError(f"no setting has the records of all ranks: {launch_folder}")
            continue
        if len(results) == len(settings):
            raise RuntimeError(f"crash after the last setting: {crash[1]}")
        crashes += 1
        results.append([[crash]] * world_size)
        if crashes == max_crashes:
            not_run: Entry = ("not run", f"after {crashes} crashes")
            results += [[[not_run]] * world_size] * (len(settings) - len(results))
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


def run_on_processes(*arguments: Any) -> None:
    """Runs every setting on the rank of this process, each with new models."""
    with recorded_collectives() as collective_recorder:
        _run_on_process(collective_recorder, *arguments)


def run_without_recording_collectives(*arguments: Any) -> None:
    """As ``run_on_processes``, for implementations that issue other collectives than torch."""
    _run_on_process(CollectiveRecorder(), *arguments)


def _run_on_process(
    collective_recorder: CollectiveRecorder,
    rank: int,
    _processes: int,
    world_size: int,
    implementation: str,
    settings: list[Setting],
    folder: str,
    is_under_test: bool,
) -> None:
    store = dist.FileStore(str(Path(folder) / "status"), world_size)

    def compare_endings(index: int, ending: str) -> bool:
        store.set(f"{index}/{rank}", ending)
        keys = [f"{index}/{peer}" for peer in range(world_size)]
        store.wait(keys, timedelta(seconds=SETTING_SECONDS + COLLECTIVE_SECONDS))
        return len({store.get(key) for key in keys}) == 1

    runner = _Rank(
        load_implementation(implementation),
        is_under_test,
        collective_recorder,
        compare_endings,
        threads=False,
    )
    runner.run(settings, Path(folder) / f"{rank}.records")


def run_on_threads(
    _rank: int,
    _processes: int,
    world_size: int,
    implementation: str,
    settings: list[Setting],
    folder: str,
    is_under_test: bool,
) -> None:
    """As ``run_on_processes``, with all ranks as threads of this process."""
    import thread_ranks

    dist.destroy_process_group()
    fully_shard = load_implementation(implementation)
    barrier = threading.Barrier(world_size)
    endings: dict[int, set[str]] = {}

    def compare_endings(index: int, ending: str) -> bool:
        endings.setdefault(index, set()).add(ending)
        if ending != COMPLETED:
            thread_ranks.stop_peers(RuntimeError("another rank failed"))
        barrier.wait(SETTING_SECONDS)
        return endings[index] == {COMPLETED}

    with thread_ranks.recorded_methods() as collective_recorder:

        def run(rank: int) -> None:
            runner = _Rank(
                fully_shard, is_under_test, collective_recorder, compare_endings, threads=True
            )
            runner.run(settings, Path(folder) / f"{rank}.records")

        thread_ranks.run_threads(world_size, run)


COMPLETED = "completed"


class _Rank:
    """Runs settings on one rank, as long as all ranks end each setting in the same way."""

    def __init__(
        self,
        fully_shard: FullyShard,
        is_under_test: bool,
        collective_recorder: CollectiveRecorder,
        compare_endings: Callable[[int, str], bool],
        threads: bool,
    ) -> None:
        self.fully_shard = fully_shard
        self.is_under_test = is_under_test
        self.collective_recorder = collective_recorder
        self.compare_endings = compare_endings
        self.threads = threads

    def run(self, settings: list[Setting], path: Path) -> None:
        """Runs the settings and writes their records to ``path``. Stops after a setting that left
        the ranks out of step."""
        meshes = Meshes(dist.get_world_size())
        with path.open("wb") as file:
            for index, setting in enumerate(settings):
                meshes.prepare(setting)
                groups_before = existing_groups()
                entries = self._run_one(setting, meshes)
                pickle.dump(entries, file)
                file.flush()
                if not self.compare_endings(index, _ending(entries)):
                    break
                # No rank uses the groups of this setting any more. Thread ranks keep theirs:
                # groups cannot be destroyed one thread at a time.
                if not self.threads and existing_groups() != groups_before:
                    gc.collect()
                    drop_new_groups(groups_before)

    def _run_one(self, setting: Setting, meshes: Meshes) -> list[Entry]:
        recorder = Recorder()
        self.collective_recorder.recorder = recorder
        faulthandler.dump_traceback_later(SETTING_SECONDS, exit=True)
        try:
            run_setting(setting, self.fully_shard, meshes, recorder, self.is_under_test)
        except SystemExit as stopped:  # raised in a threaded group after another rank failed
            recorder.record("error", str(stopped))
        finally:
            faulthandler.cancel_dump_traceback_later()
            self.collective_recorder.recorder = None
        return recorder.entries


def _ending(entries: list[Entry]) -> str:
    """Describes how a setting ended on this rank. An error that all ranks raise after the same
    collectives is harmless; after any other error some ranks still wait for others."""
    if not entries or entries[-1][0] != "error":
        return COMPLETED
    issued = sum(label.startswith("collective") for label, _ in entries)
    return f"after {issued} collectives, {entries[-1][1]}"


torch.set_num_threads(1)
