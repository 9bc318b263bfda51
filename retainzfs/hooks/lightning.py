"""Lightning: a callback that passes on what ModelCheckpoint knows of its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from retainzfs.hooks import anchored, committed, keep

__all__ = ["RetentionCallback"]


class RetentionCallback(Callback):
    """`Trainer(callbacks=[ModelCheckpoint(...), RetentionCallback()])`

    Sets keep_last from `save_top_k` unless something is set, commits each checkpoint, and anchors
    those that are kept for their metric. Lightning tells nobody that a save has ended, so that
    happens at the beginning of the next batch. One process of each node does it.
    """

    def __init__(self) -> None:
        self.saved: set[str] = set()
        self.best: set[str] = set()

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Say how many are kept."""
        for checkpoint in _checkpoints(trainer):
            directory = checkpoint.dirpath
            if directory and "://" not in str(directory) and checkpoint.save_top_k > 0:
                keep(directory, checkpoint.save_top_k)

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Follow what was saved since the batch before."""
        self._follow(trainer)

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Follow the last save."""
        self._follow(trainer)

    def _follow(self, trainer: Trainer) -> None:
        best: set[str] = set()
        saved: set[str] = set()
        for checkpoint in _checkpoints(trainer):
            best |= checkpoint.best_k_models.keys()
            saved |= checkpoint.best_k_models.keys() or {checkpoint.best_model_path}
        anchored(self.best, best)
        for path in sorted(saved - self.saved):
            committed(path)
        self.best, self.saved = best, saved


def _checkpoints(trainer: Trainer) -> Iterator[ModelCheckpoint]:
    if trainer.local_rank == 0:
        yield from (c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint))
