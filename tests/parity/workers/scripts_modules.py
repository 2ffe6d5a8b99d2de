"""Scripts about modules: unusual torch modules, parametrizations, unusual parameters, lazy and
moved modules, wrappers, and unusual inputs."""

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

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)

# ---- torch's modules ----


def transformer() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.TransformerEncoderLayer(8, 4, 16, dropout=0.0, batch_first=True) for _ in range(2))
    return nn.Sequential(*layers)


def train_and_evaluate(api: Script, model: nn.Module) -> list[Any]:
    """Trains and evaluates twice. Evaluation takes torch's fast path, which reads all weights."""
    words = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(api.rank))
    results: list[Any] = []
    for _ in range(2):
        model.train()
        results += api.train(model, lambda step: model(words).square().mean())
        model.eval()
        with torch.no_grad():
            results.append(copy_of(model(words)))
        with torch.inference_mode():
            results.append(model(words).clone())
    return results


@script(costly=True)
def transformer_encoder_layers(api: Script) -> Any:
    return train_and_evaluate(api, api.shard(transformer()))


@script(costly=True)
def attention_as_fsdp_unit(api: Script) -> Any:
    """Attention reads its output projection's weight without calling that module."""
    model = transformer()
    for layer in model:
        api.fully_shard(layer.self_attn)
    return train_and_evaluate(api, api.shard(model))


class Recurrent(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.recurrent = nn.LSTM(width, width, 2, batch_first=True)
        self.linear = nn.Linear(width, width)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.linear(self.recurrent(rows)[0])


@script()
def lstm_layers(api: Script) -> Any:
    """LSTM modules keep a list of their weights."""
    torch.manual_seed(0)
    model = api.shard(Recurrent(api.width))

    def loss(step: int) -> torch.Tensor:
        return model(api.rows(step, 6).view(2, 3, api.width)).square().mean()

    return api.train(model, loss)


class RepeatedCell(nn.Module):
    """Calls a GRU cell four times per forward."""

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
def gru_cell_called_four_times(api: Script) -> Any:
    torch.manual_seed(0)
    return api.train(api.shard(RepeatedCell(api.width)))


@script()
def embedding_with_sparse_gradients(api: Script) -> Any:
    torch.manual_seed(0)
    embedding = nn.Embedding(64, api.width, sparse=True)
    model = api.shard(nn.Sequential(embedding, nn.Linear(api.width, api.width)))
    return api.train(model, lambda step: model(torch.arange(5)).square().mean())


def build_batch_norm_model(api: Script) -> nn.Sequential:
    torch.manual_seed(0)
    linears = [nn.Linear(api.width, api.width) for _ in range(2)]
    return nn.Sequential(linears[0], nn.BatchNorm1d(api.width), linears[1])


@script()
def batch_norm_outside_of_units(api: Script) -> Any:
    model = build_batch_norm_model(api)
    api.shard(model, [model[0], model[2]])
    return [api.train(model), list(model.buffers())]


@script()
def batch_norm_with_mixed_precision(api: Script) -> Any:
    model = build_batch_norm_model(api)
    api.shard(model, [model[0], model[2]], mp_policy=MIXED)
    return [api.train(model), list(model.buffers())]


@script()
def dropout(api: Script) -> Any:
    """Neither sharding nor gathering draws random numbers."""
    torch.manual_seed(0)
    linears = [nn.Linear(api.width, api.width) for _ in range(2)]
    model = api.shard(nn.Sequential(linears[0], nn.Dropout(0.5), linears[1]))
    after_sharding = torch.rand(2)
    torch.manual_seed(api.rank)
    return [after_sharding, api.train(model), torch.rand(2)]


@script()
def convolutions_with_channels_last(api: Script) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    api.shard(model.to(memory_format=torch.channels_last))
    image = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(api.rank))
    return api.train(model, lambda step: model(image).square().mean())


# ---- parametrized weights ----


def train_parametrized(api: Script, parametrize: Any, steps: int = 2) -> list[Any]:
    model = api.blocks()
    for block in model:
        parametrize(block[0])
    return api.train(api.shard(model), steps=steps)


@script()
def weight_norm_by_hooks(api: Script) -> Any:
    return train_parametrized(api, nn.utils.weight_norm)


@script()
def weight_norm_by_parametrization(api: Script) -> Any:
    return train_parametrized(api, parametrizations.weight_norm)


@script()
def spectral_norm(api: Script) -> Any:
    return train_parametrized(api, parametrizations.spectral_norm)


@script()
def orthogonal_parametrization(api: Script) -> Any:
    return train_parametrized(api, parametrizations.orthogonal, steps=1)


# ---- unusual parameters ----


class UnevenShapes(nn.Module):
    """A parameter with one row, one of uneven size, and optionally one without elements."""

    def __init__(self, width: int, empty: bool) -> None:
        super().__init__()
        self.row = nn.Parameter(torch.randn(1, width))
        self.odd = nn.Parameter(torch.randn(3 * width * width + 1))
        self.none = nn.Parameter(torch.randn(0, width)) if empty else None

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        output = rows * self.row + self.odd.mean()
        return output if self.none is None else output + self.none.sum()


