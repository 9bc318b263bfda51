"""Megatron's save_checkpoint with `save_retain_interval`, in two formats.

Runs on Python 3.11 and without a GPU: what is missing is put in place before Megatron is imported.
"""

# ruff: noqa: E402

from __future__ import annotations

import sys
import threading
import typing
import warnings
from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import MagicMock, patch

import torch
import typing_extensions
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.frameworks import model as models
from tests.frameworks.catalogue import MILESTONES, STEPS
from tests.frameworks.job import Job, Outcome

# It wants Python 3.12 for one name, and Triton, which needs a GPU, for kernels that nobody calls.
warnings.simplefilter("ignore")
if not hasattr(typing, "override"):
    typing.override = typing_extensions.override  # type: ignore[attr-defined]
try:
    import triton  # noqa: F401
except ImportError:
    sys.modules["megatron.core.transformer.moe.ops.paged_stash"] = MagicMock()

from megatron.core import mpu
from megatron.core.dist_checkpointing import optimizer as sharding
from megatron.core.num_microbatches_calculator import init_num_microbatches_calculator
from megatron.core.rerun_state_machine import initialize_rerun_state_machine
from megatron.core.transformer import MegatronModule, TransformerConfig
from megatron.training import checkpointing, global_vars

FORMATS = {"": "torch_dist", "torch": "torch"}


class OnCPU(TorchFunctionMode):
    """What Megatron puts on its GPU is made on the CPU."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), more: Any = None
    ) -> Any:
        more = more or {}
        if str(more.get("device", "")).startswith("cuda"):
            more["device"] = "cpu"
        return function(*args, **more)


class Model(MegatronModule):
    def __init__(self, training: models.Training) -> None:
        super().__init__(TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=1))
        self.layers, _ = training.new()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs


class Schedule:
    """There is none, but load_checkpoint wants one."""

    def state_dict(self) -> dict[str, Any]:
        return {"steps": 0}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        pass


class Arguments(Namespace):
    """What a command line would give; everything else is off."""

    def __getattr__(self, name: str) -> None:
        if name.startswith("__"):
            raise AttributeError(name)


class Optimizer(torch.optim.AdamW):
    """What save_checkpoint asks of Megatron's own optimizers, which want a GPU."""

    is_stub_optimizer = False

    def sharded_state_dict(
        self, model: dict[str, Any], is_loading: bool = False, metadata: object = None
    ) -> dict[str, Any]:
        parameters = self.param_groups[0]["params"]
        if is_loading:
            self.fill(parameters)
        state: dict[str, Any] = self.state_dict()
        count = state["state"][0]["step"]
        sharded = sharding.get_param_id_to_sharded_param_map(model, parameters)
        sharding.optim_state_to_sharding_state(state, sharded, exclude_keys="step")
        state["state"]["common_step"] = count
        return state

    def fill(self, parameters: list[Tensor]) -> None:
        """Make the states that the loader fills in."""
        for one in parameters:
            empty = {"exp_avg": torch.zeros_like(one), "exp_avg_sq": torch.zeros_like(one)}
            self.state[one] = {"step": torch.zeros(()), **empty}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The distributed format holds the count of steps once."""
        count = state["state"].pop("common_step", None)
        for one in state["state"].values() if count is not None else ():
            one["step"] = count.clone()
        super().load_state_dict(state)


class Tracker:
    """The generators of a GPU, of which a CPU has none; load_checkpoint wants one at least."""

    def __init__(self) -> None:
        self.states = {"model-parallel-rng": torch.zeros(16, dtype=torch.uint8)}

    def get_states(self) -> dict[str, Tensor]:
        return self.states

    def set_states(self, states: dict[str, Tensor]) -> None:
        self.states = states


class Program:
    def __init__(self, job: Job, training: models.Training = models) -> None:
        if models.join():
            mpu.initialize_model_parallel(1, 1)
            initialize_rerun_state_machine()
            init_num_microbatches_calculator(0, None, 1, 1, 1)
            torch.serialization.add_safe_globals([Arguments])
        self.job = job
        form = FORMATS[job.variant]
        global_vars.set_args(
            Arguments(
                save=str(job.directory),
                load=str(job.directory),
                save_retain_interval=MILESTONES,
                ckpt_format=form,
                use_dist_ckpt=form != "torch",
                tensor_model_parallel_size=1,
                pipeline_model_parallel_size=1,
                world_size=1,
                data_parallel_size=1,
                dist_ckpt_strictness="assume_ok_unexpected",
                consumed_train_samples=0,
                consumed_valid_samples=0,
                skipped_train_samples=0,
            )
        )
        self.training = training
        self.model = Model(training)
        self.optimizer = Optimizer(self.model.parameters(), lr=1e-3)
        self.done = 0

    def run(self) -> Outcome:
        loss = 0.0
        for step in range(self.done + 1, self.job.last + 1):
            self.job.before(step)
            loss = self.step(step)
            self.save(step)
        return models.outcome(loss, self.model.layers)

    def step(self, number: int) -> float:
        return self.training.step(self.model, self.optimizer, number)

    def save(self, step: int) -> None:
        """Save where a save is due, and return when what is kept no longer is deleted."""
        if step % STEPS == 0:
            checkpointing.save_checkpoint(step, [self.model], self.optimizer, Schedule(), 0)
            settle()

    def load(self) -> int:
        """Return the step that was loaded."""
        self.done, _ = checkpointing.load_checkpoint([self.model], self.optimizer, Schedule())
        return int(self.done)


@contextmanager
def without_gpu() -> Iterator[None]:
    parallel = checkpointing.tensor_parallel
    with (
        patch.object(torch.cuda, "synchronize"),
        patch.object(torch.cuda, "current_device", return_value="cpu"),
        patch.object(torch.cuda, "get_rng_state", return_value=torch.zeros(16, dtype=torch.uint8)),
        patch.object(torch.cuda, "set_rng_state"),
        patch.object(parallel, "get_cuda_rng_tracker", return_value=Tracker()),
        patch.object(parallel, "convert_cuda_rng_state", lambda state, to_graphable: state),
        OnCPU(),
    ):
        yield


def settle() -> None:
    """Deleting in a thread ends while the training goes on."""
    for thread in threading.enumerate():
        if getattr(thread, "_target", None) is checkpointing._async_delete_checkpoint_impl:
            thread.join()


def train(job: Job) -> Outcome:
    with without_gpu():
        return Program(job).run()


def resume(job: Job) -> Outcome:
    with without_gpu():
        program = Program(job)
        program.load()
        return program.run()
