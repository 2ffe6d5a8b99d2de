"""Replicas with different models raise before their first all-reduce. gloo would end a process by
SIGABRT if the sizes of an all-reduce differ."""

from __future__ import annotations

import functools

import pytest
import replica_divergence
from launch import run_ranks

pytestmark = pytest.mark.xdist_group("replica_divergence")  # the tests share launches

RANKS = {"replicate": 2, "HSDP": 4}
"""Job -> number of ranks."""


@functools.cache
def collect_messages(job: str, transport: str) -> list[dict[str, str]]:
    return run_ranks(
        replica_divergence.run, RANKS[job], (job,), env={"FSDP_C_TRANSPORT": transport}
    )


@pytest.mark.parametrize("transport", ["direct", "gloo"])
@pytest.mark.parametrize("job", RANKS)
@pytest.mark.parametrize("kind", replica_divergence.KINDS)
def test_different_models_of_replicas_raise_on_all_ranks(
    kind: str, job: str, transport: str
) -> None:
    for messages in collect_messages(job, transport):
        assert messages[kind].startswith("ranks 0 and 1 of process group '")
        assert "' have different models: " in messages[kind]
        assert replica_divergence.KINDS[kind] in messages[kind]


@pytest.mark.parametrize("transport", ["direct", "gloo"])
def test_different_model_of_one_rank_of_hsdp_raises_on_all_ranks(transport: str) -> None:
    messages = run_ranks(replica_divergence.run_one_rank, 4, env={"FSDP_C_TRANSPORT": transport})
    for message in messages:
        assert "ranks 0 and 1 of process group '" in message
        assert "' have different models: " in message
        assert message.endswith("Restart all ranks from a checkpoint")


@pytest.mark.parametrize("transport", ["direct", "gloo"])
@pytest.mark.parametrize("job", RANKS)
def test_equal_models_of_replicas_train(job: str, transport: str) -> None:
    assert [messages[""] for messages in collect_messages(job, transport)] == [""] * RANKS[job]
