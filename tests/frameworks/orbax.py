"""Orbax's CheckpointManager with `max_to_keep` and `keep_period`, which JAX programs use."""

from __future__ import annotations

import hashlib
import logging
import os
from typing import Any

os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from tests.frameworks.catalogue import MILESTONES, STEPS
from tests.frameworks.job import Job, Outcome
from tests.frameworks.model import WIDTH

State = dict[str, Any]


def new() -> State:
    """Return parameters and their momenta, 4 MiB."""
    keys = jax.random.split(jax.random.key(0), 2)
    parameters = {
        "up": jax.random.normal(keys[0], (WIDTH, 4 * WIDTH)) * 0.05,
        "down": jax.random.normal(keys[1], (4 * WIDTH, WIDTH)) * 0.05,
    }
    return {"parameters": parameters, "momenta": jax.tree.map(jnp.zeros_like, parameters)}


def loss_of(parameters: State, inputs: jax.Array) -> jax.Array:
    outputs = jax.nn.relu(inputs @ parameters["up"]) @ parameters["down"]
    return jnp.square(outputs - inputs).mean()


@jax.jit
def advance(state: State, inputs: jax.Array) -> tuple[State, jax.Array]:
    loss, gradients = jax.value_and_grad(loss_of)(state["parameters"], inputs)
    momenta = jax.tree.map(lambda m, g: 0.9 * m + g, state["momenta"], gradients)
    parameters = jax.tree.map(lambda p, m: p - 0.1 * m, state["parameters"], momenta)
    return {"parameters": parameters, "momenta": momenta}, loss


def outcome(loss: jax.Array, state: State) -> Outcome:
    leaves = jax.tree.leaves(state["parameters"])
    digest = hashlib.sha256(b"".join(bytes(leaf.tobytes()) for leaf in leaves))
    return Outcome(float(loss).hex(), digest.hexdigest())


def run(job: Job, again: bool) -> Outcome:
    logging.disable()
    options = ocp.CheckpointManagerOptions(
        save_interval_steps=STEPS, max_to_keep=job.keep, keep_period=MILESTONES
    )
    state, loss, done = new(), jnp.zeros(()), 0
    with ocp.CheckpointManager(job.directory, options=options) as manager:
        if again:
            done = manager.latest_step()
            state = manager.restore(done, args=ocp.args.StandardRestore(state))
        for step in range(done + 1, job.last + 1):
            job.before(step)
            inputs = jax.random.normal(jax.random.key(step), (8, WIDTH))
            state, loss = advance(state, inputs)
            if step % STEPS == 0:  # asked at step 1, Orbax would save that as well
                manager.save(step, args=ocp.args.StandardSave(state))
                manager.wait_until_finished()
    return outcome(loss, state)


def train(job: Job) -> Outcome:
    return run(job, again=False)


def resume(job: Job) -> Outcome:
    return run(job, again=True)
