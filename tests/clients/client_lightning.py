"""Lightning's ModelParallelStrategy in Fabric and in the Trainer, with fully_shard."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import lightning as L
import torch
import torch.nn as nn
from client_job import VOCABULARY, Report, main, rank, rows, seed_everything
from lightning.fabric.strategies.model_parallel import ModelParallelStrategy as FabricStrategy
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.utils.data import DataLoader

warnings.filterwarnings("ignore", module="lightning")
logging.getLogger("lightning").setLevel(logging.ERROR)

WIDTH = 24


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.relu(self.up(self.norm(x)))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def loss_of(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    output = output[:, :-1].reshape(-1, VOCABULARY).float()
    return nn.functional.cross_entropy(output, batch["labels"][:, 1:].reshape(-1))


def shard(model: Net, mesh: Any, **settings: Any) -> Net:
    """Shards over the mesh's data dimension. Parallelizes blocks over its tensor dimension, if
    that has several ranks."""
    if mesh["tensor_parallel"].size() > 1:
        plan = {
            "embed": RowwiseParallel(input_layouts=Replicate()),
            "blocks.*.up": ColwiseParallel(),
            "blocks.*.down": RowwiseParallel(),
            "head": ColwiseParallel(output_layouts=Replicate()),
        }
        parallelize_module(model, mesh["tensor_parallel"], plan)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data_parallel"], **settings)
    return fully_shard(model, mesh=mesh["data_parallel"], **settings)


# ---- Fabric --------------------------------------------------------------------------------------


def fabric_job(
    data: int = 2,
    tensor: int = 1,
    empty: bool = False,
    seed: int = 1,
    distributed: bool = True,
    precision: Any = None,
    **settings: Any,
) -> tuple[Any, Any, Any]:
    """Returns a fabric, and a model and an optimizer that it has set up."""
    strategy = FabricStrategy(
        lambda model, mesh: shard(model, mesh, **settings),
        data_parallel_size=data,
        tensor_parallel_size=tensor,
        save_distributed_checkpoint=distributed,
    )
    fabric = L.Fabric(
        accelerator="cpu", devices=data * tensor, strategy=strategy, precision=precision
    )
    fabric.launch()
    seed_everything(seed)
    with fabric.init_module(empty_init=empty):
        model = Net()
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.01))
    return fabric, model, optimizer


def fabric_steps(
    report: Report, fabric: Any, model: Any, optimizer: Any, first: int, last: int
) -> None:
    loader = fabric.setup_dataloaders(DataLoader(rows(24), batch_size=2))
    torch.manual_seed(first)
    for batch in list(loader)[first:last]:
        loss = loss_of(model(batch["input_ids"]), batch)
        fabric.backward(loss)
        report.record("loss", fabric.all_reduce(loss.detach()))
        report.record("norm", fabric.clip_gradients(model, optimizer, max_norm=1.0))
        optimizer.step()
        optimizer.zero_grad()


def case_fabric(report: Report) -> None:
    fabric, model, optimizer = fabric_job()
    fabric_steps(report, fabric, model, optimizer, 0, 3)
    report.record_model(model)


def case_fabric_empty(report: Report) -> None:
    """Fabric creates the model on the meta device, shards it, then allocates and initializes it."""
    fabric, model, optimizer = fabric_job(empty=True)
    fabric_steps(report, fabric, model, optimizer, 0, 3)
    report.record_model(model)


def case_fabric_bf16(report: Report) -> None:
    fabric, model, optimizer = fabric_job(
        precision="bf16-true", mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32)
    )
    fabric_steps(report, fabric, model, optimizer, 0, 3)
    report.record_model(model)


def case_fabric_no_sync(report: Report) -> None:
    fabric, model, optimizer = fabric_job()
    batch = rows(8)[rank()]
    with fabric.no_backward_sync(model):
        for _ in range(2):
            fabric.backward(model(batch["input_ids"][None]).square().mean())
    fabric_steps(report, fabric, model, optimizer, 0, 2)
    report.record_model(model)


def fabric_checkpoint(report: Report, distributed: bool) -> None:
    """Saves after two steps and continues to train. A new job loads the checkpoint and trains the
    same steps. Both models must have equal parameters."""
    fabric, model, optimizer = fabric_job(distributed=distributed)
    fabric_steps(report, fabric, model, optimizer, 0, 2)
    path = report.files / ("shards" if distributed else "full.ckpt")
    fabric.save(path, {"model": model, "optimizer": optimizer, "step": 2})
    fabric_steps(report, fabric, model, optimizer, 2, 4)
    other_fabric, restored, optimizer = fabric_job(seed=2, distributed=distributed)
    state = {"model": restored, "optimizer": optimizer, "step": 0}
    other_fabric.load(path, state)
    assert state["step"] == 2
    fabric_steps(report, other_fabric, restored, optimizer, 2, 4)
    for left, right in zip(model.parameters(), restored.parameters()):
        assert torch.equal(left.to_local(), right.to_local())
    report.record_model(restored)


def case_fabric_shards(report: Report) -> None:
    fabric_checkpoint(report, True)


def case_fabric_full(report: Report) -> None:
    fabric_checkpoint(report, False)


def case_fabric_tensor_parallel(report: Report) -> None:
    """Trains on four ranks: two data-parallel by two tensor-parallel."""
    fabric, model, optimizer = fabric_job(2, 2)
    fabric_steps(report, fabric, model, optimizer, 0, 3)
    fabric.save(report.files / "shards", {"model": model})
    report.record_model(model)


# ---- Trainer -------------------------------------------------------------------------------------


class Lit(L.LightningModule):
    """A module that shards itself in ``configure_model``, as the strategy requires."""

    def __init__(self, report: Report, compile: bool = False, **settings: Any) -> None:
        super().__init__()
        self.report, self.compile, self.settings = report, compile, settings
        seed_everything(1)
        self.net = Net()

    def configure_model(self) -> None:
        if not hasattr(self.net, "unshard"):
            if self.compile:
                for block in self.net.blocks:
                    block.compile(backend="aot_eager")
            shard(self.net, self.device_mesh, **self.settings)

    def training_step(self, batch: dict[str, torch.Tensor], index: int) -> torch.Tensor:
        loss = loss_of(self.net(batch["input_ids"]), batch)
        self.log("loss", loss, sync_dist=True)
        self.report.record("loss", loss)
        return loss

    def validation_step(self, batch: dict[str, torch.Tensor], index: int) -> None:
        loss = loss_of(self.net(batch["input_ids"]), batch)
        self.log("validation", loss, sync_dist=True)
        self.report.record("validation", loss)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.report.record("norm", nn.utils.get_total_norm([p.grad for p in self.parameters()]))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def fit(
    report: Report,
    model: Lit,
    steps: int = 4,
    distributed: bool = True,
    resume: Path | None = None,
    **settings: Any,
) -> L.Trainer:
    strategy = ModelParallelStrategy(
        data_parallel_size=2, tensor_parallel_size=1, save_distributed_checkpoint=distributed
    )
    folder = report.files / ("resumed" if resume else "run")
    trainer = L.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_steps=steps,
        logger=CSVLogger(folder, name="", version=""),
        log_every_n_steps=1,
        val_check_interval=2,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1)],
        default_root_dir=folder,
        **settings,
    )
    train = DataLoader(rows(24), batch_size=2)
    trainer.fit(model, train, DataLoader(rows(4, seed=1), batch_size=1), ckpt_path=resume)
    assert trainer.global_step == steps
    return trainer


def case_trainer(report: Report) -> None:
    model = Lit(report)
    trainer = fit(report, model)
    report.record_model(model)
    trainer.validate(model, DataLoader(rows(4, seed=2), batch_size=1), verbose=False)


def case_trainer_accumulation(report: Report) -> None:
    model = Lit(report, reshard_after_forward=False)
    fit(report, model, accumulate_grad_batches=2)
    report.record_model(model)


def case_trainer_bf16_compile(report: Report) -> None:
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    model = Lit(report, compile=True, mp_policy=policy)
    fit(report, model)
    report.record_model(model)


def trainer_resume(report: Report, distributed: bool) -> None:
    uninterrupted = Lit(report)
    fit(report, uninterrupted, distributed=distributed)
    model = Lit(report)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    (checkpoint,) = (report.files / "run").glob("*step=2*")
    fit(report, model, distributed=distributed, resume=checkpoint)
    report.record_model(model)


def case_trainer_resume_shards(report: Report) -> None:
    trainer_resume(report, True)


def case_trainer_resume_full(report: Report) -> None:
    trainer_resume(report, False)


if __name__ == "__main__":
    main(globals())
