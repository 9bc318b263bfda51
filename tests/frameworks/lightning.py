"""Lightning's ModelCheckpoint: the newest K by `save_top_k`, and a copy as last.ckpt."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from tests.frameworks import model as models
from tests.frameworks.catalogue import STEPS
from tests.frameworks.job import Job, Outcome


class Module(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers, _ = models.new()
        self.newest = 0.0

    def training_step(self, *_: Any) -> Tensor:
        # Lightning does not put a data loader back to where it was; that is the program's part.
        loss = models.loss_of(self.layers, models.batch(self.global_step + 1))
        self.newest = loss.item()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.layers.parameters(), lr=1e-3)


class Data(Dataset[Tensor]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor(index)


class Follow(Callback):
    def __init__(self, job: Job) -> None:
        self.job = job

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        self.job.before(trainer.global_step + 1)


def run(job: Job, again: bool) -> Outcome:
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    saving = ModelCheckpoint(
        dirpath=job.directory,
        monitor="step",
        mode="max",
        save_top_k=job.keep,
        save_last=True,
        every_n_train_steps=STEPS,
    )
    trainer = Trainer(
        accelerator="cpu",
        max_steps=job.last,
        callbacks=[saving, Follow(job)],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Module()
    data = DataLoader(Data(), batch_size=None)
    trainer.fit(module, data, ckpt_path="last" if again else None, weights_only=False)
    return models.outcome(module.newest, module.layers)


def train(job: Job) -> Outcome:
    return run(job, again=False)


def resume(job: Job) -> Outcome:
    return run(job, again=True)
