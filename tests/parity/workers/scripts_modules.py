"""Scripts about modules: torch's own that are out of the ordinary, parametrized weights, what is
made late or moved, and modules that are wrapped."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from scripts import Script, copy_of, script
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.utils import parametrizations

HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

# ---- torch's modules ----


def transformer() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.TransformerEncoderLayer(8, 4, 16, dropout=0.0, batch_first=True) for _ in "ab")
    return nn.Sequential(*layers)


def train_and_evaluate(run: Script, model: nn.Module) -> list[Any]:
    """Evaluations take torch's fast path, which reads all weights at once."""
    words = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(run.rank))
    seen: list[Any] = []
    for _ in range(2):
        model.train()
        seen += run.train(model, lambda step: model(words).square().mean())
        model.eval()
        with torch.no_grad():
            seen.append(copy_of(model(words)))
        with torch.inference_mode():
            seen.append(model(words).clone())
    return seen


@script(costly=True)
def encoder_layers(run: Script) -> Any:
    return train_and_evaluate(run, run.shard(transformer()))


@script(costly=True)
def attention_as_a_unit(run: Script) -> Any:
    """Its output projection's weight is read without a call of its module."""
    model = transformer()
    for layer in model:
        run.fully_shard(layer.self_attn)
    return train_and_evaluate(run, run.shard(model))


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(width, width, 2, batch_first=True)
        self.linear = nn.Linear(width, width)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.linear(self.recurrent(rows)[0])


@script()
def recurrent_layers(run: Script) -> Any:
    """Which keep a list of their weights."""
    torch.manual_seed(0)
    model = run.shard(Recurrent(run.width))

    def loss(step: int) -> torch.Tensor:
        return model(run.rows(step, 6).view(2, 3, run.width)).square().mean()

    return run.train(model, loss)


class Stepwise(nn.Module):
    """A cell that is called four times in a forward."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cell = nn.GRUCell(width, width)
        self.linear = nn.Linear(width, width)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        hidden = torch.zeros_like(rows)
        for _ in range(4):
            hidden = self.cell(rows, hidden)
        return self.linear(hidden)


@script(costly=True)
def a_cell_called_many_times(run: Script) -> Any:
    torch.manual_seed(0)
    return run.train(run.shard(Stepwise(run.width)))


@script()
def embedding_with_sparse_gradients(run: Script) -> Any:
    torch.manual_seed(0)
    embedding = nn.Embedding(64, run.width, sparse=True)
    model = run.shard(nn.Sequential(embedding, nn.Linear(run.width, run.width)))
    return run.train(model, lambda step: model(torch.arange(5)).square().mean())


def normalized(run: Script) -> nn.Sequential:
    torch.manual_seed(0)
    linears = [nn.Linear(run.width, run.width) for _ in range(2)]
    return nn.Sequential(linears[0], nn.BatchNorm1d(run.width), linears[1])


@script()
def batch_norm_outside_of_units(run: Script) -> Any:
    model = normalized(run)
    run.shard(model, [model[0], model[2]])
    return [run.train(model), list(model.buffers())]


@script()
def batch_norm_of_mixed_dtypes(run: Script) -> Any:
    model = normalized(run)
    run.shard(model, [model[0], model[2]], mp_policy=HALF)
    return [run.train(model), list(model.buffers())]


@script()
def dropout(run: Script) -> Any:
    """Sharding draws no random numbers, and gathering neither."""
    torch.manual_seed(0)
    linears = [nn.Linear(run.width, run.width) for _ in range(2)]
    model = run.shard(nn.Sequential(linears[0], nn.Dropout(0.5), linears[1]))
    torch.manual_seed(run.rank)
    return [run.train(model), torch.rand(2)]


@script()
def convolutions_with_channels_last(run: Script) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    run.shard(model.to(memory_format=torch.channels_last))
    image = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(run.rank))
    return run.train(model, lambda step: model(image).square().mean())


# ---- parametrized weights ----


def parametrized(run: Script, parametrize: Any, steps: int = 2) -> list[Any]:
    model = run.blocks()
    for block in model:
        parametrize(block[0])
    return run.train(run.shard(model), steps=steps)


@script()
def weight_norm_by_hooks(run: Script) -> Any:
    return parametrized(run, nn.utils.weight_norm)


@script()
def weight_norm_by_parametrization(run: Script) -> Any:
    return parametrized(run, parametrizations.weight_norm)


@script()
def spectral_norm(run: Script) -> Any:
    return parametrized(run, parametrizations.spectral_norm)


@script()
def orthogonal_weights(run: Script) -> Any:
    return parametrized(run, parametrizations.orthogonal, steps=1)


# ---- parameters that are out of the ordinary ----


class Shapes(nn.Module):
    """One row for two ranks, more than can be divided, and maybe none at all."""

    def __init__(self, width: int, empty: bool) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.randn(1, width))
        self.odd = nn.Parameter(torch.randn(3 * width * width + 1))
        self.none = nn.Parameter(torch.randn(0, width)) if empty else None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output = rows * self.row + self.odd.mean()
        return output if self.none is None else output + self.none.sum()


def train_shapes(run: Script, empty: bool) -> list[Any]:
    """Losses, and the gradients and weights that have elements."""
    torch.manual_seed(0)
    model = run.shard(nn.Sequential(*(Shapes(run.width, empty) for _ in range(2))))
    params = [param for param in model.parameters() if param.numel()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: list[Any] = []
    for step in range(2):
        loss = run.loss(model, step)
        loss.backward()
        seen += [copy_of(loss), [copy_of(param.grad) for param in params]]
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, [copy_of(param) for param in params]]


@script()
def parameters_without_elements(run: Script) -> Any:
    return train_shapes(run, empty=True)


@script()
def parameters_of_odd_shapes(run: Script) -> Any:
    return train_shapes(run, empty=False)


class Transposed(nn.Module):
    """A parameter that is a view of a transposed tensor."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width).t())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.weight


