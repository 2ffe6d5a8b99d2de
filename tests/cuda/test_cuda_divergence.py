"""Ranks of an NCCL process group raise if their models or their later collectives differ.

Different models raise before the first collective.
"""

from __future__ import annotations

import concurrent.futures
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.xdist_group("cuda captures"), pytest.mark.timeout(300)]

DIFFERENCES = {
    # case: the differing fact, and its values on rank 0 and on rank 1
    "order": ("parameter 0 of unit '0'", "'0.weight' [8, 8]", "'0.bias' [8]"),
    "dtype": ("parameter 0 of unit '1'", "torch.float32", "torch.bfloat16"),
    "frozen": ("parameter 1 of unit '0'", "reduce_dtype None", "frozen"),
}

Messages = dict[str, dict[str, str]]
"""The messages of the exceptions by case and forward. No exception is an empty string."""


def run_ranks(run_worker: Any, folder: Path, pace: str) -> list[Messages]:
    store = str(folder / "store")
    with concurrent.futures.ThreadPoolExecutor(2) as executor:
        runs = [
            executor.submit(run_worker, "divergence", str(rank), store, pace) for rank in (0, 1)
        ]
        return [run.result() for run in runs]


@pytest.fixture(scope="module")
def ranks(run_worker: Any, tmp_path_factory: pytest.TempPathFactory) -> list[Messages]:
    return run_ranks(run_worker, tmp_path_factory.mktemp("ranks"), "paced")


@pytest.mark.parametrize("case", DIFFERENCES)
def test_different_model_raises_on_both_ranks_and_later_models_train(
    ranks: list[Messages], case: str
) -> None:
    subject, first, second = DIFFERENCES[case]
    messages = ranks[0][case]
    assert messages == ranks[1][case]
    line = messages["first"].splitlines()[0]
    start = f"ranks 0 and 1 of process group '0' have different models: {subject}: rank 0 has "
    assert line.startswith(start)
    values = line.removeprefix(start).split("; rank 1 has ")
    assert first in values[0] and second in values[1]
    assert messages["repeated"] == messages["first"]
    assert messages["equal"] == ""


def test_different_order_of_later_collectives_raises_on_both_ranks(ranks: list[Messages]) -> None:
    for messages in ranks:
        text = messages["later order"]["raised"]
        assert " failed on rank " in text
        difference = text.partition("collective mismatch: ")[2]
        assert "rank 0 gathers '0' (step 4, forward), rank 1 gathers '2' (step 4" in difference


def test_different_order_of_many_collectives_between_comparisons_raises_on_both_ranks(
    run_worker: Any, tmp_path: Path
) -> None:
    for messages in run_ranks(run_worker, tmp_path, "fast"):
        text = messages["fast order"]["raised"]
        assert " failed on rank " in text
        assert "collective mismatch" in text
        assert "rank 0 gathers '" in text and "rank 1 gathers '" in text


def test_equal_order_of_100_steps_does_not_raise(ranks: list[Messages]) -> None:
    assert [messages["equal order"]["raised"] for messages in ranks] == ["", ""]


@pytest.mark.parametrize("case", ["equal", "off on rank 1"])
def test_models_that_are_equal_or_not_compared_do_not_raise(
    ranks: list[Messages], case: str
) -> None:
    for messages in ranks:
        assert not any(messages[case].values())
