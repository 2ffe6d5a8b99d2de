"""``ShardedEMA``: an exponential moving average of sharded weights."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from ._runtime.fsdp_units import reshard_all
from .names import clean_tensor_name


class ShardedEMA:
    """Averages a model's weights with the same sharding, without collectives or a model copy.

    ::

        ema = ShardedEMA(model, decay=0.999)
        ...
        optimizer.step()
        ema.update(model)
        ...
        with ema.applied(model):
            evaluate(model)

    The numbers are those of ``torch.optim.swa_utils.AveragedModel`` with
    ``get_ema_multi_avg_fn(decay)``, which needs ``deepcopy`` and does not support FSDP modules. The
    first update copies the weights. Each later update computes
    ``average = average + (weight - average) * (1 - decay)``. Integer and boolean weights are
    copied, because torch truncates their averages, which then drift. Buffers are not averaged.

    Args:
        model: The model, with parameters of any sharding. The object keeps no reference to the
            model.
        decay: A number from 0 to 1, or a function of the number of updates so far.
        dtype: The floating-point dtype of the averages. Averages of complex weights have the
            complex dtype of that precision. ``None``: the dtypes of the weights.
        device: The device of the averages. ``None``: the devices of the weights.

    Raises:
        ValueError: ``decay`` is out of range, ``dtype`` is not floating-point, or the model has
            parameters on the meta device.
        NotImplementedError: torch cannot average in the dtype of a parameter (float8).
    """

    def __init__(
        self,
        model: nn.Module,
        decay: float | Callable[[int], float] = 0.999,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        self._decay = decay
        self.updates = 0
        self._compute_decay()
        if dtype is not None and not dtype.is_floating_point:
            raise ValueError(f"ShardedEMA expects a floating-point dtype, not {dtype}")
        self._averages: dict[str, torch.Tensor] = {}
        for name, param in _reshard_and_list_params(model).items():
            if param.is_meta:
                raise ValueError(f"ShardedEMA needs weights, but '{name}' is on the meta device")
            local = _get_local(param).to(device, _choose_dtype(param, dtype), copy=True)
            _check_arithmetic(name, local)
            self._averages[name] = _make_like(param, local)

    def _compute_decay(self) -> float:
        decay = self._decay(self.updates) if callable(self._decay) else self._decay
        if not 0.0 <= decay <= 1.0:
            raise ValueError(f"ShardedEMA expects a decay from 0 to 1, not {decay}")
        return decay

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Adds the current weights to the averages. Call ``update`` after ``optimizer.step()``.

        Raises:
            ValueError: Names, shapes or shardings of parameters and averages differ.
        """
        pairs = self._list_pairs(model)
        decay = self._compute_decay()
        averages, weights = [], []
        for average, weight in pairs:
            weight = weight.to(average.device, average.dtype)
            if self.updates == 0 or not _is_averaged(average):
                average.copy_(weight)
            elif average.numel() > 0:
                averages.append(average)
                weights.append(weight)
        if averages:
            torch._foreach_lerp_(averages, weights, 1 - decay)
        self.updates += 1

    @contextlib.contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Context in which the model has the averages. Restores the weights at the end."""
        weights = [(weight, weight.clone()) for _, weight in self._list_pairs(model)]
        try:
            self.copy_to(model)
            yield
        finally:
            reshard_all(model)
            with torch.no_grad():
                for weight, original in weights:
                    weight.copy_(original)

    @torch.no_grad()
    def copy_to(self, model: nn.Module) -> None:
        """Overwrites the weights of ``model`` with the averages."""
        for average, weight in self._list_pairs(model):
            weight.copy_(average)

    def _list_pairs(self, model: nn.Module) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Returns pairs of local averages and local weights."""
        params = _reshard_and_list_params(model)
        if params.keys() != self._averages.keys():
            differing = sorted(params.keys() ^ self._averages.keys())
            raise ValueError(f"ShardedEMA was made for another model: {differing}")
        pairs = []
        for name, average in self._averages.items():
            param = params[name]
            if not _have_equal_layouts(param, average):
                raise ValueError(
                    f"ShardedEMA: '{name}' has another shape or sharding than its average"
                )
            pairs.append((_get_local(average), _get_local(param)))
        return pairs

    def __getitem__(self, name: str) -> torch.Tensor:
        """Returns the average of a parameter, a DTensor for a DTensor parameter."""
        return self._averages[name]

    def state_dict(self) -> dict[str, Any]:
        """Returns the averages by name (not copied), and the number of updates.

        The averages of DTensor parameters are DTensors, so torch.distributed.checkpoint can save
        the state.
        """
        return {"averages": dict(self._averages), "updates": self.updates}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Loads a result of :meth:`state_dict`.

        Raises:
            ValueError: Entries are missing or malformed, or names, shapes or shardings differ. The
                averages have not changed.
        """
        for entry in ("averages", "updates"):
            if entry not in state:
                raise ValueError(f"ShardedEMA: the state has no '{entry}'")
        averages, updates = state["averages"], state["updates"]
        try:
            updates = int(updates)
        except (TypeError, ValueError):
            raise ValueError(f"ShardedEMA: 'updates' is {updates!r}, not a number") from None
        if averages.keys() != self._averages.keys():
            differing = sorted(averages.keys() ^ self._averages.keys())
            raise ValueError(f"ShardedEMA: the state is of another model: {differing}")
        for name, average in self._averages.items():
            if not isinstance(averages[name], torch.Tensor):
                raise ValueError(f"ShardedEMA: '{name}' is no tensor in the state")
            if not _have_equal_layouts(averages[name], average):
                raise ValueError(f"ShardedEMA: '{name}' has another shape or sharding in the state")
        for name, average in self._averages.items():
            _get_local(average).copy_(_get_local(averages[name]))
        self.updates = updates


def _reshard_and_list_params(model: nn.Module) -> dict[str, torch.Tensor]:
    reshard_all(model)
    return {clean_tensor_name(name): param for name, param in model.named_parameters()}


def _is_averaged(tensor: torch.Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def _choose_dtype(param: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Returns the dtype of a parameter's average."""
    if dtype is None or not _is_averaged(param):
        return param.dtype
    return torch.promote_types(dtype, torch.complex32) if param.is_complex() else dtype


