"""Ranks of an NCCL process group compare checksums of data with the guard mode "hash"."""

from __future__ import annotations

import concurrent.futures
import re
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.xdist_group("cuda"), pytest.mark.timeout(300)]

HEXADECIMAL = "[0-9a-f]{16}"


def run_ranks(run_worker: Any, folder: Path, *cases: str) -> list[dict[str, Any]]:
    """Returns the results of corrupted_data.py on two ranks.

    Asserts that their devices report nothing but the end of a peer.
    """
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        runs = [
            executor.submit(run_worker, "corrupted_data", rank, str(folder / "store"), *cases)
            for rank in ("0", "1")
        ]
        results = [run.result() for run in runs]
    # The rank that raises first ends, while the other one waits for its next collective.
    found = [text for result in results for text in result["findings"]]
    assert [text for text in found if "which has ended" not in text] == []
    return results


@pytest.mark.parametrize("operation", ["all-gather", "all-reduce"])
def test_corrupted_data_raises_on_both_ranks_and_names_the_collective(
    run_worker: Any, tmp_path: Path, operation: str
) -> None:
    text = (
        rf"different data after the {operation} of '[012]?' \(step 11, \w+\): rank 0 has checksum "
        rf"{HEXADECIMAL}, rank 1 has {HEXADECIMAL} \(process group '\d+'\)\. All later gradients"
    )
    for result in run_ranks(run_worker, tmp_path, operation):
        assert re.search(text, result["messages"][operation])


def test_equal_data_raises_no_checksum_mismatch(run_worker: Any, tmp_path: Path) -> None:
    cases = ("sharded, equal", "replicated, equal", "captured")
    for result in run_ranks(run_worker, tmp_path, *cases):
        assert result["messages"] == dict.fromkeys(cases, "")
