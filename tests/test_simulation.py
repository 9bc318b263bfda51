"""Power cuts behind every device operation of random workloads: scripts/crash in short.

A violation names its seed and moment; `scripts/crash --seed SEED --cut MOMENT` shows it again.
"""

from __future__ import annotations

from collections import Counter

import pytest

from tests.simulation import Simulated, Sweep, simulate
from tests.workload import OPERATIONS

pytestmark = pytest.mark.volume

SEEDS = tuple(range(12))
POINTS = 2000  # at least, over all the seeds


@pytest.fixture(scope="module")
def workloads() -> dict[int, Simulated]:
    return {seed: simulate(seed) for seed in SEEDS}


@pytest.mark.parametrize("seed", SEEDS)
def test_no_cut_takes_what_was_acknowledged(workloads: dict[int, Simulated], seed: int) -> None:
    sweep = Sweep(workloads[seed]).run()
    assert not sweep.violations, "\n".join(sweep.violations)
    assert sweep.points > workloads[seed].device.operations


def test_the_workloads_do_everything(workloads: dict[int, Simulated]) -> None:
    assert sum(w.device.operations for w in workloads.values()) >= POINTS
    device: Counter[str] = Counter()
    done: Counter[str] = Counter()
    facts: Counter[str] = Counter()
    for workload in workloads.values():
        device.update(operation.kind for operation in workload.device.history)
        done.update(workload.kinds)
        facts.update(workload.facts)
    assert set(device) == {"append", "flush", "reset", "finish"}
    assert set(done) == set(OPERATIONS)
    assert facts["relocations"] > 10
    assert facts["reset zones"] > 10
    assert facts["journal switches"] > 2 * len(workloads), "more than the mounts alone make"


def test_a_seed_is_one_workload() -> None:
    one, other = simulate(3), simulate(3)
    assert one.device.history == other.device.history
