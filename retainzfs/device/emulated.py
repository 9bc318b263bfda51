"""Zones emulated on a regular file or a conventional block device.

Invariants
- Data never precedes its pointer: a pointer is recorded only for appends that have ended, and one
  fdatasync makes both durable. After a crash the recorded pointer holds; bytes above it do not
  exist.
- A zone's space is given back only when its reset is durable, and never while it can be written.
"""

import errno
import logging
import os
import stat
from collections import deque
from collections.abc import Sequence
from functools import partial

import trio

from retainzfs._zio import Slot
from retainzfs.device.aio import AsyncEngine
from retainzfs.device.disk import DiskDevice, set_direct
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
from retainzfs.device.protocol import BLOCK, Condition
from retainzfs.device.rules import ZoneRules, ZoneState
from retainzfs.errors import (
    Damaged,
    ForeignTarget,
    NewerFormat,
)

log = logging.getLogger(__name__)


class EmulatedDevice(DiskDevice):
    """Built by `retainzfs.device.open_target` and `create_target`; owns the descriptor `fd`."""

    def __init__(self, name: str, fd: int, *, readonly: bool = False) -> None:
        set_direct(fd)
        self._header = read_header(name, fd)
        super().__init__(name, fd, self._header.base, readonly=readonly)
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
        self._statistics["discarded_bytes"] = 0

    async def settle(self) -> None:
        """Reading the states has closed what was open."""

    async def ready(self, zone: int) -> None:
        if self._discarding is not None and not self._is_ready(zone):
            await self._discarding[1].wait()

    def _is_ready(self, zone: int) -> bool:
        return self._discarding is None or self._discarding[0] != zone

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
                    self.address(zone),
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

    def _gone(self) -> bool:
        try:
            return os.lseek(self._fd, 0, os.SEEK_END) < self._header.end
        except OSError:
            return False

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
