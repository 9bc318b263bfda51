"""Zones emulated on a regular file or a conventional block device.

Invariants
- Data never precedes its pointer: a pointer is recorded only for appends that have ended, and one
  fdatasync makes both durable. After a crash the recorded pointer holds; bytes above it do not
  exist.
- A zone's space is given back only when its reset is durable, and never while it can be written.
- After a failed flush nothing is written any more (fsync(2): the kernel may have dropped the
  pages that failed, so a second success would mean nothing).
"""

import errno
import fcntl
import logging
import os
import stat
from collections import deque
from collections.abc import Awaitable, Sequence
from functools import partial

import trio

from retainzfs._zio import Slot
from retainzfs.device.aio import AsyncEngine, Ticket
from retainzfs.device.head import (
    PREALLOCATED,
    STATES,
    Header,
    HeadError,
    NewerHeadError,
    StatePage,
    decode_header,
    decode_page,
    has_magic,
)
from retainzfs.device.protocol import BLOCK, Condition, Sums, ZoneReport, device_error
from retainzfs.device.rules import Pending, ZoneRules, ZoneState, check_append, refused
from retainzfs.errors import (
    ChecksumError,
    Damaged,
    DeviceError,
    ForeignTarget,
    NewerFormat,
    RetainzError,
)

log = logging.getLogger(__name__)