@script()
def parameters_that_are_not_contiguous(run: Script) -> Any:
    torch.manual_seed(0)
    return run.train(run.shard(nn.Sequential(Transposed(run.width), Transposed(run.width))))


class Giving(nn.Module):
    """Its output is its parameter, or a view of it."""

    def __init__(self, width: int, view: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.view = view

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.weight.t() if self.view else self.weight


class Taking(nn.Module):
    """Uses another module's parameter."""

    def __init__(self, width: int, view: bool) -> None:
        super().__init__()
        self.giving = Giving(width, view)
        self.linear = nn.Linear(width, width)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.linear(rows) @ self.giving(rows)


@script(wide=True)
def a_parameter_as_output(run: Script) -> Any:
    torch.manual_seed(0)
    return run.train(run.shard(Taking(run.width, view=False)))


@script(wide=True)
def a_view_of_a_parameter_as_output(run: Script) -> Any:
    torch.manual_seed(0)
    model = Taking(run.width, view=True)
    run.fully_shard(model.giving, reshard_after_forward=False)
    run.fully_shard(model)
    return run.train(model)


# ---- what is made late, moved or initialized again ----


@script()
def lazy_modules_after_a_first_call(run: Script) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(run.width), nn.Tanh(), nn.LazyLinear(3))
    model(run.rows())
    return run.train(run.shard(model))


@script()
def lazy_modules_at_once(run: Script) -> Any:
    torch.manual_seed(0)
    return run.train(run.fully_shard(nn.Sequential(nn.LazyLinear(run.width), nn.Tanh())))


@script()
def moved_to_where_it_is(run: Script) -> Any:
    model = run.sharded()
    model.to("cpu")
    model.cpu()
    return run.train(model)


@script(costly=True)
def made_half_before_the_first_step(run: Script) -> Any:
    model = run.sharded()
    model.to(torch.bfloat16)

    def loss(step: int) -> torch.Tensor:
        return model(run.rows(step).bfloat16()).float().square().mean()

    return run.train(model, loss)


@script(costly=True)
def initialized_by_apply(run: Script) -> Any:
    """With random operations on DTensors."""

    def initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    model = run.sharded()
    torch.manual_seed(1)
    model.apply(initialize)
    return run.train(model)


# ---- wrappers ----


@script()
def wrappers_that_offload_or_recompute(run: Script) -> Any:
    """Around blocks that are sharded as wrapped."""
    model = run.blocks()
    model[0] = offload_wrapper(model[0])
    for index in (1, 2):
        model[index] = checkpoint_wrapper(model[index])
    return run.train(run.shard(model))


@script()
def containers_in_other_dtypes(run: Script) -> Any:
    """Which tensors of a dict are cast to the policy's dtype."""

    class Summed(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, given: dict[str, Any]) -> torch.Tensor:
            return self.linear(given["rows"]) + given["list"][0].to(torch.bfloat16)

    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    model = run.fully_shard(Summed(run.width), mp_policy=policy)

    def loss(step: int) -> torch.Tensor:
        given = {"rows": run.rows(step), "list": [run.rows(step + 1)]}
        return model(given).square().mean()

    return run.train(model, loss)


@script()
def branches_chosen_by_keyword(run: Script) -> Any:
    """Two modules of one group, of which each step calls one; a dict as output."""

    class Branches(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.branch = nn.ModuleDict(
                {"a": nn.Linear(width, width), "b": nn.Linear(width, width)}
            )

        def forward(self, *, given: dict[str, torch.Tensor], which: str = "a") -> dict[str, Any]:
            return {"output": self.branch[which](given["rows"]), "none": None, "text": which}

    torch.manual_seed(0)
    model = Branches(run.width)
    run.fully_shard([model.branch["a"], model.branch["b"]])
    run.fully_shard(model)

    def loss(step: int) -> torch.Tensor:
        output = model(given={"rows": run.rows(step)}, which="ab"[step % 2])
        return output["output"].square().mean()

    return run.train(model, loss)


class Named(torch.Tensor):
    """Of no other behaviour: what is computed with one is one, too."""


@script()
def tensors_of_a_subclass(run: Script) -> Any:
    """Inputs of units keep their class where they get the post-backward node, too."""
    seen: list[Any] = []

    def note(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        seen.append((type(args[0]).__name__, type(output).__name__, args[0].requires_grad))

    model = run.sharded()
    for block in model:
        block.register_forward_hook(note)

    def loss(step: int) -> torch.Tensor:
        rows = run.rows(step).as_subclass(Named).requires_grad_(step == 1)
        output = model(rows)
        seen.append(type(output).__name__)
        return output.as_subclass(torch.Tensor).square().mean()

    return [run.train(model, loss), seen]
