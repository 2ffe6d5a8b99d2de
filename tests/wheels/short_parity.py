"""Trains settings of the parity grid under torch's FSDP2 and under the installed fsdp_c.

``python short_parity.py COUNT`` compares the first COUNT settings bit by bit on one rank and on
two. It omits settings that the installed torch does not support. It needs torch and numpy only,
with ``tests/harness`` and ``tests/parity/workers`` in PYTHONPATH. The last line of the output is
"COUNT settings on 1 and 2 ranks: equal". The exit code is 1 if any result differs, or if torch
itself fails in more than 3 % of the settings.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from feature_support import SUPPORTED, features_of
from grid import at_world_size, generate
from record import differences
from setting import Launch
from worker import run_grid

import fsdp_c
from fsdp_c import _C

LAUNCHES = (Launch(1), Launch(2))


def compare(count: int, launch: Launch, folder: Path) -> tuple[int, list[str]]:
    """Returns the number of settings that torch could not train, and the differences."""
    settings = [setting for setting in generate(0, count) if features_of(setting) <= SUPPORTED]
    settings = [at_world_size(setting, launch.world_size) for setting in settings]
    expected = run_grid("torch", settings, launch, folder, is_under_test=False)
    actual = run_grid("fsdp_c", settings, launch, folder, is_under_test=True)
    failed = sum(ranks[0][-1][0] in ("error", "crash", "not run") for ranks in expected)
    lines = [
        f"{setting} on rank {rank} of {launch.world_size}: {line}"
        for index, setting in enumerate(settings)
        for rank in range(launch.world_size)
        for line in differences(expected[index][rank], actual[index][rank])
    ]
    return failed, lines


def main(count: int) -> int:
    print(f"fsdp_c {fsdp_c.__version__}, extension {_C.__file__}")
    failed, lines = 0, []
    for launch in LAUNCHES:
        with tempfile.TemporaryDirectory() as folder:
            failures, found = compare(count, launch, Path(folder))
        failed += failures
        lines += found
    print("\n".join(lines), end="\n" if lines else "")
    allowed = 0.03 * count * len(LAUNCHES)
    if failed > allowed:
        print(f"torch fails in {failed} settings, at most {allowed:.0f} expected")
    is_equal = not lines and failed <= allowed
    ranks = " and ".join(str(launch.world_size) for launch in LAUNCHES)
    print(f"{count} settings on {ranks} ranks: {'equal' if is_equal else 'different'}")
    return int(not is_equal)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
