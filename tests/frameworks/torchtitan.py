"""TorchTitan's CheckpointManager with `keep_latest_k`, synchronous and asynchronous."""

from __future__ import annotations

import logging
import threading
from typing import Any
from unittest.mock import patch

import torch
from torch import nn
from torch.distributed.checkpoint import state_dict as dcp_state
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan
from torchtitan.components.checkpointer import dcp

from tests.frameworks import model as models
from tests.frameworks.catalogue import STEPS
from tests.frameworks.job import PATIENCE_S, Job, Outcome

_FLAT = dcp_state.StateDictOptions(flatten_optimizer_state_dict=True)


class Optimizers:
    """Stands for TorchTitan's container, which wants its whole configuration."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        return dcp_state.get_optimizer_state_dict(self.model, self.optimizer, options=_FLAT)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        dcp_state.set_optimizer_state_dict(self.model, self.optimizer, state, options=_FLAT)


class Progress:
    """The trainer's own state."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


class Generator:
    """The state of torch's own generator of random numbers."""

    def state_dict(self) -> dict[str, Any]:
        return {"cpu": torch.get_rng_state()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["cpu"])


class Nothing:
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """There is no schedule."""


class Program:
    def __init__(self, job: Job, training: models.Training = models) -> None:
        logging.disable()
        models.join()
        self.job = job
        self.training = training
        self.model, self.optimizer = training.new()
        self.progress = Progress()
        config = dcp.CheckpointManager.Config(
            enable=True,
            interval=STEPS,
            keep_latest_k=job.keep,
            async_mode=job.variant or "disabled",
        )
        self.listed = threading.Event()
        self.rmtree = dcp.filesystem.rmtree
        with patch.object(dcp.filesystem, "rmtree", self.remove):
            self.manager = dcp.CheckpointManager(
                config,
                dataloader=Nothing(),
                model_parts=[self.model],
                optimizers=Optimizers(self.model, self.optimizer),
                lr_schedulers=Nothing(),
                states={"train_state": self.progress, "generator": Generator()},
                sd_adapter=None,
                base_folder=str(job.directory),
            )

    def remove(self, path: str) -> None:
        """What the purging thread calls, so that `settle` knows when it is done."""
        try:
            self.rmtree(path)
        finally:
            self.manager.purge_queue.task_done()

    def run(self) -> Outcome:
        loss = 0.0
        for step in range(self.progress.step + 1, self.job.last + 1):
            self.job.before(step)
            loss = self.step(step)
            self.save(step)
        self.manager.close()
        return models.outcome(loss, self.model)

    def step(self, number: int) -> float:
        self.progress.step = number
        return self.training.step(self.model, self.optimizer, number)

    def load(self) -> int:
        """Return the step that was loaded."""
        assert self.manager.load()
        return self.progress.step

    def save(self, step: int) -> None:
        """Save where a save is due, and return when what is kept no longer is deleted."""
        self._save(step)
        self.settle()

    def _save(self, step: int) -> None:
        """When it is asynchronous, a thread makes the new directory while the manager looks for
        what to delete; here the manager is always first, as with a large model."""
        if not self.job.variant:
            self.manager.save(step)
            return
        prepare = FileSystemWriter.prepare_local_plan

        def prepare_late(writer: FileSystemWriter, plan: SavePlan) -> SavePlan:
            assert self.listed.wait(PATIENCE_S)
            return prepare(writer, plan)

        self.listed.clear()
        with patch.object(FileSystemWriter, "prepare_local_plan", prepare_late):
            self.manager.save(step)
            self.listed.set()
            self.manager.maybe_wait_for_saving()

    def settle(self) -> None:
        """Deleting in a thread ends while the training goes on."""
        self.manager.purge_queue.join()


def train(job: Job) -> Outcome:
    return Program(job).run()


def resume(job: Job) -> Outcome:
    program = Program(job)
    program.load()
    return program.run()
