"""A job with a model of a real one's layers loses its filesystem in the middle of a save."""

from __future__ import annotations

import pytest

from tests.conftest import living
from tests.frameworks.catalogue import FRAMEWORKS, STEPS

pytestmark = [pytest.mark.fuse, pytest.mark.torch, pytest.mark.timeout(300)]

SAVES = 3
IMAGE_SIZE = 2 << 30  # sparse


def test_the_shape_is_the_published_one() -> None:
    torch = pytest.importorskip("torch", reason="needs torch: scripts/setup-environment test")
    from tests.frameworks.smollm import Shape, SmolLM  # noqa: PLC0415  needs torch

    with torch.device("meta"):
        model = SmolLM(Shape().layers, Shape().vocabulary)
    assert sum(p.numel() for p in model.parameters()) == Shape().parameters == 134_515_008


@pytest.mark.parametrize("name", ["torchtitan", "megatron"])
def test_the_next_step_is_that_of_the_job_that_did_not_stop(name: str) -> None:
    if missing := FRAMEWORKS[name].missing():
        pytest.skip(f"needs {missing}: scripts/setup-environment test")
    from tests.frameworks.payload import KEEP, recover  # noqa: PLC0415  needs torch
    from tests.frameworks.smollm import Shape  # noqa: PLC0415

    with living(IMAGE_SIZE) as live:
        recovery = recover(live, name, Shape(layers=2, vocabulary=4096), SAVES)
    whole = STEPS * (SAVES - 1)  # the newest save that had ended
    assert 0 < recovery.written < recovery.save
    assert recovery.damage == ()
    states = dict(recovery.states)
    assert states[whole] == "complete"
    # Nothing of it may have become durable by then.
    assert states.get(whole + STEPS, "incomplete") == "incomplete"
    assert recovery.acknowledged == recovery.restored == whole
    assert recovery.differences == ()
    assert recovery.kept == tuple(range(STEPS, STEPS * SAVES + 1, STEPS))[-KEEP[name] :]
