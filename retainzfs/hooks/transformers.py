"""Hugging Face Trainer: a callback that passes on what the Trainer knows of its checkpoints."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from retainzfs.hooks import anchored, committed, keep

__all__ = ["RetentionCallback"]


class RetentionCallback(TrainerCallback):
    """`Trainer(..., callbacks=[RetentionCallback()])`

    Sets keep_last from `save_total_limit` unless something is set, commits each checkpoint, and
    anchors the best one. One process of each node does it.
    """

    def __init__(self) -> None:
        self.best: set[str] = set()

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Say how many are kept."""
        if not state.is_local_process_zero or not args.output_dir:
            return
        if args.save_total_limit:
            keep(args.output_dir, args.save_total_limit)
        self._anchor_best(state)

    def on_save(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        """Commit what was just saved, and anchor the best so far instead of the best before."""
        if not state.is_local_process_zero or not args.output_dir:
            return
        self._anchor_best(state)
        committed(os.path.join(args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"))

    def _anchor_best(self, state: TrainerState) -> None:
        best = {state.best_model_checkpoint} if state.best_model_checkpoint else set()
        anchored(self.best, best)
        self.best = best
