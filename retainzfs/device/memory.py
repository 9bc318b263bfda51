"""A zoned device in memory: for tests, replays and `mem:SIZE` targets. Nothing outlives it.

Closing and starting the same object again is a power cycle without loss: open zones are closed.
"""

from collections.abc import Awaitable, Generator, Sequence
from typing import Any

from retainzfs._zio import crc32c, crc32c_blocks
from retainzfs.device.protocol import BLOCK, Geometry, Sums, ZoneReport
from retainzfs.device.rules import ZoneRules, check_append, first_bad_block, refused
from retainzfs.errors import ChecksumError, RetainzError


class _Done:
    """What can be awaited and is there already."""

    def __init__(self, sums: Sums) -> None:
        self._sums = sums

    def __await__(self) -> Generator[Any, Any, Sums]:
        return self._sums
        yield  # makes this a generator, as the protocol of await wants


class MemoryDevice:
    """Zones are byte arrays that grow as they are written. No operation yields to other tasks."""

    def __init__(self, geometry: Geometry, name: str = "mem") -> None:
        self.name = name
        self.geometry = geometry
        self.rules = ZoneRules(name, geometry)
        self._zones: dict[int, bytearray] = {}
        self._statistics = dict.fromkeys(
            ("appended_bytes", "read_bytes", "flushes", "resets", "finishes"), 0
        )

    async def start(self) -> None:
        self.rules.power_cycle()

    async def settle(self) -> None:
        """A power cycle leaves no zone open."""

    async def aclose(self) -> None:
        self.close()

    def close(self) -> None:
        self.rules.power_cycle()

    def report(self, zones: range | None = None) -> list[ZoneReport]:
        return self.rules.report(zones)

    def report_zone(self, zone: int) -> ZoneReport:
        return self.rules.report_zone(zone)

    def known(self, zone: int) -> ZoneReport:
        return self.rules.report_zone(zone)

    def address(self, zone: int, offset: int = 0) -> int:
        return zone * self.geometry.zone_size + offset

    async def ready(self, zone: int) -> None:
        """Nothing is left to do after a reset."""

    def append(
        self, zone: int, offset: int, data: memoryview, header: bytes = b""
    ) -> Awaitable[Sums]:
        try:
            length = check_append(self.name, zone, data, header)
            self.rules.begin_append(zone, offset, length)
        except RetainzError as error:
            return refused(error)
        sums = self._store(zone, offset, data, header)
        self.rules.end_append(zone)
        self._statistics["appended_bytes"] += length
        return _Done(sums)

    def _store(self, zone: int, offset: int, data: memoryview, header: bytes) -> Sums:
        written = self._zones.setdefault(zone, bytearray())
        # Anything above the pointer is what an earlier, failed append left.
        del written[offset:]
        written += data
        sums = crc32c_blocks(data)
        if not header:
            return Sums(sums, 0)
        block = (header + sums).ljust(BLOCK, b"\0")
        written += block
        return Sums(sums, crc32c(block))

    async def read(self, zone: int, offset: int, length: int, sums: bytes = b"") -> memoryview:
        self.rules.check_read(zone, offset, length)
        data = self._load(zone, offset, length)
        if sums and (bad := first_bad_block(crc32c_blocks(data), sums)) >= 0:
            raise ChecksumError(self.name, zone, offset + bad * BLOCK)
        self._statistics["read_bytes"] += length
        return memoryview(data)

    def _load(self, zone: int, offset: int, length: int) -> bytearray:
        # A finished zone reads as zeros above what was written.
        stored = self._zones.get(zone, bytearray())
        return stored[offset : offset + length].ljust(length, b"\0")

    async def flush(self) -> None:
        self._statistics["flushes"] += 1

    async def reset(self, zones: Sequence[int]) -> None:
        for zone in self.rules.reset(zones):
            self._forget(zone)
            self._statistics["resets"] += 1

    def _forget(self, zone: int) -> None:
        self._zones.pop(zone, None)

    async def finish(self, zone: int) -> None:
        self.rules.finish(zone)
        self._statistics["finishes"] += 1

    async def open_zone(self, zone: int) -> None:
        self.rules.open_zone(zone)

    async def close_zone(self, zone: int) -> None:
        self.rules.close_zone(zone)

    def statistics(self) -> dict[str, int]:
        return {**self._statistics, "open": self.rules.open, "active": self.rules.active}
