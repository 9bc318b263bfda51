"""A real training job loses its filesystem at every named place, and goes on bit for bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from retainzfs import failpoints, fsck, mkfs
from tests.conftest import COMMAND, PATIENCE_S, Live
from tests.promises import History

pytestmark = [pytest.mark.fuse, pytest.mark.torch]

pytest.importorskip("torch")

STEPS_MAX = 24  # the job comes to every place within these
GO_ON = 3  # steps after the crash
IMAGE_SIZE = 16 << 20
ZONE_SIZE = 256 << 10  # small, so that zones are finished, collected and reset all the time
DISCONNECTED = 7  # tests.training's exit code, not imported since torch comes with it


class Jobs:
    """The server that forks training jobs."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.training", str(STEPS_MAX + GO_ON)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.undisturbed: list[list[Any]] = self._answer()

    def run(self, root: Path, record: Path, steps: int) -> int:
        """Train so many steps on a mount; return the exit code."""
        assert self.process.stdin is not None
        print(json.dumps([str(root), str(record), steps]), file=self.process.stdin, flush=True)
        code: int = self._answer()
        return code

    def _answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the server of training jobs has ended"
        return json.loads(line)


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    server = Jobs()
    yield server
    server.process.communicate(timeout=PATIENCE_S)
    assert server.process.returncode == 0


@contextmanager
def doomed(live: Live, setting: str) -> Iterator[subprocess.Popen[str]]:
    """Mount with a daemon that dies at a place; a child of ours, so that its end can be seen."""
    daemon = subprocess.Popen(
        [*COMMAND, "mount", str(live.image), str(live.path), "--foreground"],
        env={**os.environ, failpoints.VARIABLE: setting},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield daemon
    finally:
        daemon.kill()
        _, said = daemon.communicate()
        with live.log.open("a") as log:
            log.write(said)


def wait_for_mount(daemon: subprocess.Popen[str]) -> None:
    assert daemon.stderr is not None
    said = ""
    while ": mounted " not in said:
        line = daemon.stderr.readline()
        assert line, f"the daemon ended while it was mounting: {said}"
        said += line


def check_unmounted(live: Live) -> None:
    report = fsck.check(str(live.image), scrub=True)
    assert not report.damaged, report.findings


def noted(history: History, what: str) -> list[list[Any]]:
    return [values for kind, *values in history.notes if kind == what]


LATER = {"commit": 70, "finish": 8, "relocate": 12, "reset": 16, "snapshot": 2, "switch": 2}
CASES = [(p, n) for p in sorted(failpoints.PLACES) for n in (1, LATER[p.partition("-")[0]])]


@pytest.mark.parametrize(("place", "time"), CASES)
def test_training_goes_on_as_if_nothing_had_happened(
    fresh: Live, jobs: Jobs, place: str, time: int
) -> None:
    mkfs.make(str(fresh.image), size=IMAGE_SIZE, zone_size=ZONE_SIZE, force=True)
    before, after = fresh.image.with_name("before"), fresh.image.with_name("after")
    with doomed(fresh, f"{place}:{time}") as daemon:
        wait_for_mount(daemon)
        code = jobs.run(fresh.path, before, STEPS_MAX)
        assert code == DISCONNECTED, f"{STEPS_MAX} steps did not come to {place} {time} times"
        assert daemon.wait(PATIENCE_S) == -signal.SIGKILL
    fresh.umount()
    check_unmounted(fresh)

    history = History(fresh.path)
    history.read(before)
    fresh.mount()
    assert history.compare() == []
    saved = [step for (step,) in noted(history, "saved")]
    assert jobs.run(fresh.path, after, GO_ON) == 0
    history.read(after)
    restored = noted(history, "restored")[-1][0]
    assert restored >= max(saved, default=0), "a finished save is gone"
    steps = noted(history, "step")
    expected = jobs.undisturbed
    assert steps[-GO_ON:] == expected[restored : restored + GO_ON], "training goes on otherwise"
    assert steps[:-GO_ON] == expected[: len(steps) - GO_ON], "the job itself is not repeatable"
    assert history.compare() == []
    fresh.umount()
    assert fsck.check(str(fresh.image), scrub=True).findings == []
