"""The retention of real frameworks on a real mount: what the mount expected is what happened.

Each framework trains, saves, deletes what it keeps no longer, and resumes; none of them knows of
the mount. Time between saves is added to the daemon's clock, so that it counts saves and not how
busy the machine is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import COMMAND_S, living
from tests.frameworks.catalogue import FRAMEWORKS, KEEP
from tests.frameworks.measure import IMAGE_SIZE, TREE, ZONE_SIZE, Measurement, Run, measure, share

pytestmark = [pytest.mark.fuse, pytest.mark.torch, pytest.mark.timeout(300)]

LEARNING = KEEP + 3  # generations that are born before the first ones have been seen to die
ENOUGH = 0.95
SMALL = 48 << 20  # less than the saves of a rank together


@pytest.fixture(scope="module", params=FRAMEWORKS)
def measured(request: pytest.FixtureRequest) -> Measurement:
    framework = FRAMEWORKS[request.param]
    if missing := framework.missing():
        pytest.skip(f"needs {missing}: scripts/setup-environment test")
    with living(IMAGE_SIZE, ZONE_SIZE) as live:
        return measure(live, framework)


@pytest.fixture(params=["declared", "learned"])
def run(measured: Measurement, request: pytest.FixtureRequest) -> Run:
    told: Run = getattr(measured, request.param)
    return told


def test_deletions_come_when_the_attributes_said(measured: Measurement) -> None:
    """Counting the first one too, of which nothing can be said without a cadence."""
    rows = measured.declared.history
    assert share(rows) >= ENOUGH, rows


def test_deletions_come_when_the_history_said(measured: Measurement) -> None:
    rows = measured.learned.history[LEARNING:]
    assert share(rows) >= ENOUGH, rows


def test_every_save_was_a_generation_and_nothing_else(measured: Measurement, run: Run) -> None:
    kept = measured.framework.kept
    deleted = [n for n in measured.framework.numbers if n not in kept]
    assert [row["number"] for row in run.generations] == kept
    assert sorted(row["number"] for row in run.history) == deleted
    assert not any(row["reaped"] for row in run.history)


def test_kept_generations_are_complete(measured: Measurement) -> None:
    """Where nothing shows the end of a save, the begin of the next one does."""
    kept = measured.framework.kept
    states = {row["number"]: row["state"] for row in measured.declared.generations}
    assert states == dict.fromkeys(kept, "complete")
    learned = {row["number"]: row["state"] for row in measured.learned.generations}
    newest = "complete" if measured.framework.marks else "writing"
    assert learned == dict.fromkeys(kept, "complete") | {kept[-1]: newest}


def test_milestones_are_anchors(measured: Measurement) -> None:
    every = int(measured.framework.attributes.get("keep_every", 0))
    anchors = [row["number"] for row in measured.declared.generations if row["anchor"]]
    assert anchors == [n for n in measured.framework.kept if every and n % every == 0]


def test_zones_are_reset_without_copying(measured: Measurement) -> None:
    assert measured.status["copied_bytes"] == 0
    rows = measured.declared.history + measured.learned.history
    assert measured.status["zones"]["reset_total"] > len(rows)


def test_training_resumes_to_the_bit(run: Run) -> None:
    assert run.resumed == run.trained


def test_a_mount_that_never_sees_the_marker_does_not_fill(tmp_path: Path) -> None:
    """Two mounts of one job; the filesystem deletes on both, though only the first has markers."""
    with living(SMALL, ZONE_SIZE) as first, living(SMALL, ZONE_SIZE) as second:
        runs = []
        for live in (first, second):
            live.mount()
            runs.append(live.path / "run")
            runs[-1].mkdir()
            os.setxattr(runs[-1], "user.retainz.keep_last", b"3")
            os.setxattr(runs[-1], "user.retainz.reap", b"1")
        ranks = [shards(str(rank), tmp_path / "rendezvous", run) for rank, run in enumerate(runs)]
        for rank in ranks:
            _, errors = rank.communicate(timeout=COMMAND_S)
            assert rank.returncode == 0, errors
        assert [
            (path / ".metadata").exists() for path in (runs[0] / "step-20", runs[1] / "step-20")
        ] == [True, False]
        for run in runs:
            numbers = {int(path.name.removeprefix("step-")) for path in run.iterdir()}
            assert {18, 19, 20} <= numbers <= {17, 18, 19, 20}
        for run in runs:
            shutil.copytree(run / "step-20", tmp_path / "step-20", dirs_exist_ok=True)
    loading = shards("load", tmp_path / "step-20")
    _, errors = loading.communicate(timeout=COMMAND_S)
    assert loading.returncode == 0, errors


def shards(*arguments: str | Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.frameworks.shards", *map(str, arguments)]
    return subprocess.Popen(command, cwd=TREE, stderr=subprocess.PIPE, text=True)
