"""Advice of ``explain`` and ``plan``: each rule fires, and its saving equals that of a real step.

A real step runs the sharded model before and after the advice, on torch's fake process group. The
test counts the collectives, and the bytes that this rank would receive in them.
"""

from __future__ import annotations

import io
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn as nn
from test_dry_run import Block, Chain, Checkpointed, Reentrant, prefetch_in_forward, shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fsdp_c
from fsdp_c import Explanation, fully_shard
from fsdp_c._tools.step_advice import Advice

BATCH = torch.ones(2, 8)
TOKENS = torch.zeros(2, 4, dtype=torch.long)


@pytest.fixture(autouse=True)
def world(fake_group: int) -> None:
    assert fake_group == 8


# ---- real steps ----------------------------------------------------------------------------------


class Cost(NamedTuple):
    """Collectives of a step, and the bytes that this rank receives in them."""

    gathers: int
    all_reduces: int
    received: int


class _CollectiveCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.received = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if name in ("c10d::_allgather_base_", "c10d::_reduce_scatter_base_"):
            small, large = sorted(args[:2], key=lambda tensor: tensor.numel())
            self.received += large.nbytes - large.nbytes * small.numel() / large.numel()
        elif name == "c10d::allreduce_":
            group = torch.distributed.ProcessGroup.unbox(args[1])
            size = sum(tensor.nbytes for tensor in args[0])
            self.received += 2 * size * (group.size() - 1) / group.size()
        self.counts[name] += name.startswith("c10d::")
        return func(*args, **(kwargs or {}))


def measure_step(
    model: nn.Module,
    batch: Any = BATCH,
    set_up: Callable[[int], object] = lambda _: None,
    microbatches: int = 1,
) -> Cost:
    """Returns the cost of the second of two steps.

    ``set_up(i)`` is called before microbatch ``i``.
    """
    for _ in range(2):
        counter = _CollectiveCounter()
        with counter:
            for microbatch in range(microbatches):
                set_up(microbatch)
                model(batch).float().sum().backward()
    counts = counter.counts
    return Cost(counts["c10d::_allgather_base_"], counts["c10d::allreduce_"], int(counter.received))


def explain(model: nn.Module, batch: Any = BATCH, **kwargs: Any) -> Explanation:
    return fsdp_c.explain(model, batch=batch, file=io.StringIO(), **kwargs)


def find_advice(explanation: Explanation, text: str) -> Advice:
    (advice,) = (advice for advice in explanation.advice if text in str(advice))
    return advice


def has_advice(explanation: Explanation, text: str) -> bool:
    return any(text in str(advice) for advice in explanation.advice)


def assert_saves(advice: Advice, before: Cost, after: Cost) -> None:
    """Asserts that the stated saving is the difference of two real steps, and is not zero."""
    saves = advice.saves
    assert (saves.gathers, saves.all_reduces) == (
        before.gathers - after.gathers,
        before.all_reduces - after.all_reduces,
    )
    assert abs(saves.received - (before.received - after.received)) <= 16  # integer divisions
    assert saves.received > 0


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("reshard", [True, False, 2, 4])
def test_explained_received_bytes_are_those_of_a_step(
    reshard: bool | int, microbatches: int
) -> None:
    model = shard(Chain(), reshard_after_forward=reshard)
    received = explain(model, microbatches=microbatches).received
    assert abs(received["shard"] - measure_step(model, microbatches=microbatches).received) <= 1
    assert received["replicate"] == 0


# ---- gathers -------------------------------------------------------------------------------------


class Embedded(nn.Module):
    """An embedding, blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(40, 8)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(8, 40, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class RecomputesEmbedding(Embedded):
    """Recomputes the embedding in backward."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = checkpoint(lambda t: self.blocks[0](self.embed(t)), tokens, use_reentrant=False)
        return self.head(self.blocks[1](x))


def sharded_embedding(model: Any, unshard_in_backward: bool = True) -> Any:
    fully_shard(model.embed)
    model.embed.set_unshard_in_backward(unshard_in_backward)
    return shard(model)


