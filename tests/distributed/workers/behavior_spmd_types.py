"""Scenarios with parameters that carry types of the package ``spmd_types``.

Without the package, each scenario returns None.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
from typing import Any

import torch
import torch.nn as nn
from behavior import Api, full_value, scenario
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

HAS_SPMD_TYPES = importlib.util.find_spec("spmd_types") is not None
WIDTH, TENSOR_PARALLEL, ROWS = 8, 2, 3


@functools.cache
def make_mesh() -> DeviceMesh:
    """Returns the mesh of all scenarios: torch compares meshes of typed parameters by identity."""
    return init_device_mesh("cpu", (2, TENSOR_PARALLEL), mesh_dim_names=("dp", "tp"))


class TypedBlock(nn.Module):
    """A tensor-parallel block: a column-wise and a row-wise weight, two replicated vectors.

    Types on a mesh dimension, here on ``tp``:

    - R, replicated: equal on all ranks, its gradient must be summed over them (``shift``).
    - I, invariant: equal on all ranks, with an equal gradient (``scale``).
    - V, varying: different on each rank. P, partial: summands of the ranks. S(dim): sharded.
    """

    def __init__(self, mesh: DeviceMesh, is_typed: bool = True) -> None:
        super().__init__()
        import spmd_types as spmd

        self.mesh = mesh
        rank = mesh.get_local_rank("tp")
        part = slice(rank * WIDTH // TENSOR_PARALLEL, (rank + 1) * WIDTH // TENSOR_PARALLEL)
        self.up = nn.Parameter(torch.randn(WIDTH, WIDTH)[part] / 3)
        self.down = nn.Parameter((torch.randn(WIDTH, WIDTH)[:, part] / 3).contiguous())
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.local_params: list[str] = []
        if is_typed:
            axes = {name: mesh.get_group(name) for name in ("dp", "tp")}
            spmd.assert_type(self.up, {axes["dp"]: spmd.R, axes["tp"]: spmd.S(0)})
            spmd.assert_type(self.down, {axes["dp"]: spmd.R, axes["tp"]: spmd.S(1)})
            spmd.assert_type(self.shift, {axes["tp"]: spmd.R})
            spmd.assert_type(self.scale, {axes["tp"]: spmd.I})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        import spmd_types as spmd

        group = self.mesh.get_group("tp")
        self.local_params = [
            f"{name} {type(param).__name__} {tuple(param.shape)} {spmd.get_local_type(param)}"
            for name, param in self.named_parameters()
        ]
        x = spmd.convert(x, group, src=spmd.I, dst=spmd.R) + self.shift
        hidden = torch.relu(torch.nn.functional.linear(x, self.up))
        partial = torch.nn.functional.linear(hidden, self.down)
        partial = spmd.reinterpret(partial, group, src=spmd.V, dst=spmd.P)
        summed = spmd.all_reduce(partial, group, src=spmd.P, dst=spmd.I)
        return summed * self.scale


def train(
    api: Api, policy: MixedPrecisionPolicy, *, checks: bool, steps: int = 3, sync: bool = True
) -> dict[str, Any]:
    """Trains two typed blocks for ``steps`` steps.

    Returns placements, types of the outputs, local parameters, losses and gradients.

    Args:
        checks: Whether the type checker of spmd_types is active.
        sync: False reduces gradients only in every second step.
    """
    import spmd_types as spmd
    import spmd_types.checker
    from torch.distributed.fsdp import DataParallelMeshDims

    mesh = make_mesh()
    dp, tp = mesh.get_group("dp"), mesh.get_group("tp")
    torch.manual_seed(3)
    model = nn.Sequential(TypedBlock(mesh), TypedBlock(mesh))
    with spmd.set_current_mesh(mesh):
        for module in (*model, model):
            api.fully_shard(
                module,
                mesh=mesh,
                mp_policy=policy,
                dp_mesh_dims=DataParallelMeshDims(shard="dp"),
            )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    seen: dict[str, Any] = {"losses": [], "outputs": [], "local parameters": []}
    seen["sharded"] = [f"{p.placements} {sorted(vars(p))}" for p in model.parameters()]
    torch.manual_seed(10 + mesh.get_local_rank("dp"))
    for step in range(steps):
        model.set_requires_gradient_sync(sync or step % 2 == 1)
        x = torch.randn(ROWS, WIDTH)
        with contextlib.ExitStack() as stack:
            stack.enter_context(spmd.set_current_mesh(mesh))
            if checks:
                stack.enter_context(spmd_types.checker.typecheck())
                spmd.assert_type(x, {dp: spmd.V, tp: spmd.I})
            y = model(x.requires_grad_())
            seen["outputs"].append(str(spmd.get_local_type(y)))
            seen["local parameters"] += [block.local_params for block in model]
            loss = y.square().sum()
            spmd.reinterpret(loss, dp, src=spmd.V, dst=spmd.P).backward()
        seen["losses"].append(loss.detach().clone())
        if sync or step % 2 == 1:
            seen[f"grads {step}"] = [full_value(p.grad) for p in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
    return seen


@scenario(world=4)
def typed_parameters_train(api: Api) -> dict[str, Any] | None:
    if not HAS_SPMD_TYPES:
        return None
    fp32, mixed = MixedPrecisionPolicy(), MixedPrecisionPolicy(reduce_dtype=torch.float64)
    return {
        "unchecked": train(api, fp32, checks=False),
        "checked": train(api, fp32, checks=True),
        "checked, accumulated, reduced in float64": train(
            api, mixed, checks=True, steps=4, sync=False
        ),
    }


@scenario(world=4)
def typed_parameters_refused(api: Api) -> dict[str, str] | None:
    """Returns the messages of ``fully_shard`` for types that it cannot translate."""
    if not HAS_SPMD_TYPES:
        return None
    import spmd_types as spmd
    from torch.distributed.fsdp import DataParallelMeshDims

    mesh = make_mesh()
    messages = {}

    def attempt(name: str, is_typed: bool = True, **arguments: Any) -> None:
        block = TypedBlock(mesh, is_typed)
        typed_mesh: Any = contextlib.nullcontext()
        if name == "partial on dp":
            spmd.assert_type(block.scale, {mesh.get_group("dp"): spmd.P})
            typed_mesh = spmd.set_current_mesh(mesh)
        try:
            with typed_mesh:
                api.fully_shard(block, **arguments)
        except Exception as error:
            messages[name] = f"{type(error).__name__}: {str(error).splitlines()[0]}"

    dims = DataParallelMeshDims(shard="dp")
    attempt("no dp_mesh_dims", mesh=mesh["dp"])
    attempt("plain", False, mesh=mesh, dp_mesh_dims=dims)
    attempt("no mesh of types", mesh=mesh, dp_mesh_dims=dims)
    attempt("partial on dp", mesh=mesh, dp_mesh_dims=dims)
    return messages
