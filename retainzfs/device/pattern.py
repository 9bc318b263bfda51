"""A device in memory that keeps how to make its bytes instead of the bytes, for experiments.

The pattern is an endless row of blocks. Block `key` is 8 bytes that say `key`, then noise that
begins one block later for each key, so no two blocks are alike and each tells where it belongs.
Consecutive blocks of the pattern that are appended cost one small piece; any other block is kept
as it is, trailers too, which are a thousandth. What comes back is always what was written.

The power can be cut: nothing is left then of what was not flushed. `faults` has the other outcomes.
"""

from __future__ import annotations

import copy
import random
import sys
from array import array
from bisect import bisect_right
from collections.abc import Awaitable, Iterable, Sequence
from typing import Final

from retainzfs._zio import crc32c, crc32c_blocks
from retainzfs.device.faults import PowerCut
from retainzfs.device.memory import MemoryDevice
from retainzfs.device.protocol import BLOCK, Condition, Geometry, Sums
from retainzfs.device.rules import ZoneRules, ZoneState

PERIOD: Final = 31  # blocks of noise before it repeats; prime, so in step with no size of anything
UNIT: Final = 32  # blocks made or compared at once: they and the noise stay in a core's cache
WORDS: Final = BLOCK // 8

assert sys.byteorder == "little", "keys are stored as the machine has them"