def train_shapes(api: Script, empty: bool) -> list[Any]:
    """Trains. Returns losses, and gradients and weights of parameters with elements."""
    torch.manual_seed(0)
    model = api.shard(nn.Sequential(*(UnevenShapes(api.width, empty) for _ in range(2))))
    params = [param for param in model.parameters() if param.numel()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results: list[Any] = []
    for step in range(2):
        loss = api.loss(model, step)
        loss.backward()
        results += [copy_of(loss), [copy_of(param.grad) for param in params]]
        optimizer.step()
        optimizer.zero_grad()
    return [*results, [copy_of(param) for param in params]]


@script()
def parameters_with_zero_elements(api: Script) -> Any:
    return train_shapes(api, empty=True)


@script()
def parameters_with_uneven_shapes(api: Script) -> Any:
    return train_shapes(api, empty=False)


class Transposed(nn.Module):
    """A parameter that is a transposed view."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width).t())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return rows @ self.weight


@script()
def non_contiguous_parameters(api: Script) -> Any:
    torch.manual_seed(0)
    return api.train(api.shard(nn.Sequential(Transposed(api.width), Transposed(api.width))))


class ReturnsParameter(nn.Module):
    """Returns its parameter, or a view of it."""

    def __init__(self, width: int, view: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width))
        self.view = view

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.weight.t() if self.view else self.weight


class UsesOtherParameter(nn.Module):
    """Uses another module's parameter through that module's output."""

    def __init__(self, width: int, view: bool) -> None:
        super().__init__()
        self.giving = ReturnsParameter(width, view)
        self.linear = nn.Linear(width, width)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.linear(rows) @ self.giving(rows)


@script(wide=True)
def parameter_as_output(api: Script) -> Any:
    torch.manual_seed(0)
    return api.train(api.shard(UsesOtherParameter(api.width, view=False)))


@script(wide=True)
def parameter_view_as_output(api: Script) -> Any:
    torch.manual_seed(0)
    model = UsesOtherParameter(api.width, view=True)
    api.fully_shard(model.giving, reshard_after_forward=False)
    api.fully_shard(model)
    return api.train(model)


# ---- lazy, moved and reinitialized modules ----


@script()
def lazy_modules_sharded_after_first_call(api: Script) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.LazyLinear(api.width), nn.Tanh(), nn.LazyLinear(3))
    model(api.rows())
    return api.train(api.shard(model))


@script()
def lazy_modules_sharded_before_first_call(api: Script) -> Any:
    torch.manual_seed(0)
    return api.train(api.fully_shard(nn.Sequential(nn.LazyLinear(api.width), nn.Tanh())))


@script()
def moved_to_same_device(api: Script) -> Any:
    model = api.sharded()
    model.to("cpu")
    model.cpu()
    return api.train(model)


@script(costly=True)
def converted_to_bfloat16_after_sharding(api: Script) -> Any:
    model = api.sharded()
    model.to(torch.bfloat16)

    def loss(step: int) -> torch.Tensor:
        return model(api.rows(step).bfloat16()).float().square().mean()

    return api.train(model, loss)


@script(costly=True)
def initialized_by_apply_after_sharding(api: Script) -> Any:
    """Initializes with random operations on DTensors."""

    def initialize(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.trunc_normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    model = api.sharded()
    torch.manual_seed(1)
    model.apply(initialize)
    return api.train(model)


# ---- wrappers ----


@script()
def offload_and_checkpoint_wrappers(api: Script) -> Any:
    """The wrapped blocks are FSDP units."""
    model = api.blocks()
    model[0] = offload_wrapper(model[0])
    for index in (1, 2):
        model[index] = checkpoint_wrapper(model[index])
    return api.train(api.shard(model))


# ---- unusual inputs ----


@script()
def nested_inputs_with_mixed_precision(api: Script) -> Any:
    """torch casts the floating tensors in nested inputs, and no integer: 257 in bf16 is 256."""

    class Summed(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.linear = nn.Linear(width, width)

        def forward(self, inputs: dict[str, Any]) -> torch.Tensor:
            rows, offset = inputs["list"]
            return self.linear(inputs["rows"]) + rows + (offset - 256)

    torch.manual_seed(0)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype=torch.float32)
    model = api.fully_shard(Summed(api.width), mp_policy=policy)

    def loss(step: int) -> torch.Tensor:
        inputs = {"rows": api.rows(step), "list": [api.rows(step + 1), torch.tensor(257)]}
        return model(inputs).square().mean()

    return api.train(model, loss)


@script()
def grouped_branches_chosen_by_keyword(api: Script) -> Any:
    """Two modules in one group, of which each step calls one. The output is a dict."""

    class Branches(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.branch = nn.ModuleDict(
                {"a": nn.Linear(width, width), "b": nn.Linear(width, width)}
            )

        def forward(
            self, *, inputs: dict[str, torch.Tensor], branch_name: str = "a"
        ) -> dict[str, Any]:
            return {
                "output": self.branch[branch_name](inputs["rows"]),
                "none": None,
                "text": branch_name,
            }

    torch.manual_seed(0)
    model = Branches(api.width)
    api.fully_shard([model.branch["a"], model.branch["b"]])
    api.fully_shard(model)

    def loss(step: int) -> torch.Tensor:
        output = model(inputs={"rows": api.rows(step)}, branch_name="ab"[step % 2])
        return output["output"].square().mean()

    return api.train(model, loss)


class PlainSubclass(torch.Tensor):
    """A subclass without other behavior. Operations on it return the subclass."""


@script()
def tensor_subclass_inputs(api: Script) -> Any:
    """Inputs keep their class, also when FSDP2 inserts its post-backward function."""
    results: list[Any] = []

    def record_types(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        results.append((type(args[0]).__name__, type(output).__name__, args[0].requires_grad))

    model = api.sharded()
    for block in model:
        block.register_forward_hook(record_types)

    def loss(step: int) -> torch.Tensor:
        rows = api.rows(step).as_subclass(PlainSubclass).requires_grad_(step == 1)
        output = model(rows)
        results.append(type(output).__name__)
        return output.as_subclass(torch.Tensor).square().mean()

    return [api.train(model, loss), results]
