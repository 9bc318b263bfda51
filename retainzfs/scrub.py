"""Scrubbing: read what files hold, verify every checksum, at a limited rate.

The unit is the run, the bytes that were appended in one piece: it is found without looking through
the extents of files. Whose bytes are damaged is asked behind the read, so a file that was changed,
moved or deleted meanwhile is judged by what it is then; the zone is pinned, so nobody else's bytes
can have taken the place. Bytes that are written or moved while the scrub runs are not read again:
whoever moved them verified them.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import trio

from retainzfs.device import Device
from retainzfs.errors import FSError
from retainzfs.extents import Damage, StoredRuns, damages, missing
from retainzfs.layout import BLOCK
from retainzfs.namespace import Namespace, Run
from retainzfs.zone import Zone
from retainzfs.zones import ZoneTable

RATE = 200 << 20  # bytes a second beside a mount in use: less than half of what a SATA SSD reads
FOUND_MAX = 10_000  # places that are listed; a device with more has one thing to be said about it


class Pace:
    """Keeps reading to a rate in bytes a second, None for as fast as may be."""

    def __init__(self, rate: int | None) -> None:
        self._rate = rate
        self._due_s = 0.0

    async def spent(self, nbytes: int) -> None:
        """So much was read: return when more may be."""
        if self._rate is not None:
            self._due_s = max(self._due_s, trio.current_time()) + nbytes / self._rate
            await trio.sleep_until(self._due_s)


def stored_bytes(namespace: Namespace) -> int:
    """Return how many bytes a scrub reads."""
    runs = (run for there in namespace.runs.values() for run in there.values())
    return sum(run.length for run in runs) * BLOCK


async def verify(stored: StoredRuns, namespace: Namespace, run: Run) -> list[Damage]:
    """Read a run; return the bytes of files that cannot be read, by the paths they have then."""
    if run.failed:
        bad = [missing(run)]
    else:
        bad = await stored.bad_blocks(run, 0, run.length)
    found: list[Damage] = []
    for ino in run.owners if bad else ():
        held = [e for e in namespace.inodes[ino].extents if e.run is run]
        found += damages(namespace.path(ino), held, bad)
    return found


@dataclass(slots=True)
class Pass:
    """One scrub from its start to its end; bytes."""

    state: str = "never"  # running, done, stopped
    done: int = 0
    total: int = 0
    found: list[Damage] = field(default_factory=list)
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    ended: trio.Event = field(default_factory=trio.Event)


class Scrub:
    """The scrub of a mounted volume; one at a time. `tell` is called with each damage."""

    def __init__(
        self,
        device: Device,
        table: ZoneTable,
        namespace: Namespace,
        nursery: trio.Nursery,
        tell: Callable[[Damage], None],
    ) -> None:
        self.device = device
        self.table = table
        self.namespace = namespace
        self.latest = Pass()
        self._nursery = nursery
        self._tell = tell

    def start(self, rate: int) -> None:
        """Begin, at so many bytes a second. Raises FSError(EBUSY)."""
        if self.latest.state == "running":
            raise FSError(errno.EBUSY, self.device.name, "a scrub is running already")
        self.latest = Pass("running", total=stored_bytes(self.namespace))
        self._nursery.start_soon(self._run, self.latest, Pace(rate))

    def stop(self) -> None:
        if self.latest.state == "running":
            self.latest.state = "stopped"
            self.latest.scope.cancel()

    def statistics(self) -> dict[str, Any]:
        one = self.latest
        return {
            "state": one.state,
            "done": one.done,
            "total": one.total,
            "damaged": len(one.found),
        }

    def report(self) -> dict[str, Any]:
        """Return the statistics and the damage that was found."""
        findings = [damage._asdict() for damage in self.latest.found]
        return {**self.statistics(), "findings": findings}

    async def _run(self, one: Pass, pace: Pace) -> None:
        with one.scope:
            for zone in self.table.zones:
                for key in list(self.namespace.runs.get(zone.index, {})):
                    await self._verify(one, zone, key, pace)
            one.state = "done"
            one.done = one.total
        one.ended.set()

    async def _verify(self, one: Pass, zone: Zone, key: tuple[int, int], pace: Pace) -> None:
        run = self.namespace.runs.get(zone.index, {}).get(key)
        if run is None or run.buffer is not None:
            return  # freed or moved meanwhile, or not on the device yet
        self.table.pin(zone)
        try:
            # Not the readers' cache of checksums: those on the device are to be seen too.
            found = await verify(StoredRuns(self.device), self.namespace, run)
        finally:
            self.table.unpin(zone)
        for damage in found[: FOUND_MAX - len(one.found)]:
            one.found.append(damage)
            self._tell(damage)
        nbytes = run.length * BLOCK
        one.done = min(one.done + nbytes, one.total)
        await pace.spent(nbytes)
