"""Errors of the device: what they mean for the zone, and when they are too many.

An error tells that a command failed, not what became of the zone. So nothing more goes to a zone
in which one failed (it is suspect) until what runs there has ended; then the zone report is read
and taken over. Bytes that were appended before stay where they are if the report says so.

Invariants
- A zone is observed only when nothing is promised in it.
- One error in a zone is one trouble, however many appends it takes along.
- A zone that takes no more commands counts as READ_ONLY, whether the device says so or not.
"""

from __future__ import annotations

import errno
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable

import trio

from retainzfs import errors
from retainzfs.device import Condition, Device
from retainzfs.layout import BLOCK
from retainzfs.namespace import Namespace, Run
from retainzfs.zone import LOST, Kind, State, Zone
from retainzfs.zones import ZoneTable

log = logging.getLogger(__name__)

# A zone that failed once may have met a passing trouble of the path to it; one that fails again
# would cost every lane that is given it a failed append.
ZONE_ERRORS_MAX = 1
FINISHES = 2  # a zone that is given up and not finished keeps an active slot of the device
# Single zones wear out over months. So many errors within a minute are the device, its cable or
# the disk below an image, and going on would only use up its zones.
ERRORS_MAX = 16
WINDOW_S = 60.0

STATES = {
    Condition.NOT_WP: State.OFFLINE,
    Condition.EMPTY: State.EMPTY,
    Condition.IMPLICIT_OPEN: State.OPEN,
    Condition.EXPLICIT_OPEN: State.OPEN,
    Condition.CLOSED: State.CLOSED,
    Condition.READ_ONLY: State.READ_ONLY,
    Condition.FULL: State.FULL,
    Condition.OFFLINE: State.OFFLINE,
}


