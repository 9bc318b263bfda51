"""Accelerate with automatic naming and `total_limit`, which deletes before it saves."""

from __future__ import annotations

from pathlib import Path

from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration

from tests.frameworks import model as models
from tests.frameworks.catalogue import STEPS
from tests.frameworks.job import Job, Outcome


def run(job: Job, again: bool) -> Outcome:
    configuration = ProjectConfiguration(
        project_dir=str(job.directory), automatic_checkpoint_naming=True, total_limit=job.keep
    )
    accelerator = Accelerator(cpu=True, project_config=configuration)
    model, optimizer = accelerator.prepare(*models.new())
    done = 0
    if again:
        accelerator.load_state()
        newest = max(int(path.name.split("_")[1]) for path in job.directory.glob("checkpoints/*"))
        done = (newest + 1) * STEPS
    loss = 0.0
    for step in range(done + 1, job.last + 1):
        job.before(step)
        loss = models.step(model, optimizer, step)
        if step % STEPS == 0:
            job.declare(Path(accelerator.save_state()))
    return models.outcome(loss, accelerator.unwrap_model(model))


def train(job: Job) -> Outcome:
    return run(job, again=False)


def resume(job: Job) -> Outcome:
    return run(job, again=True)