class Pattern:
    """The pattern of a seed. Keys are below 2**64; lengths are whole blocks."""

    def __init__(self, seed: int) -> None:
        noise = random.Random(seed).randbytes(PERIOD * BLOCK)
        self._noise = memoryview((3 * noise)[: (PERIOD + UNIT) * BLOCK])

    def make(self, key: int, blocks: int) -> bytearray:
        """Return blocks [key, key + blocks)."""
        if blocks > UNIT:
            out = bytearray(blocks * BLOCK)
            self.fill(memoryview(out), key)
            return out
        at = key % PERIOD * BLOCK
        out = bytearray(self._noise[at : at + blocks * BLOCK])
        _sign(memoryview(out), key)
        return out

    def fill(self, out: memoryview, key: int) -> None:
        """Fill whole blocks with the pattern from `key` on."""
        for start in range(0, len(out), UNIT * BLOCK):
            piece = out[start : start + UNIT * BLOCK]
            at = (key + start // BLOCK) % PERIOD * BLOCK
            piece[:] = self._noise[at : at + len(piece)]
        _sign(out, key)

    def match(self, data: memoryview) -> tuple[int, int]:
        """Return the key of the first block and how many blocks follow the pattern from it; 0
        blocks if the first is none of the pattern's."""
        key = int.from_bytes(data[:8], "little")
        if key + len(data) // BLOCK > 1 << 64 or self.make(key, 1) != data[:BLOCK]:
            return key, 0
        return key, self.equal(data, key)

    def equal(self, data: memoryview, key: int) -> int:
        """Return how many blocks are as the pattern has them from `key` on."""
        for start in range(0, len(data), UNIT * BLOCK):
            piece = data[start : start + UNIT * BLOCK]
            # With a bytearray on the left it is one memcmp; of two views each byte is an object.
            if self.make(key + start // BLOCK, len(piece) // BLOCK) != piece:
                block = start // BLOCK
                while self.make(key + block, 1) == data[block * BLOCK : (block + 1) * BLOCK]:
                    block += 1
                return block
        return len(data) // BLOCK


def _sign(blocks: memoryview, key: int) -> None:
    """Let each block say its key."""
    keys = array("Q", range(key, key + len(blocks) // BLOCK))
    blocks.cast("Q")[::WORDS] = memoryview(keys)


class Contents:
    """The blocks of a zone, from its start on."""

    def __init__(self) -> None:
        self.starts: list[int] = []  # first block of each piece
        self.pieces: list[int | bytes] = []  # a key of the pattern, or the blocks themselves
        self.blocks = 0

    def put(self, piece: int | bytes, blocks: int) -> None:
        """Append a piece; a pattern that goes on makes no new one."""
        last = self.pieces[-1] if self.pieces else None
        goes_on = (
            isinstance(piece, int)
            and isinstance(last, int)
            and piece == last + self.blocks - self.starts[-1]
        )
        if not goes_on:
            self.starts.append(self.blocks)
            self.pieces.append(piece)
        self.blocks += blocks

    def cut(self, blocks: int) -> None:
        """Forget what lies behind so many blocks."""
        while self.starts and self.starts[-1] >= blocks:
            self.starts.pop()
            self.pieces.pop()
        if self.pieces and isinstance(self.pieces[-1], bytes):
            self.pieces[-1] = self.pieces[-1][: (blocks - self.starts[-1]) * BLOCK]
        self.blocks = min(self.blocks, blocks)

    def read(self, pattern: Pattern, first: int, out: memoryview) -> None:
        """Fill `out`, which is zero, with the blocks from `first` on; behind the end it stays."""
        stop = min(first + len(out) // BLOCK, self.blocks)
        index = bisect_right(self.starts, first) - 1
        at = first
        while at < stop:
            start, piece = self.starts[index], self.pieces[index]
            index += 1
            end = min(stop, self.starts[index] if index < len(self.starts) else self.blocks)
            view = out[(at - first) * BLOCK : (end - first) * BLOCK]
            if isinstance(piece, int):
                pattern.fill(view, piece + at - start)
            else:
                view[:] = piece[(at - start) * BLOCK : (end - start) * BLOCK]
            at = end


class PatternDevice(MemoryDevice):
    """Zones of which what follows the pattern takes no memory. `cut_at`: the power is cut behind
    the append with which so many bytes have been appended in all, trailers included."""

    def __init__(self, geometry: Geometry, pattern: Pattern, name: str = "pattern") -> None:
        super().__init__(geometry, name)
        self.pattern = pattern
        self.cut_at: int | None = None
        self._off = False
        self._contents: dict[int, Contents] = {}
        # Of zones that changed since the last flush: what they were then.
        self._stable: dict[int, tuple[ZoneState, Contents | None]] = {}

    @property
    def pieces(self) -> int:
        """What is kept of all zones, in pieces of some hundred bytes; a real block is one, too."""
        return sum(len(contents.pieces) for contents in self._contents.values())

    async def start(self) -> None:
        self._off = False
        await super().start()

    def repeat(self, zone: int, zones: Iterable[int]) -> None:
        """Let empty zones hold, from now on and flushed, what a full one does; it takes no more
        memory."""
        state, contents = self.rules.states[zone], self._contents[zone]
        assert state.condition is Condition.FULL, "what is shared does not change"
        for other in zones:
            self.rules.adopt(other, state.condition, state.pointer)
            self._contents[other] = contents

    def power_cycle(self) -> int:
        """Lose what was not flushed, resets and finishes too; `start` comes next. Return the bytes
        that were appended and are lost."""
        lost = 0
        states = [copy.copy(state) for state in self.rules.states]
        for zone, (state, contents) in sorted(self._stable.items()):
            lost += max(0, states[zone].pointer - state.pointer)
            states[zone] = state
            self._contents.pop(zone, None)
            if contents is not None:
                contents.cut(state.pointer // BLOCK)
                self._contents[zone] = contents
        self._stable.clear()
        self.rules = ZoneRules(self.name, self.geometry, states)
        self.cut_at = None
        return lost

    def _change(self, *zones: int) -> None:
        """The zones are about to change."""
        if self._off:
            raise PowerCut
        for zone in zones:
            if zone not in self._stable and 0 <= zone < self.geometry.zone_count:
                before = copy.copy(self.rules.states[zone]), self._contents.get(zone)
                self._stable[zone] = before

    def append(
        self, zone: int, offset: int, data: memoryview, header: bytes = b""
    ) -> Awaitable[Sums]:
        self._change(zone)
        appended = super().append(zone, offset, data, header)
        if self.cut_at is not None and self._statistics["appended_bytes"] >= self.cut_at:
            self._off = True
            raise PowerCut
        return appended

    def _store(self, zone: int, offset: int, data: memoryview, header: bytes) -> Sums:
        contents = self._contents.setdefault(zone, Contents())
        assert contents.blocks == offset // BLOCK, "no append fails halfway"
        sums = crc32c_blocks(data)
        at = 0
        while at < len(data):
            key, blocks = self.pattern.match(data[at:])
            if blocks:
                contents.put(key, blocks)
            else:
                contents.put(bytes(data[at : at + BLOCK]), 1)
            at += max(1, blocks) * BLOCK
        if not header:
            return Sums(sums, 0)
        trailer = (header + sums).ljust(BLOCK, b"\0")
        contents.put(trailer, 1)
        return Sums(sums, crc32c(trailer))

    def _load(self, zone: int, offset: int, length: int) -> bytearray:
        if self._off:
            raise PowerCut
        data = bytearray(length)
        self._contents.get(zone, Contents()).read(self.pattern, offset // BLOCK, memoryview(data))
        return data

    async def flush(self) -> None:
        self._change()
        self._stable.clear()
        await super().flush()

    async def reset(self, zones: Sequence[int]) -> None:
        self._change(*zones)
        await super().reset(zones)

    def _forget(self, zone: int) -> None:
        self._contents.pop(zone, None)

    async def finish(self, zone: int) -> None:
        self._change(zone)
        await super().finish(zone)