class Trouble:
    """`now_s` is any clock that goes on, in seconds.

    Told by its makers: `finish` finishes a zone, `stop` ends all writing, `turned` hears of zones
    that have become READ_ONLY.
    """

    finish: Callable[[Zone], Awaitable[None]]
    stop: Callable[[errors.RetainzError], None]
    turned: Callable[[], None]

    def __init__(
        self,
        device: Device,
        table: ZoneTable,
        namespace: Namespace,
        nursery: trio.Nursery,
        now_s: Callable[[], float],
    ) -> None:
        self.device = device
        self.table = table
        self.namespace = namespace
        self.nursery = nursery
        self.now_s = now_s
        self.suspect: set[int] = set()
        self.stopped: errors.RetainzError | None = None
        self._of_zone: Counter[int] = Counter()
        self._times: deque[float] = deque(maxlen=ERRORS_MAX + 1)

    def met(self, error: errors.RetainzError) -> None:
        """Count an error; the device is given up when it is gone or there are too many."""
        if self.stopped is not None:
            return
        now = self.now_s()
        self._times.append(now)
        if error.errno in errors.GONE:
            self.stopped = errors.DeviceGone(self.device.name, error)
        elif len(self._times) > ERRORS_MAX and now - self._times[0] <= WINDOW_S:
            self.stopped = errors.DeviceFails(self.device.name, ERRORS_MAX, WINDOW_S, error)
        if self.stopped is not None:
            self.stop(self.stopped)
        else:
            log.error("%s", error)

    def distrust(self, zone: Zone, error: errors.RetainzError) -> bool:
        """A command failed in the zone; whether that is news. It is finished, if it can be."""
        if zone.index in self.suspect:
            return False
        self.met(error)
        self._of_zone[zone.index] += 1
        self._settle(zone)
        self.look_at_all()  # the next zone shall not be one that has failed as silently
        return True

    def _settle(self, zone: Zone) -> None:
        """Take over the report, at once or when what runs in the zone has ended."""
        if zone.active and zone.index not in self.suspect:
            self.suspect.add(zone.index)
            self.table.seal(zone)
            self.nursery.start_soon(self.finish, zone)
        elif not zone.active and zone.state not in LOST:
            self.look(zone)

    async def conclude(self, zone: Zone) -> None:
        """Finish an active zone in which nothing is promised. When the device does not let us, it
        is not active afterwards either."""
        if zone.index in self.suspect:
            self.look(zone)
        for _ in range(FINISHES):
            if not zone.active:
                break
            try:
                await self.device.finish(zone.index)
            except errors.RetainzError as error:
                self.met(error)
                self.look(zone)
            else:
                self.table.finish(zone)
        if zone.active:
            self.retire(zone)
        if self._of_zone[zone.index] > ZONE_ERRORS_MAX and zone.state not in LOST:
            self.retire(zone)

    def look(self, zone: Zone) -> None:
        """Take over what the device says of a zone in which nothing is promised."""
        try:
            report = self.device.report_zone(zone.index)
        except errors.RetainzError as error:
            self.met(error)
            self._turn(zone, State.READ_ONLY, "the device does not tell of it, so it counts as")
            return
        state = STATES[report.condition]
        if state in LOST:
            self._turn(zone, state, "the device says that it is")
        elif state is State.FULL:
            self.table.observe(zone, state, zone.write_pointer)
        elif zone.active:
            if report.write_pointer < zone.write_pointer:
                self._forfeit(zone, report.write_pointer)
            # A pointer that has gone on stands behind bytes of an append that failed.
            self.table.observe(zone, zone.state, report.write_pointer)

    def look_at_all(self) -> None:
        """Take over every zone that became READ_ONLY or OFFLINE without a command that failed."""
        for report in self.device.report():
            zone = self.table[report.index]
            known = zone.state in LOST or zone.kind is Kind.METADATA
            if STATES[report.condition] in LOST and not known:
                self._settle(zone)

    def unreadable(self, zone: Zone, error: errors.RetainzError) -> None:
        """A read failed, and not for a checksum."""
        if error.errno in errors.GONE:
            self.met(error)
        elif STATES[self.device.report(range(zone.index, zone.index + 1))[0].condition] in LOST:
            self._settle(zone)

    def retire(self, zone: Zone) -> None:
        """The device goes on refusing commands for the zone: use it for reading only."""
        self.look(zone)
        if zone.state not in LOST:
            self._turn(zone, State.READ_ONLY, "it refuses commands, so until the next mount it is")

    def _turn(self, zone: Zone, state: State, why: str) -> None:
        if zone.state is not state and self.stopped is None:
            what = "read-only, and drained" if state is State.READ_ONLY else "offline"
            log.error("%s: zone %d: %s %s", self.device.name, zone.index, why, what)
        self.table.observe(zone, state, zone.write_pointer)
        if state is State.OFFLINE:
            self._report_loss(zone, 0)
        else:
            self.turned()

    def _forfeit(self, zone: Zone, end: int) -> None:
        """The device has lost what was appended from byte `end` on."""
        for run in self._report_loss(zone, end):
            for ino, count in run.owners.items():
                log.error("zone %d has lost bytes of %s", zone.index, self.namespace.path(ino))
                generation = self.namespace.inodes[ino].generation
                self.table.drop_live(zone, generation, count * BLOCK, zone.freed_at)
            run.failed = True

    def _report_loss(self, zone: Zone, end: int) -> list[Run]:
        """Let who waits for bytes behind `end` to become durable hear that they are lost."""
        gone = [
            run
            for run in self.namespace.runs.get(zone.index, {}).values()
            if run.buffer is None and not run.failed and (run.start + run.blocks) * BLOCK > end
        ]
        for run in gone:
            for ino in run.owners:
                inode = self.namespace.inodes[ino]
                parts = (e for start, stop in inode.dirty for e in inode.spans(start, stop))
                if any(extent.run is run for extent in parts):
                    lost = errors.FSError(
                        errno.EIO,
                        self.namespace.path(ino),
                        f"zone {zone.index} has lost bytes that were written and not yet synced",
                    )
                    self.namespace.fail(inode, lost)
        return gone
