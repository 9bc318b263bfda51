"""The daemon is killed at random moments under several programs; every promise is kept.

RETAINZFS_KILLS=N kills it N times (6), RETAINZFS_SEED=N chooses others; the seed is in the failure.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time

import pytest

from retainzfs import fsck, mkfs
from tests import programs
from tests.conftest import PATIENCE_S, Live
from tests.promises import History

pytestmark = pytest.mark.fuse

KILLS = int(os.environ.get("RETAINZFS_KILLS", "6"))
SEED = int(os.environ.get("RETAINZFS_SEED", "1"))
LIFE_MAX_S = 1.5  # of a daemon; snapshots and collections happen every few tenths of a second


@pytest.mark.timeout(60 + 10 * KILLS)
def test_promises_outlive_kills_at_random_moments(fresh: Live) -> None:
    mkfs.make(str(fresh.image), size=24 << 20, zone_size=256 << 10, force=True)
    records = fresh.image.with_name("records")
    records.mkdir()
    rng = random.Random(SEED)
    history = History(fresh.path)
    for kill in range(KILLS):
        seed = f"{SEED}, kill {kill}"
        fresh.mount()
        assert history.compare() == [], f"seed {seed}"
        assert programs.unfinished(fresh.path, history) == [], f"seed {seed}"
        command = [sys.executable, "-m", "tests.programs", str(fresh.path), str(records), seed]
        running = subprocess.Popen(command)
        time.sleep(rng.uniform(0.2, LIFE_MAX_S))  # no event: a random moment is the point
        fresh.signal(signal.SIGKILL)
        assert running.wait(PATIENCE_S) == 0, f"seed {seed}"
        fresh.umount()
        report = fsck.check(str(fresh.image), scrub=True)
        assert not report.damaged, f"seed {seed}: {report.findings}"
        history.read(*sorted(records.iterdir()))
    fresh.mount()
    assert history.compare() == [], f"seed {SEED}"
    told = {record.name for record in records.iterdir() if record.stat().st_size}
    assert told == {program.__name__ for program in programs.PROGRAMS}
    fresh.umount()
    assert fsck.check(str(fresh.image), scrub=True).findings == []
