"""A real training job loses its filesystem at every named place, and goes on bit for bit."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from retainzfs import failpoints
from tests.conftest import PATIENCE_S, Live
from tests.jobs import Jobs, check_image, crash, doomed, go_on, serving

pytestmark = [pytest.mark.fuse, pytest.mark.torch]

pytest.importorskip("torch")


@pytest.fixture(scope="module")
def jobs() -> Iterator[Jobs]:
    with serving() as server:
        yield server


LATER = {"commit": 70, "finish": 8, "relocate": 12, "reset": 16, "snapshot": 2, "switch": 2}
SETTINGS = [
    f"{place}:{time}"
    for place in sorted(failpoints.PLACES)
    for time in (1, LATER[place.partition("-")[0]])
]


@pytest.mark.parametrize("setting", SETTINGS)
def test_training_goes_on_as_if_nothing_had_happened(fresh: Live, jobs: Jobs, setting: str) -> None:
    record = fresh.base / "record"
    crash(fresh, jobs, record, setting)
    go_on(fresh, jobs, record)


def test_daemons_that_die_while_they_recover_make_it_no_worse(fresh: Live, jobs: Jobs) -> None:
    """More of them than there are metadata zones."""
    record = fresh.base / "record"
    crash(fresh, jobs, record, "relocate-committed:5")
    for place in sorted(failpoints.PLACES):
        if place.startswith(("snapshot", "switch")):
            with doomed(fresh, place) as daemon:
                assert daemon.wait(PATIENCE_S) == -signal.SIGKILL, f"{place} was not reached"
            check_image(fresh)
    go_on(fresh, jobs, record)