def _check_arithmetic(name: str, average: torch.Tensor) -> None:
    """Raises if torch cannot average in this dtype, so that no update fails halfway."""
    if not _is_averaged(average):
        return
    zero = torch.zeros(1, dtype=average.dtype, device=average.device)
    try:
        zero.lerp(zero, 0.5)
    except NotImplementedError as error:
        raise NotImplementedError(
            f"ShardedEMA cannot average '{name}' in {average.dtype} ({error}); give the averages "
            "another dtype, for example dtype=torch.float32"
        ) from None


def _get_local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor.detach()


def _have_equal_layouts(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have equal shapes and shardings on all ranks.

    Meshes of the same ranks are equal, because a loaded state may have another mesh object.
    """
    if tensor.shape != other.shape:
        return False
    if not isinstance(tensor, DTensor) or not isinstance(other, DTensor):
        return not isinstance(tensor, DTensor) and not isinstance(other, DTensor)
    mesh, other_mesh = tensor.device_mesh, other.device_mesh
    return (
        tensor.placements == other.placements
        and tensor._local_tensor.shape == other._local_tensor.shape
        and (mesh is other_mesh or torch.equal(mesh.mesh, other_mesh.mesh))
    )


def _make_like(param: torch.Tensor, local_tensor: torch.Tensor) -> torch.Tensor:
    if not isinstance(param, DTensor):
        return local_tensor
    # DTensor.from_local() would move the tensor to the device of the mesh.
    meta = TensorMeta(param.shape, param.stride(), local_tensor.dtype)
    spec = DTensorSpec(param.device_mesh, param.placements, meta)
    return DTensor(local_tensor, spec, requires_grad=False)
