"""Training jobs on a mount whose daemon dies, and what must hold from then on."""

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

from retainzfs import failpoints, fsck
from tests.conftest import COMMAND, PATIENCE_S, Live
from tests.promises import History

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


@contextmanager
def serving() -> Iterator[Jobs]:
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


def crash(live: Live, jobs: Jobs, record: Path, setting: str) -> None:
    """Train on a new volume until its daemon dies at a place."""
    live.format(IMAGE_SIZE, ZONE_SIZE)
    with doomed(live, setting) as daemon:
        wait_for_mount(daemon)
        code = jobs.run(live.path, record, STEPS_MAX)
        assert code == DISCONNECTED, f"{STEPS_MAX} steps did not come to {setting}"
        assert daemon.wait(PATIENCE_S) == -signal.SIGKILL
    live.umount()
    check_image(live)


def check_image(live: Live) -> None:
    report = fsck.check(str(live.image), scrub=True)
    assert not report.damaged, report.findings


def go_on(live: Live, jobs: Jobs, record: Path) -> None:
    """Mount, find everything that was promised, and train on as if nothing had happened."""
    history = History(live.path)
    history.read(record)
    live.mount()
    assert history.compare() == []
    for save in (live.path / "run").glob("*"):  # it may be gone with the first commit
        files = [p.path for p in history.allowed if (live.path / p.path).parent == save]
        there = [path for path in files if (live.path / path).exists()]
        assert there in ([], files), f"{save} was deleted in part"
    saved = max((step for (step,) in history.noted("saved")), default=0)
    before = history.noted("step")
    assert before == jobs.undisturbed[: len(before)], "the job itself is not repeatable"

    record = record.with_suffix(".after")
    assert jobs.run(live.path, record, GO_ON) == 0
    history.read(record)
    (_, (restored,)) = history.noted("restored")
    assert restored >= saved, "a finished save is gone"
    expected = jobs.undisturbed[restored : restored + GO_ON]
    assert history.noted("step")[len(before) :] == expected, "training goes on otherwise"
    assert history.compare() == []
    live.umount()
    assert fsck.check(str(live.image), scrub=True).findings == []
