"""The Trainer of Hugging Face transformers with `save_total_limit`."""

from __future__ import annotations

import logging
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from tests.frameworks import model as models
from tests.frameworks.catalogue import STEPS
from tests.frameworks.job import Job, Outcome


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, _ = models.new()

    def forward(self, inputs: Tensor) -> dict[str, Tensor]:
        return {"loss": models.loss_of(self.layers, inputs)}


class Data(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"inputs": models.batch(index)[0]}


class Follow(TrainerCallback):
    """Time passes, and the loss of the last step is noted; what comes after it is not saved."""

    def __init__(self, job: Job) -> None:
        self.job = job

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self.job.before(state.global_step + 1)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        if state.global_step == self.job.last:
            control.should_save = False


class Losses(transformers.Trainer):
    """Remembers the loss of the newest step to the bit; the log rounds it."""

    newest = 0.0

    def training_step(self, *args: Any, **more: Any) -> Tensor:
        loss: Tensor = super().training_step(*args, **more)
        self.newest = loss.item()
        return loss


def run(job: Job, again: bool) -> Outcome:
    transformers.logging.set_verbosity_error()
    logging.disable()
    settings = TrainingArguments(
        output_dir=str(job.directory),
        max_steps=job.last,
        save_strategy="steps",
        save_steps=STEPS,
        save_total_limit=job.keep,
        per_device_train_batch_size=8,
        learning_rate=1e-3,
        lr_scheduler_type="constant",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        seed=0,
    )
    trainer = Losses(model=Model(), args=settings, train_dataset=Data(), callbacks=[Follow(job)])
    trainer.train(resume_from_checkpoint=again)
    return models.outcome(trainer.newest, trainer.model)


def train(job: Job) -> Outcome:
    return run(job, again=False)


def resume(job: Job) -> Outcome:
    return run(job, again=True)
