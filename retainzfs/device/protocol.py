"""What a device is: geometry, zone conditions, and the operations every backend has."""

import enum
import errno
import os
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from retainzfs.errors import DeviceError

BLOCK = 4096
HEADER = 32  # bytes of a trailer block that belong to the caller
TRAILER_BLOCKS = (BLOCK - HEADER) // 4  # a trailer block holds the checksums of so many

MIN_ZONE_SIZE = 256 << 10  # a run of 64 blocks, small enough for tests, too small to be useful
MIN_ZONES = 16  # metadata 4, the emergency zone, and a zone for each kind of data
MIN_ACTIVE = 6  # journal 2, collection 1, and three kinds of data
MIN_OPEN = 4


class Condition(enum.IntEnum):
    """Zone conditions, numbered as in linux/blkzoned.h (`enum blk_zone_cond`)."""

    NOT_WP = 0
    EMPTY = 1
    IMPLICIT_OPEN = 2
    EXPLICIT_OPEN = 3
    CLOSED = 4
    READ_ONLY = 0xD
    FULL = 0xE
    OFFLINE = 0xF


OPEN = frozenset({Condition.IMPLICIT_OPEN, Condition.EXPLICIT_OPEN})
ACTIVE = OPEN | {Condition.CLOSED}


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes in bytes. `zone_size` is the distance of two zones, `zone_capacity` what one can hold.

    At most `max_open` zones are open and `max_active` open or closed; 0 is no limit.
    """

    zone_size: int
    zone_capacity: int
    zone_count: int
    max_open: int
    max_active: int

    def flaw(self) -> str | None:
        """Say why no volume can live on zones like these; None if one can."""
        for what, value in (("zone size", self.zone_size), ("zone capacity", self.zone_capacity)):
            if value % BLOCK:
                return f"{what} of {value} bytes is not a multiple of {BLOCK}"
            if value < MIN_ZONE_SIZE:
                return f"{what} of {value} bytes; the least is {MIN_ZONE_SIZE}"
        if self.zone_capacity > self.zone_size:
            return (
                f"zone capacity of {self.zone_capacity} bytes is above the zone size of"
                f" {self.zone_size}"
            )
        if self.zone_count < MIN_ZONES:
            return f"{self.zone_count} zones; the least is {MIN_ZONES}"
        for what, value, least in (
            ("open", self.max_open, MIN_OPEN),
            ("active", self.max_active, MIN_ACTIVE),
        ):
            if value != 0 and value < least:
                return f"{value} {what} zones at most; the least is {least}"
        if self.max_active and self.max_open > self.max_active:
            return f"{self.max_open} open zones, but only {self.max_active} active ones"
        return None


class ZoneReport(NamedTuple):
    """One zone. `write_pointer` and `capacity` in bytes from the zone's start.

    The pointer means nothing where the condition has none (full, read-only, offline): it is the
    capacity in a full zone.
    """

    index: int  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    condition: Condition
    write_pointer: int
    capacity: int


class Sums(NamedTuple):
    """Checksums of an append: 4 bytes little-endian crc32c a block, and that of the trailer."""

    blocks: bytes
    trailer: int


class Device(Protocol):
    """A zoned device. Appends to a zone run in the order of their calls, all else at once."""

    @property
    def name(self) -> str:
        """What the user typed, for messages."""

    @property
    def geometry(self) -> Geometry: ...

    async def start(self) -> None:
        """Start the I/O threads. Before any operation below, inside a trio run."""

    async def settle(self) -> None:
        """Take care of zones that a crash has left open. Before the first command that changes
        something, and only on a target that is known to be ours."""

    async def aclose(self) -> None:
        """Wait for what is running, stop the threads, let the target go. Does not flush."""

    def close(self) -> None:
        """`aclose` for a device that was never started or whose trio run has ended."""

    def report(self, zones: range | None = None) -> list[ZoneReport]:
        """The zones, all by default, as the device has them now; as it had them when it told last
        if it does not tell."""

    def report_zone(self, zone: int) -> ZoneReport:
        """A zone as the device has it now, for certain. Raises DeviceError."""

    def known(self, zone: int) -> ZoneReport:
        """A zone as commands and reports have left it; the device is not asked."""

    def address(self, zone: int, offset: int = 0) -> int:
        """The byte of the target where a byte of a zone lies."""

    async def ready(self, zone: int) -> None:
        """Return when the zone takes appends: what a reset left to do for it is done."""

    def append(
        self, zone: int, offset: int, data: memoryview, header: bytes = b""
    ) -> Awaitable[Sums]:
        """Write `data` (whole blocks, in memory aligned to 4096) at the write pointer `offset`.

        With a `header` (32 bytes) one trailer block follows in the same write: header, crc32c of
        every block, zeros. The call admits the append, behind those that run in the zone, and
        returns at once; awaiting its value waits for the write and raises its errors. The data
        must not change before.
        The device runs the appends of a zone one at a time, and when one fails those behind it do.

        Errors: ZoneRuleError (nothing changed), DeviceError with the host's errno (the pointer
        stays; report the zone again before using it).
        """

    async def read(self, zone: int, offset: int, length: int, sums: bytes = b"") -> memoryview:
        """Read `length` bytes below the write pointer; both numbers are multiples of BLOCK.

        With `sums` (4 bytes a block) every block is verified. Errors: ChecksumError with the
        offset of the first bad block, ZoneRuleError, DeviceError.
        """

    async def flush(self) -> None:
        """What was appended, reset or finished before the call is durable after it.

        One fdatasync; calls that wait at the same time share it. A failure is final: every later
        append and flush fails too (a failed flush is never retried, fsync(2)).
        """

    async def reset(self, zones: Sequence[int]) -> None:
        """Make the zones empty; all or, after a ZoneRuleError, none of them."""

    async def finish(self, zone: int) -> None:
        """Make the zone full where its write pointer is."""

    async def open_zone(self, zone: int) -> None:
        """Open explicitly: the device will not close it by itself."""

    async def close_zone(self, zone: int) -> None:
        """Give up an open resource; the zone stays active, even without data (on ZNS)."""

    def statistics(self) -> dict[str, int]:
        """appended_bytes (with trailers), read_bytes, flushes, resets, finishes, open, active."""


def device_error(name: str, what: str, error: OSError) -> DeviceError:
    """DeviceError that carries the host's errno, and its words if it has some of its own."""
    code = error.errno or errno.EIO
    raised = DeviceError(name, what, error.strerror or os.strerror(code))
    raised.errno = code
    return raised
