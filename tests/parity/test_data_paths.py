"""Parity of other data paths of fsdp_c: a part of the basic grid, on two ranks.

- without_kernels: torch's foreach operations replace fsdp_c's kernels, as on unsupported devices.
- in_chunks: small parameters are separate chunks of the collective, too. These runs do not record
  collectives, because an observer of collectives disables chunks.
- in_buckets: every gradient is reduced separately. Buckets change the collectives, but no results.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from feature_support import SUPPORTED, features_of
from grid import at_world_size, generate
from record import differences, tensor_entries
from setting import Launch, Setting
from worker import RankRecords, run_grid, run_without_recording_collectives

pytestmark = [pytest.mark.timeout(1800), pytest.mark.xdist_group("parity_data_paths")]

LAUNCH = Launch(2)
SETTINGS = [at_world_size(s, 2) for s in generate(1, 16) if features_of(s) <= SUPPORTED]
# Dimensions other than 0, which the random settings may not contain.
SETTINGS += [Setting(placement="last"), Setting(placement="mixed", param="bf16", reduce="fp32")]


@pytest.fixture(scope="module")
def torch_records(tmp_path_factory: pytest.TempPathFactory) -> list[RankRecords]:
    return run_grid(
        "torch", SETTINGS, LAUNCH, tmp_path_factory.mktemp("torch"), is_under_test=False
    )


def test_data_path_without_kernels_matches_torch(
    torch_records: list[RankRecords], tmp_path: Path
) -> None:
    fsdp_c_records = run_grid(
        "without_kernels:fully_shard", SETTINGS, LAUNCH, tmp_path, is_under_test=True
    )
    for index, setting in enumerate(SETTINGS):
        for rank in range(2):
            assert differences(torch_records[index][rank], fsdp_c_records[index][rank]) == [], (
                setting
            )


def test_results_of_chunked_collectives_match_torch(
    torch_records: list[RankRecords], tmp_path: Path
) -> None:
    fsdp_c_records = run_grid(
        "in_chunks:fully_shard",
        SETTINGS,
        LAUNCH,
        tmp_path,
        is_under_test=True,
        target=run_without_recording_collectives,
    )
    for index, setting in enumerate(SETTINGS):
        for rank in range(2):
            expected, actual = torch_records[index][rank], fsdp_c_records[index][rank]
            assert not any(label.startswith("collective ") for label, _ in actual)
            assert differences(tensor_entries(expected), tensor_entries(actual)) == [], setting


def test_reduction_in_buckets_matches_torch(
    torch_records: list[RankRecords], tmp_path: Path
) -> None:
    fsdp_c_records = run_grid(
        "in_buckets:fully_shard", SETTINGS, LAUNCH, tmp_path, is_under_test=True
    )
    longer_records = 0
    for index, setting in enumerate(SETTINGS):
        for rank in range(2):
            expected, actual = torch_records[index][rank], fsdp_c_records[index][rank]
            assert differences(tensor_entries(expected), tensor_entries(actual)) == [], setting
            longer_records += len(actual) > len(expected)
    # Most settings ran more collectives, so the buckets were used.
    assert longer_records > len(SETTINGS)