class EmulatedDevice:
    """Built by `retainzfs.device.open_target` and `create_target`; owns the descriptor `fd`."""

    def __init__(self, name: str, fd: int, *, readonly: bool = False) -> None:
        self.name = name
        self._fd = fd
        self._readonly = readonly
        set_direct(fd)
        self._header = read_header(name, fd)
        self.geometry = self._header.geometry
        self._pages: list[StatePage] = []
        self.rules = ZoneRules(name, self.geometry, self._read_pages())
        self._block_device = stat.S_ISBLK(os.fstat(fd).st_mode)
        self._returns_space = not self._header.compatible & PREALLOCATED
        # A zone's space goes back in three steps: reset, reset durably, being discarded. One at a
        # time, because the host lets nothing else at the file meanwhile (ext4: 8 ms for 64 MiB).
        self._reset: set[int] = set()
        self._to_discard: deque[int] = deque()
        self._discarding: tuple[int, trio.Event] | None = None
        self._io: AsyncEngine | None = None
        self._flush_lock = trio.Lock()
        self._flush_rounds = 0
        self._flush_error: OSError | None = None
        self._statistics = dict.fromkeys(
            ("appended_bytes", "read_bytes", "flushes", "resets", "finishes", "discarded_bytes"), 0
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

    def report(self) -> list[ZoneReport]:
        return self.rules.report()

    def statistics(self) -> dict[str, int]:
        return {**self._statistics, "open": self.rules.open, "active": self.rules.active}

    # --- data -----------------------------------------------------------------------------------

    async def ready(self, zone: int) -> None:
        if self._discarding is not None and self._discarding[0] == zone:
            await self._discarding[1].wait()

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
        discarding = self._discarding is not None and self._discarding[0] == zone
        assert not discarding, f"append to zone {zone}, which was not ready"
        ended = partial(self._ended, zone, pending)
        address = self._address(zone, offset)
        ticket = io.append(self._fd, address, data, header, zone, ended)
        return self._appended(zone, pending, ticket)

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
            bad = await self._running().read(self._fd, self._address(zone, offset), slot, sums)
        except OSError as error:
            raise self._error(f"read from zone {zone}", error) from error
        if bad >= 0:
            raise ChecksumError(self.name, zone, offset + bad * BLOCK)
        self._statistics["read_bytes"] += length
        return memoryview(slot)

    # --- zones ----------------------------------------------------------------------------------

    async def reset(self, zones: Sequence[int]) -> None:
        self._writing("reset")
        held = self.rules.reset(zones)
        self._reset.update(held)
        self._statistics["resets"] += len(held)

    async def finish(self, zone: int) -> None:
        self._writing("finish")
        self.rules.finish(zone)
        self._statistics["finishes"] += 1

    async def open_zone(self, zone: int) -> None:
        self._writing("open")
        self.rules.open_zone(zone)

    async def close_zone(self, zone: int) -> None:
        self._writing("close")
        self.rules.close_zone(zone)

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

    async def _flush_round(self, io: AsyncEngine) -> None:
        # All changes are taken now: while they are written the zones go on changing.
        pages = {}
        for zone in self.rules.changed:
            page = self._pages[zone // STATES]
            page.put(zone, self.rules.states[zone])
            pages[zone // STATES] = page
        self.rules.changed.clear()
        reset, self._reset = self._reset, set()
        if not pages:
            return  # every append changes a pointer: there is no data either
        for _, page in sorted(pages.items()):
            await io.append(self._fd, page.next_offset, page.seal()).sums()
        await io.flush(self._fd)
        for page in pages.values():
            page.written()
        self._statistics["flushes"] += 1
        self._to_discard.extend(sorted(reset))
        self._discard(io)

    def _discard(self, io: AsyncEngine) -> None:
        """Begin to discard the next zone that nobody has begun to write meanwhile."""
        while self._to_discard and self._returns_space and self._discarding is None:
            zone = self._to_discard.popleft()
            if self.rules.states[zone].condition == Condition.EMPTY:
                self._discarding = zone, trio.Event()
                io.discard(
                    partial(self._discarded, io),
                    self._fd,
                    self._address(zone, 0),
                    self.geometry.zone_size,
                    device=self._block_device,
                )

    def _discarded(self, io: AsyncEngine, error: int) -> None:
        assert self._discarding is not None, "a discard that nobody asked for has ended"
        self._discarding[1].set()
        self._discarding = None
        if error:
            # Correct without it, only larger: say so once and go on.
            self._returns_space = False
            level = logging.INFO if error == errno.EOPNOTSUPP else logging.WARNING
            log.log(level, "%s: resets return no space: %s", self.name, os.strerror(error))
        else:
            self._statistics["discarded_bytes"] += self.geometry.zone_size
            self._discard(io)

    # --- shared ---------------------------------------------------------------------------------

    def _address(self, zone: int, offset: int) -> int:
        return self._header.base + zone * self.geometry.zone_size + offset

    def _error(self, what: str, error: OSError) -> DeviceError:
        """The host's error, but ENODEV when the zones are not there any more: the host reports a
        target that has shrunk, as a device does that was pulled, in a way of its own for each call.
        """
        try:
            shrunk = os.lseek(self._fd, 0, os.SEEK_END) < self._header.end
        except OSError:
            shrunk = False
        return device_error(self.name, what, OSError(errno.ENODEV, "") if shrunk else error)

    def _running(self) -> AsyncEngine:
        assert self._io is not None, f"{self.name} is used before start() or after aclose()"
        return self._io

    def _writing(self, what: str) -> AsyncEngine:
        if self._readonly:
            raise device_error(self.name, what, OSError(errno.EROFS, ""))
        if self._flush_error is not None:
            raise device_error(self.name, f"{what} after a failed flush", self._flush_error)
        return self._running()

    def _read_pages(self) -> list[ZoneState]:
        states: list[ZoneState] = []
        for index in range(self._header.pages):
            sequence, copy, found = self._read_page(index)
            page = StatePage(self._header, index, sequence, copy)
            for zone, state in zip(page.zones, found, strict=True):
                page.put(zone, state)
            self._pages.append(page)
            states += found
        return states

    def _read_page(self, index: int) -> tuple[int, int, list[ZoneState]]:
        """Sequence, number and states of the newer copy."""
        copies = []
        faults = []
        for copy in (0, 1):
            block = read_exactly(self._fd, self._header.page_offset(index, copy), BLOCK)
            try:
                sequence, states = decode_page(self._header, index, block)
            except HeadError as fault:
                faults.append(str(fault))
            else:
                copies.append((sequence, copy, states))
        if not copies:
            zones = self._header.page_zones(index)
            raise Damaged(
                self.name,
                f"both copies of the state of zones {zones[0]} to {zones[-1]}: {'; '.join(faults)}",
            )
        return max(copies, key=lambda found: found[0])


def read_header(name: str, fd: int) -> Header:
    """The header of the target: from its first copy, or from the second if that one is bad."""
    size = os.lseek(fd, 0, os.SEEK_END)
    blocks = [
        read_exactly(fd, copy * BLOCK, BLOCK) for copy in (0, 1) if size >= (copy + 1) * BLOCK
    ]
    faults = []
    for block in blocks:
        try:
            header = decode_header(block)
        except HeadError as fault:
            faults.append(str(fault))
        except NewerHeadError as newer:
            raise NewerFormat(name, newer) from newer
        else:
            if size < header.end:
                raise Damaged(name, f"it has {size} bytes, but was formatted with {header.end}")
            return header
    if any(has_magic(block) for block in blocks):
        raise Damaged(name, f"both copies of the header: {'; '.join(faults)}")
    raise ForeignTarget(name, "no retainzfs header")


def read_exactly(fd: int, offset: int, length: int) -> bytes:
    """`length` bytes through an aligned buffer, as O_DIRECT needs it."""
    slot = memoryview(Slot(length))
    done = 0
    while done < length:
        got = os.preadv(fd, [slot[done:]], offset + done)
        if not got:
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
        done += got
    return bytes(slot)


def set_direct(fd: int) -> bool:
    """Bypass the page cache if the backing filesystem lets us (tmpfs, for one, may not)."""
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    try:
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
        os.preadv(fd, [Slot(BLOCK)], 0)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        fcntl.fcntl(fd, fcntl.F_SETFL, flags)
        return False
    return True