class Nested(Chain):
    """Recomputes each block within a recomputation of all blocks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.run_blocks, self.embed(x), use_reentrant=True))

    def run_blocks(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True)
        return x


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("make", [Reentrant, Nested])
def test_reentrant_checkpointing_with_forward_prefetch_repeats_gathers(
    make: Callable[[], Any],
) -> None:
    model = prefetch_in_forward(shard(make()))
    advice = find_advice(explain(model), "use_reentrant=False")
    assert advice.saves.gathers == 2
    assert_saves(
        advice, measure_step(model), measure_step(prefetch_in_forward(shard(Checkpointed())))
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda: shard(Reentrant()),
        lambda: shard(Nested()),
        lambda: prefetch_in_forward(shard(Checkpointed())),
    ],
)
def test_checkpointing_with_two_gathers_per_unit_gets_no_advice(make: Callable[[], Any]) -> None:
    explanation = explain(make())
    assert not has_advice(explanation, "checkpoint")


def test_checkpointed_embedding_is_gathered_for_its_recomputation() -> None:
    model = sharded_embedding(RecomputesEmbedding(), False)
    advice = find_advice(explain(model, TOKENS), "outside of torch.utils.checkpoint")
    after = sharded_embedding(Embedded(), False)
    assert_saves(advice, measure_step(model, TOKENS), measure_step(after, TOKENS))
    assert not has_advice(explain(after, TOKENS), "checkpoint")


def test_embedding_that_is_gathered_in_backward_gets_advice() -> None:
    model = sharded_embedding(Embedded())
    advice = find_advice(explain(model, TOKENS), "set_unshard_in_backward(False)")
    before = measure_step(model, TOKENS)
    exec(advice.code, {"model": model})
    assert_saves(advice, before, measure_step(model, TOKENS))
    assert not has_advice(explain(model, TOKENS), "set_unshard_in_backward")


@pytest.mark.parametrize(
    "make",
    [
        lambda: shard(Chain()),
        lambda: sharded_embedding(RecomputesEmbedding()),  # the recomputation gathers it anyway
        lambda: fsdp_c.auto_shard(Embedded()),
    ],
)
def test_units_without_a_needless_gather_get_no_advice_about_embeddings(make: Any) -> None:
    model = make()
    batch = BATCH if isinstance(model, Chain) else TOKENS
    assert not has_advice(explain(model, batch), "set_unshard_in_backward")


def test_embedding_that_is_tied_to_the_head_gets_no_advice() -> None:
    model = Embedded()
    model.head.weight = model.embed.weight
    fully_shard([model.embed, model.head])
    assert not has_advice(explain(shard(model), TOKENS), "set_unshard_in_backward")


@pytest.mark.parametrize("microbatches", [1, 3])
def test_frozen_units_are_gathered_for_each_microbatch(microbatches: int) -> None:
    model = Chain()
    model.blocks[0].requires_grad_(False)
    model.blocks[1].requires_grad_(False)
    model = shard(model)
    advice = find_advice(explain(model, microbatches=microbatches), "are frozen")
    assert advice.saves.gathers == 4 * microbatches
    before = measure_step(model, microbatches=microbatches)
    for unit in model.blocks[:2]:
        exec(advice.code.partition(": ")[2], {"unit": unit})
    assert_saves(advice, before, measure_step(model, microbatches=microbatches))
    assert not has_advice(explain(model), "are frozen")


def test_unit_with_frozen_and_trained_parameters_gets_no_advice_about_frozen_units() -> None:
    model = Chain()
    for block in model.blocks:
        block.up.requires_grad_(False)
    assert not has_advice(explain(shard(model)), "are frozen")


# ---- replicas ------------------------------------------------------------------------------------


def hybrid(replicas: int = 2) -> Any:
    shape = (replicas, 8 // replicas)
    return shard(Chain(), mesh=init_device_mesh("cpu", shape, mesh_dim_names=("r", "s")))


def test_advised_all_reduce_after_the_last_microbatch_saves_the_predicted_collectives() -> None:
    model = hybrid()
    advice = find_advice(explain(model, microbatches=4), "set_requires_all_reduce")
    assert advice.saves.all_reduces == 3 * 4
    before = measure_step(model, microbatches=4)

    def set_up(microbatch: int) -> None:
        exec(advice.code, {"model": model, "is_last_microbatch": microbatch == 3})

    assert_saves(advice, before, measure_step(model, set_up=set_up, microbatches=4))
    assert not has_advice(explain(model), "set_requires_all_reduce")


def test_advice_about_gradient_norm_has_the_factor_of_the_replicas() -> None:
    advice = find_advice(explain(hybrid(4)), "gradient norm")
    assert "each of 4 replicas and is 2 times too large" in str(advice)
    assert "Saves" not in str(advice)
    assert not has_advice(explain(shard(Chain())), "gradient norm")


def test_advice_for_small_model_is_mesh_of_hsdp() -> None:
    with torch.device("meta"):
        model = Chain()
    kwargs: dict[str, Any] = {"batch": BATCH, "ranks_per_node": 4, "file": io.StringIO()}
    explanation = fsdp_c.plan(model, world_size=16, memory="1 MiB", **kwargs)
    advice = find_advice(explanation, "init_device_mesh")
    assert '(4, 4), mesh_dim_names=("replicate", "shard")' in advice.code
    after = fsdp_c.plan(model, mesh=(4, 4), **kwargs)
    crossing = explanation.received["shard"] - after.received["replicate"]
    assert abs(advice.saves.received - crossing) <= 16 and crossing > 0
    peak = fsdp_c.plan(model, world_size=4, **kwargs).peak.total
    small = fsdp_c.plan(model, world_size=16, memory=peak // 2, **kwargs)
    assert not has_advice(small, "init_device_mesh")
    assert not has_advice(fsdp_c.plan(model, world_size=4, **kwargs), "init_device_mesh")
    assert not has_advice(after, "init_device_mesh")
    resharded = fsdp_c.plan(model, world_size=16, reshard_after_forward=4, **kwargs)
    assert not has_advice(resharded, "init_device_mesh")


def test_explain_reports_replicas_that_do_not_all_reduce() -> None:
    model = hybrid()
    assert not explain(model).warnings
    model.set_requires_all_reduce(False)
    (line,) = explain(model).warnings
    assert "do not all-reduce their gradients now" in line


def test_explain_warns_about_unit_without_the_replicas_of_other_units() -> None:
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("r", "s"))
    model = Chain()
    fully_shard(model.blocks[1], mesh=mesh["s"])  # type: ignore[arg-type]
    for block in (model.blocks[0], model.blocks[2]):
        fully_shard(block, mesh=mesh)
    (line,) = explain(fully_shard(model, mesh=mesh)).warnings
    assert line.startswith("the mesh of 'blocks.1' lacks the 2 replicas of ")


# ---- bytes ---------------------------------------------------------------------------------------


class Uneven(nn.Module):
    """Weights of 9 rows, which 8 ranks pad to 16, and of 8 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 9, bias=False), nn.Linear(9, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


def test_padding_is_avoided_by_sharding_another_dim() -> None:
    model = fully_shard(Uneven())
    explanation = explain(model)
    advice = find_advice(explanation, "shard_placement_fn")
    assert "'up.weight' with 9 rows" in str(advice) and "by up to 39%" in str(advice)
    keywords = advice.code.partition("(..., ")[2].removesuffix(")")
    after: Any = eval(
        f"fully_shard(model, {keywords})",
        {
            "fully_shard": fully_shard,
            "model": Uneven(),
            "Shard": Shard,
        },
    )
    assert after.up.weight.placements == (Shard(1),)
    assert_saves(advice, measure_step(model), measure_step(after))
    stored = explanation.units[0].shard_bytes - explain(after).units[0].shard_bytes
    assert advice.saves.stored_bytes == stored == 4 * 7 * 8 // 8
    assert not has_advice(explain(after), "shard_placement_fn")


def test_padding_without_an_evenly_divisible_dim_gets_no_advice() -> None:
    assert not has_advice(explain(fully_shard(nn.Linear(9, 9)), torch.ones(2, 9)), "padded")


class SeveralDtypes(nn.Module):
    """A float32 layer and a larger bfloat16 layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 64, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x.to(self.first.weight.dtype)).bfloat16())


def test_advice_for_unit_of_several_dtypes_saves_bytes() -> None:
    model = fully_shard(SeveralDtypes())
    advice = find_advice(explain(model), "parameters of several dtypes")
    after = SeveralDtypes()
    exec(advice.code, {"module": after, "torch": torch})
    after = fully_shard(after)
    assert_saves(advice, measure_step(model), measure_step(after))
    assert not has_advice(explain(after), "several dtypes")


def test_unit_of_several_dtypes_with_a_reduce_dtype_gets_no_advice() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(SeveralDtypes(), mp_policy=policy)
    assert not has_advice(explain(model), "several dtypes")


# ---- compilation ---------------------------------------------------------------------------------


def count_operations(make: Callable[[Any], Any]) -> list[int]:
    """Returns the number of operations of each graph that a compiled model has in one forward."""
    counts = []

    def backend(graph: Any, inputs: Any) -> Any:
        counts.append(sum(node.op.startswith("call") for node in graph.graph.nodes))
        return graph

    torch._dynamo.reset()
    make(backend)(BATCH)
    torch._dynamo.reset()
    return counts


def test_explain_reports_compiled_root_with_sharded_blocks() -> None:
    model = shard(Chain())
    assert explain(model).warnings == []
    (line,) = explain(torch.compile(model)).warnings
    assert "the hooks of 3 sharded modules in it break its graph" in line
    model.compile()
    (line,) = explain(model).warnings
    assert "torch.compile is applied to 'FSDPChain'" in line


def test_hooks_of_sharded_blocks_break_the_graph_of_a_compiled_root() -> None:
    def compile_root(model: Any) -> list[int]:
        return count_operations(lambda backend: torch.compile(model, backend=backend))

    operations_of_block = 4
    (whole,) = compile_root(Chain())
    assert whole == 3 * operations_of_block + 2
    assert compile_root(shard(Chain())) == [operations_of_block]  # the rest is not compiled


def test_explain_does_not_report_compiled_blocks() -> None:
    model = Chain()
    for block in model.blocks:
        block.compile(backend="eager")
    assert explain(shard(model)).warnings == []


# ---- arguments -----------------------------------------------------------------------------------


def test_explain_with_no_microbatches_raises() -> None:
    with pytest.raises(ValueError, match="microbatches is positive, not 0"):
        explain(shard(Chain()), microbatches=0)


def test_plan_with_ranks_per_node_that_is_not_an_integer_raises() -> None:
    with pytest.raises(TypeError, match="ranks_per_node is an integer, not 'eight'"):
        fsdp_c.plan(Chain(), world_size=8, ranks_per_node="eight")  # type: ignore[arg-type]


def test_each_step_advice_is_one_line() -> None:
    explanation = explain(sharded_embedding(Embedded()), TOKENS)
    lines = [line for line in str(explanation).splitlines() if line.startswith("advice: ")]
    assert lines == [f"advice: {advice}" for advice in explanation.advice] != []
