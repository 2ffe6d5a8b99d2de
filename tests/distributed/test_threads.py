"""Ranks as threads of one process, as in PyTorch's FSDP tests: they share no state of fsdp_c."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn
from behavior import Api, batch, blocks_and_head, differences, grads, shard, train, weights
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.testing._internal.common_distributed import MultiThreadedTestCase

pytestmark = pytest.mark.torch("2.13")  # older DTensors crash in threads with fake tensor modes

SEEDING = threading.Lock()
"""All ranks share torch's global random generator in one process."""


def model_of(api: Api, **kwargs: Any) -> nn.Sequential:
    with SEEDING:
        model = blocks_and_head()
    return shard(api, model, **kwargs)


class Threads:
    """Tests that run on ``world_size`` ranks."""

    world_size: int
    rank: int

    def setUp(self) -> None:
        super().setUp()  # type: ignore[misc]
        self._spawn_threads()  # type: ignore[attr-defined]

    def api(self, name: str) -> Api:
        return Api(name, self.rank, self.world_size, Path())

    def assert_same(self, run: Any) -> Any:
        """Asserts that run(api) is equal under torch and fsdp_c; returns the result of fsdp_c."""
        by_torch, by_fsdp_c = run(self.api("torch")), run(self.api("fsdp_c"))
        assert differences(by_torch, by_fsdp_c) == []
        return by_fsdp_c

    def test_training_in_threads_matches_torch(self) -> None:
        for reshard in (None, True, False):
            self.assert_same(
                lambda api, reshard=reshard: train(
                    model_of(api, reshard_after_forward=reshard), self.rank, 3
                )
            )

    def test_mixed_precision_in_threads_matches_torch(self) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        self.assert_same(lambda api: train(model_of(api, mp_policy=policy), self.rank, 3))

    def test_accumulation_in_threads_matches_torch(self) -> None:
        def run(api: Api) -> list[Any]:
            model = model_of(api)
            for part in range(3):
                model.set_requires_gradient_sync(part == 2)
                model(batch(self.rank, part)).square().mean().backward()
            return [grads(model), *train(model, self.rank, 1)]

        self.assert_same(run)

    def test_direct_unshard_in_threads_gathers_full_parameters(self) -> None:
        model = model_of(self.api("fsdp_c"))
        with SEEDING:
            expected = blocks_and_head().state_dict()
        handles = [block.unshard(async_op=True) for block in list(model)[:-1]]
        for index, handle in enumerate(handles):
            handle.wait()
            for name, param in model[index].named_parameters():
                assert torch.equal(param, expected[f"{index}.{name}"])
            model[index].reshard()

    def test_each_thread_recovers_from_its_own_exception(self) -> None:
        """All ranks raise in forward, then in backward."""
        expected = train(model_of(self.api("fsdp_c")), self.rank, 2)
        model = model_of(self.api("fsdp_c"))
        for where in ("forward", "backward"):
            self.fail_in(model, where)
            model.reset_iter_state()
            model.zero_grad()
        assert differences(expected, train(model, self.rank, 2)) == []

    def fail_in(self, model: nn.Sequential, where: str) -> None:
        message = f"{where} of rank {self.rank}"

        def fail(*unused: Any) -> None:
            raise ValueError(message)

        def fail_in_backward(module: nn.Module, args: Any, output: torch.Tensor) -> None:
            output.register_hook(fail)

        hook = fail if where == "forward" else fail_in_backward
        handle = model[1].linear.register_forward_hook(hook)
        try:
            model(batch(self.rank)).square().mean().backward()
        except ValueError as error:
            assert str(error) == message
        else:
            raise AssertionError("nothing was raised")
        finally:
            handle.remove()

    def test_weights_gathered_in_threads_equal_the_originals(self) -> None:
        with SEEDING:
            expected = dict(blocks_and_head().named_parameters())
        for name, value in weights(model_of(self.api("fsdp_c"))).items():
            assert torch.equal(value, expected[name])


class TestFourThreads(Threads, MultiThreadedTestCase):
    world_size = 4


class TestEightThreads(Threads, MultiThreadedTestCase):
    """More ranks than rows: some shards are empty."""

    world_size = 8
