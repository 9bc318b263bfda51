"""What the devices on a file descriptor share: appends, reads, the flush, their threads.

Invariants
- The write pointer moves when an append has ended, in the order in which those of a zone end.
- After a failed flush nothing is written any more (fsync(2): the kernel may have dropped the
  pages that failed, so a second success would mean nothing).
"""

import errno
import fcntl
import os
from abc import ABC, abstractmethod
from collections.abc import Awaitable
from functools import partial

import trio

from retainzfs._zio import Slot
from retainzfs.device.aio import AsyncEngine, Ticket
from retainzfs.device.protocol import BLOCK, Geometry, Sums, ZoneReport, device_error
from retainzfs.device.rules import Pending, ZoneRules, check_append, refused
from retainzfs.errors import ChecksumError, DeviceError, RetainzError


class DiskDevice(ABC):
    """Zones below the rules `rules`, at byte `base` of the descriptor `fd` one after the other."""

    rules: ZoneRules
    geometry: Geometry

    def __init__(self, name: str, fd: int, base: int, *, readonly: bool) -> None:
        self.name = name
        self._fd = fd
        self._base = base
        self._readonly = readonly
        self._io: AsyncEngine | None = None
        self._flush_lock = trio.Lock()
        self._flush_rounds = 0
        self._flush_error: OSError | None = None
        self._statistics = dict.fromkeys(
            ("appended_bytes", "read_bytes", "flushes", "resets", "finishes"), 0
        )

    # --- life -----------------------------------------------------------------------------------

    async def start(self) -> None:
        self._io = AsyncEngine()

    async def aclose(self) -> None:
        if self._io is not None:
            await self._io.aclose()
        self.close()

    def close(self) -> None:
        if self._io is not None:
            self._io.close()
            self._io = None
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def report(self, zones: range | None = None) -> list[ZoneReport]:
        return self.rules.report(zones)

    def report_zone(self, zone: int) -> ZoneReport:
        return self.rules.report_zone(zone)

    def known(self, zone: int) -> ZoneReport:
        return self.rules.report_zone(zone)

    def statistics(self) -> dict[str, int]:
        return {**self._statistics, "open": self.rules.open, "active": self.rules.active}

    # --- data -----------------------------------------------------------------------------------

    def append(
        self, zone: int, offset: int, data: memoryview, header: bytes = b""
    ) -> Awaitable[Sums]:
        try:
            io = self._writing("append")
            pending = self.rules.begin_append(
                zone, offset, check_append(self.name, zone, data, header)
            )
        except RetainzError as error:
            return refused(error)
        assert self._is_ready(zone), f"append to zone {zone}, which was not ready"
        ended = partial(self._ended, zone, pending)
        address = self.address(zone, offset)
        ticket = io.append(self._fd, address, data, header, zone, ended)
        return self._appended(zone, pending, ticket)

    def _is_ready(self, zone: int) -> bool:
        """Whether `ready` would not wait."""
        return True

    def _ended(self, zone: int, pending: Pending, error: int) -> None:
        """Move the pointer, or not, in the order in which the appends of the zone ended."""
        if error or pending.lost:
            self.rules.fail_append(zone)
        else:
            self.rules.end_append(zone)
            self._statistics["appended_bytes"] += pending.length

    async def _appended(self, zone: int, pending: Pending, ticket: Ticket) -> Sums:
        try:
            sums = await ticket.sums()
            if pending.lost:
                raise OSError(errno.EIO, "an append before it in the zone failed")
        except OSError as error:
            raise self._error(f"append to zone {zone}", error) from error
        return sums

    async def read(self, zone: int, offset: int, length: int, sums: bytes = b"") -> memoryview:
        self.rules.check_read(zone, offset, length)
        slot = Slot(length, clear=False)
        try:
            bad = await self._running().read(self._fd, self.address(zone, offset), slot, sums)
        except OSError as error:
            raise self._error(f"read from zone {zone}", error) from error
        if bad >= 0:
            raise ChecksumError(self.name, zone, offset + bad * BLOCK)
        self._statistics["read_bytes"] += length
        return memoryview(slot)

    # --- flush ----------------------------------------------------------------------------------

    async def flush(self) -> None:
        wanted = self._flush_rounds + 1  # one that runs already began too early for this caller
        async with self._flush_lock:
            io = self._writing("flush")
            if self._flush_rounds >= wanted:
                return
            self._flush_rounds += 1
            try:
                await self._flush_round(io)
            except OSError as error:
                self._flush_error = error
                raise self._error("flush", error) from error

    @abstractmethod
    async def _flush_round(self, io: AsyncEngine) -> None:
        """Make durable what has ended. Raises OSError."""

    # --- shared ---------------------------------------------------------------------------------

    @abstractmethod
    def _gone(self) -> bool:
        """Whether the zones are not there any more. The host tells of a device that was pulled in
        a way of its own for each call."""

    def address(self, zone: int, offset: int = 0) -> int:
        return self._base + zone * self.geometry.zone_size + offset

    def _error(self, what: str, error: OSError) -> DeviceError:
        """The host's error, but ENODEV when the device is gone."""
        return device_error(self.name, what, OSError(errno.ENODEV, "") if self._gone() else error)

    def _running(self) -> AsyncEngine:
        assert self._io is not None, f"{self.name} is used before start() or after aclose()"
        return self._io

    def _writing(self, what: str) -> AsyncEngine:
        if self._readonly:
            raise device_error(self.name, what, OSError(errno.EROFS, ""))
        if self._flush_error is not None:
            raise device_error(self.name, f"{what} after a failed flush", self._flush_error)
        return self._running()


def set_direct(fd: int) -> bool:
    """Bypass the page cache if the backing filesystem lets us (tmpfs, for one, may not)."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.preadv(fd, [Slot(BLOCK)], 0)
    except OSError as error:
        # Any other error is about these bytes only, which nobody may need.
        if error.errno == errno.EINVAL:
            fcntl.fcntl(fd, fcntl.F_SETFL, flags)
            return False
    return True
