"""Inodes, their extents, and the runs that extents point into."""

from __future__ import annotations

import stat
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from retainzfs import layout
from retainzfs.errors import RetainzError
from retainzfs.layout import BLOCK, INLINE_DATA_MAX

Span = tuple[int, int]  # blocks [start, end) of a file


class Run:
    """Blocks that are appended to a zone in one piece."""

    __slots__ = ("buffer", "epoch", "failed", "held", "length", "owners", "start", "sums", "zone")

    def __init__(self, zone: int, epoch: int, start: int, length: int, sums: bytes) -> None:
        self.zone = zone  # -1 until the run has its place
        self.epoch = epoch
        self.start = start  # block of the zone
        self.length = length  # data blocks
        self.sums = sums
        self.owners: dict[int, int] = {}
        self.held = 0  # blocks that extents hold, the sum of the owners
        self.buffer: memoryview | None = None  # the bytes, until they are on the device
        self.failed = False  # the device refused the bytes everywhere

    @property
    def blocks(self) -> int:
        """Blocks on the device, trailer included."""
        return self.length + (self.length > layout.INLINE_SUMS_MAX)

    @property
    def single(self) -> bool:
        """Whether its blocks are not held more often than they are there."""
        return self.held <= self.length

    def __repr__(self) -> str:
        return f"Run(zone={self.zone}, start={self.start}, length={self.length})"


class Extent(NamedTuple):
    """Blocks [block, block + blocks) of a file are blocks [first, first + blocks) of `run`."""

    block: int
    blocks: int
    run: Run
    first: int

    @property
    def end(self) -> int:
        return self.block + self.blocks

    def part(self, start: int, end: int) -> Extent:
        assert self.block <= start < end <= self.end, "an extent is cut inside its bounds"
        return Extent(start, end - start, self.run, self.first + start - self.block)


class Inode:
    __slots__ = (
        "atime_ns", "blocks", "changed", "content", "ctime_ns", "dirty", "doubt", "due_s",
        "entries", "error", "extents", "faded", "fresh", "generation", "gid", "handles", "ino",
        "judged", "known_content", "logged_size", "lookups", "missing", "mode", "mtime_ns", "name",
        "nlink", "parent", "rdev", "shadow", "size", "stage", "uid", "writes", "xattrs",
    )  # fmt: skip

    def __init__(self, ino: int) -> None:
        self.ino = ino
        self.mode = self.uid = self.gid = self.nlink = self.rdev = self.size = 0
        self.atime_ns = self.mtime_ns = self.ctime_ns = 0
        self.generation = 0  # see retention; 0: none
        self.parent = 0  # a directory's parent; of a file the directory of its newest name
        self.extents: list[Extent] = []
        self.blocks = 0  # that its extents hold
        self.content = b""
        self.xattrs: dict[bytes, bytes] | None = None
        self.entries: dict[bytes, int] | None = None
        # From here on: what is not on the medium.
        self.logged_size = 0  # the size that the journal knows
        self.dirty = Spans()  # blocks whose extents the journal does not know yet
        self.shadow: list[Extent] | None = None  # what the journal knows and `extents` does not
        self.fresh = 0  # extents mapped since the last commit
        self.known_content = b""  # `content` as the journal knows it
        self.changed = 0  # the round that carries, or will carry, its newest record
        self.due_s = 0.0  # epoch by which a dirty inode is committed
        self.handles = 0
        self.lookups = 0
        self.faded = False  # its last name went without the kernel having asked for that
        self.name = b""  # its newest one, if it still has that
        self.writes = 0  # counts modifications; a cached copy of another count is stale
        self.judged = 0  # the count of `writes` when completeness was last looked at
        self.doubt = ""  # why its generation cannot be complete, as its last close told
        self.error: RetainzError | None = None  # a write that failed after its caller had gone
        self.missing: Spans | None = (
            None  # bytes that failed writes left out, as their callers know
        )
        self.stage: object = None  # the stream's own

    @property
    def in_use(self) -> bool:
        """Whether its bytes are needed even without a name. The kernel may open what it looked up
        after the name went to another inode; until it forgets, the old one is there. But where it
        was not told that the name went, it may remember for as long as it has memory."""
        return bool(self.handles or (self.lookups and not self.faded))

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def is_being_written(self) -> bool:
        return self.handles > 0 and self.judged != self.writes

    @property
    def ends_in_hole(self) -> bool:
        """Whether the size was announced, by ftruncate(2) or posix_fallocate(3), before bytes."""
        end = self.extents[-1].end if self.extents else bool(self.content)
        return self.size > end * BLOCK

    def stays_inline(self, end: int) -> bool:
        """Whether a file that is written up to byte `end` keeps its bytes in its record."""
        return max(end, self.size) <= INLINE_DATA_MAX and not self.extents

    def find(self, block: int) -> int:
        """Return the index of the first extent that ends behind `block`."""
        extents = self.extents
        if not extents or block >= extents[-1].block:
            return len(extents) - (bool(extents) and block < extents[-1].end)
        i = bisect_right(extents, block, key=_block_of)
        return i - 1 if i and extents[i - 1].end > block else i

    def spans(self, start: int, end: int) -> Iterator[Extent]:
        """Yield the extents in [start, end), cut at its bounds; holes are left out."""
        for i in range(self.find(start), len(self.extents)):
            extent = self.extents[i]
            if extent.block >= end:
                return
            yield extent.part(max(start, extent.block), min(end, extent.end))


