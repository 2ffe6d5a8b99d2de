"""Scenarios of bugs of torch's FSDP2 on 2-D meshes and smaller reshard groups.

Names such as B1 are the entries of tests/TORCH_BUGS.md.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from behavior import DIM, Api, batch, blocks_and_head, full_value, grads, scenario, shard, weights
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Shard
from torch_bugs import (
    Gradients,
    PlainScatter,
    add_gradients,
    average,
    loss_of,
    selectable_blocks,
    shard_selectable_blocks,
    step_by,
    take_gradients,
)


def copies(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: param.detach().clone() for name, param in model.named_parameters()}


def hsdp_mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


# ---- partial reductions with replicas (B1) ----


class TwoLayers(nn.Module):
    """Two layers with ``first`` and ``second`` rows. A forward adds the losses of the layers with
    the indices ``used``."""

    def __init__(self, first: int, second: int) -> None:
        super().__init__()
        self.first = nn.Linear(DIM, first, bias=False)
        self.second = nn.Linear(DIM, second, bias=False)

    def forward(self, x: torch.Tensor, *used: int) -> torch.Tensor:
        layers = [(self.first, self.second)[index] for index in used]
        first, *rest = (layer(x.to(layer.weight.dtype)).square().mean() for layer in layers)
        return sum(rest, first)


def accumulate(
    api: Api, model: nn.Module, reference: nn.Module, uses: list[tuple[int, ...]]
) -> dict[str, Any]:
    """Accumulates one microbatch per entry of ``uses``. Only the last microbatch all-reduces."""
    expected: Gradients = dict.fromkeys(dict(reference.named_parameters()))
    for step, used in enumerate(uses):
        x = batch(api.rank, step)
        reference(x, *used).square().mean().backward()
        expected = add_gradients(expected, take_gradients(reference))
        model.set_requires_all_reduce(step == len(uses) - 1)
        model(x, *used).square().mean().backward()
    return {"found": grads(model), "expected": average(expected)}


def accumulate_in_two_layers(
    api: Api, sizes: tuple[int, int], uses: list[tuple[int, ...]], custom_scatter: bool = False
) -> Any:
    torch.manual_seed(3)
    reference = TwoLayers(*sizes)
    torch.manual_seed(3)
    model = api.fully_shard(TwoLayers(*sizes), mesh=hsdp_mesh())
    if custom_scatter:
        model.set_custom_reduce_scatter(PlainScatter())
    return accumulate(api, model, reference, uses)


USES = [[(0,), (1,)], [(0,), (0, 1), (1,)], [(0, 1), (1,), (0, 1)], [(1,), (0,), (0,)]]


@scenario(4)
def other_sizes_in_the_next_microbatch(api: Api) -> Any:
    """B1: microbatches have partial gradients of parameters of different sizes."""
    return accumulate_in_two_layers(api, (4, 6), USES[0])


@scenario(4)
def equal_sizes_in_the_next_microbatch(api: Api) -> Any:
    """B1: microbatches have partial gradients of different parameters of equal size."""
    return accumulate_in_two_layers(api, (4, 4), USES[0])


@scenario(4)
def several_orders_of_use(api: Api) -> Any:
    """B1: uses parameters in several orders, with the default and a custom reduce-scatter."""
    results: dict[str, Any] = {"found": [], "expected": []}
    if api.is_fsdp_c:
        for uses in USES:
            for sizes in ((4, 4), (3, 6)):
                for custom_scatter in (False, True):
                    outcome = accumulate_in_two_layers(api, sizes, uses, custom_scatter)
                    results["found"].append(outcome["found"])
                    results["expected"].append(outcome["expected"])
    return results


@scenario(4)
def group_unused_in_the_last_microbatch(api: Api) -> Any:
    """B1: a group has gradients only from microbatches without all-reduce."""
    reference, model = (
        selectable_blocks(),
        shard_selectable_blocks(api, selectable_blocks(), mesh=hsdp_mesh()),
    )
    return accumulate(api, model, reference, [(0, 1), (0,)])


@scenario(4)
def custom_group_unused_in_the_last_microbatch(api: Api) -> Any:
    """B1: the unused group has a custom reduce-scatter; torch loses its gradients as well."""
    reference, model = (
        selectable_blocks(),
        shard_selectable_blocks(api, selectable_blocks(), mesh=hsdp_mesh()),
    )
    model.blocks[1].set_custom_reduce_scatter(PlainScatter())
    return accumulate(api, model, reference, [(0, 1), (0,)])


@scenario(4)
def unit_run_twice_in_the_last_microbatch(api: Api) -> dict[str, Any]:
    """The last of two microbatches runs each unit in two forwards before its backward.

    The inputs require grad, so each unit has two post-backward nodes. Autograd runs the first one
    before the gradients of the unit exist.
    """
    model = shard(api, blocks_and_head(2), mesh=hsdp_mesh())
    reference = blocks_and_head(2)
    expected: Gradients = dict.fromkeys(dict(reference.named_parameters()))
    for step, runs in enumerate((1, 2)):
        model.set_requires_all_reduce(step == 1)
        x = batch(api.rank, step).requires_grad_()
        for trained in (model, reference):
            torch.stack(
                [trained(x * run).square().mean() for run in range(1, runs + 1)]
            ).sum().backward()
        expected = add_gradients(expected, take_gradients(reference))
    return {"found": grads(model), "expected": average(expected)}


@scenario(4)
def several_dtypes_on_replicas(api: Api) -> dict[str, Any]:
    """Trains float64 and float32 parameters in one group. The reduction is in float64."""
    torch.manual_seed(3)
    reference = TwoLayers(4, 3)
    reference.second.double()
    torch.manual_seed(3)
    model = TwoLayers(4, 3)
    model.second.double()
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64, cast_forward_inputs=False)
    api.fully_shard(model, mesh=hsdp_mesh(), mp_policy=policy)
    sums: Gradients = dict.fromkeys(dict(reference.named_parameters()))
    for step, used in enumerate([(1,), (0,), (0, 1)]):
        reference(batch(api.rank, step), *used).backward()
        sums = add_gradients(sums, take_gradients(reference, torch.float64))
        model.set_requires_all_reduce(step == 2)
        model(batch(api.rank, step), *used).backward()
    target_dtypes = {name: p.dtype for name, p in reference.named_parameters()}
    expected = {n: g.to(target_dtypes[n]) for n, g in average(sums).items() if g is not None}
    return {"found": grads(model), "expected": expected}


# ---- groups that only some replicas use (B7) ----


@scenario(4)
def replicas_using_different_groups(api: Api) -> dict[str, Any]:
    """B7: only one replica runs a block, but both must take part in its all-reduce.

    torch hangs here; ``unused_groups_are_reduced`` shows the reason.
    """
    if not api.is_fsdp_c:
        return {}
    reference, model = (
        selectable_blocks(),
        shard_selectable_blocks(api, selectable_blocks(), mesh=hsdp_mesh()),
    )
    model.set_reduce_scatter_unused_params(True)
    chosen = (0, 1) if api.rank < 2 else (0,)
    loss_of(reference(batch(api.rank), *chosen)).backward()
    loss_of(model(batch(api.rank), *chosen)).backward()
    return {"found": grads(model), "expected": average(take_gradients(reference))}


# ---- smaller reshard groups (B4, B5) ----


class Rows(nn.Module):
    """A linear layer with ``rows`` output features."""

    def __init__(self, rows: int) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, rows)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


@scenario(4)
def rows_between_forward_and_backward(api: Api) -> dict[str, Any]:
    """B5: records the registered parameter while it is sharded over pairs of ranks."""
    results: dict[str, Any] = {"found": [], "expected": []}
    for rows in (9, 5, 3, 1, 8):
        torch.manual_seed(3)
        reference = Rows(rows)
        torch.manual_seed(3)
        model = api.fully_shard(Rows(rows), reshard_after_forward=2)
        output = model(batch(api.rank))
        results["found"].append(weights(model))
        results["expected"].append(copies(reference))
        loss_of(output).backward()
        loss_of(reference(batch(api.rank))).backward()
        results["found"].append(grads(model))
        results["expected"].append(average(take_gradients(reference)))
    return results


@scenario(4)
def backward_with_shard_1_and_smaller_reshard_group(api: Api) -> str:
    """B4: returns the error of backward with Shard(1) and a smaller reshard group."""
    torch.manual_seed(3)
    layer = nn.Linear(8, 8, bias=False)
    api.fully_shard(layer, reshard_after_forward=2, shard_placement_fn=lambda param: Shard(1))
    loss = loss_of(layer(torch.ones(2, 8)))
    try:
        loss.backward()
    except IndexError as error:
        return str(error)
    return ""


@scenario(4)
def columns_between_forward_and_backward(api: Api) -> dict[str, Any]:
    """B4: uses Shard(1) and a smaller reshard group. torch is skipped: its ranks would hang."""
    if not api.is_fsdp_c:
        return {}
    torch.manual_seed(3)
    reference = nn.Sequential(nn.Linear(DIM, 4), nn.Linear(4, 3), nn.Linear(3, 3, bias=False))
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(DIM, 4), nn.Linear(4, 3), nn.Linear(3, 3, bias=False))

    def columns(param: nn.Parameter) -> Shard | None:
        return Shard(1) if param.shape == (3, 4) else None

    for layer in model:
        api.fully_shard(layer, reshard_after_forward=2, shard_placement_fn=columns)
    api.fully_shard(model, reshard_after_forward=2, shard_placement_fn=columns)
    results: dict[str, Any] = {"found": [], "expected": []}
    for step in range(2):
        output = model(batch(api.rank, step))
        results["found"].append(weights(model))
        results["expected"].append(copies(reference))
        loss_of(output).backward()
        loss_of(reference(batch(api.rank, step))).backward()
        results["found"].append(grads(model))
        expected = average(take_gradients(reference))
        results["expected"].append(expected)
        step_by(reference, expected)
        step_by(model, {name: p.grad for name, p in model.named_parameters()})
        model.zero_grad()
    return results


# ---- evaluation on a smaller reshard group (stale weights) ----


@scenario(4)
def evaluation_on_a_smaller_group(api: Api) -> dict[str, Any]:
    """Before each step, an evaluation leaves the parameters sharded over pairs of ranks."""
    reference, model = blocks_and_head(), shard(api, blocks_and_head(), reshard_after_forward=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    results: dict[str, Any] = {"found": [], "expected": []}
    for step in range(3):
        x = batch(api.rank, step)
        output = model(x)
        results["found"].append(output.detach())
        expected_output = reference(x)
        results["expected"].append(expected_output.detach())
        loss_of(output).backward()
        loss_of(expected_output).backward()
        with torch.no_grad():
            model(batch(api.rank, 50))
        optimizer.step()
        optimizer.zero_grad()
        step_by(reference, average(take_gradients(reference)), lr=0.5)
    results["found"].append({name: full_value(value) for name, value in model.state_dict().items()})
    results["expected"].append(copies(reference))
    return results