def _block_of(extent: Extent) -> int:
    return extent.block


_NO_SPANS: list[int] = []  # stays empty


class Spans:
    """A set of blocks, or bytes, as sorted spans [start, end) that neither touch nor overlap."""

    __slots__ = ("_ends", "_starts")

    def __init__(self, spans: Iterable[Span] = ()) -> None:
        self._starts = self._ends = _NO_SPANS  # every file has such a set, and few have spans
        for start, end in spans:
            self.add(start, end)

    def __bool__(self) -> bool:
        return bool(self._starts)

    def __iter__(self) -> Iterator[Span]:
        return zip(self._starts, self._ends, strict=True)

    def add(self, start: int, end: int) -> None:
        if start >= end:
            return
        if self._starts is _NO_SPANS:
            self._starts, self._ends = [], []
        starts, ends = self._starts, self._ends
        i = bisect_left(ends, start)  # the first span that touches or lies behind
        j = bisect_right(starts, end)  # behind the last one that touches
        if i < j:
            start, end = min(start, starts[i]), max(end, ends[j - 1])
        starts[i:j] = [start]
        ends[i:j] = [end]

    def remove(self, start: int, end: int) -> None:
        starts, ends = self._starts, self._ends
        i = bisect_right(ends, start)  # the first span that ends behind the start
        j = bisect_left(starts, end)  # behind the last one that begins before the end
        if i >= j or start >= end:
            return
        sides = ((starts[i], start), (end, ends[j - 1]))
        kept = [(first, last) for first, last in sides if first < last]
        starts[i:j] = [first for first, _ in kept]
        ends[i:j] = [last for _, last in kept]

    def cut(self, end: int) -> None:
        """Forget everything from `end` on."""
        i = bisect_left(self._starts, end)
        del self._starts[i:], self._ends[i:]
        if self._ends and self._ends[-1] > end:
            self._ends[-1] = end

    def outside(self, extent: Extent) -> Iterator[Extent]:
        """Yield the parts of the extent that lie in none of the spans."""
        at = extent.block
        for i in range(bisect_right(self._ends, at), len(self._starts)):
            start = self._starts[i]
            if start >= extent.end:
                break
            if start > at:
                yield extent.part(at, start)
            at = self._ends[i]
        if at < extent.end:
            yield extent.part(at, extent.end)
