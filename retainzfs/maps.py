"""Which blocks of which run each file holds.

An extent does not say where its bytes are but points into a run: the bytes that were, or will be,
appended together. While a run is staged its bytes are in memory, afterwards on the device; a reader
has one place to ask either way.

Invariants
- The extents of an inode are sorted, do not overlap, and stay inside the run that they point into.
- `run.owners` counts, for each inode, the blocks that its extents hold in the run: extents in
  `inode.extents` and in `inode.shadow`.
- `shadow` holds what the journal still says about the ranges in `dirty`: the extents that were
  overwritten in memory and not yet in the log. A crash brings them back, so their bytes stay live.
- `content` holds the bytes of block 0 when no extent does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from retainzfs.errors import RetainzError
from retainzfs.inodes import Extent, Inode, Run, Spans
from retainzfs.layout import BLOCK

FOREVER = 1 << 62  # a block behind every file


class Ledger(Protocol):
    """Told of every block that begins or ceases to be held; keeps the zones' live bytes."""

    def gain(self, inode: Inode, run: Run, count: int) -> None: ...
    def lose(self, inode: Inode, run: Run, count: int) -> None: ...
    def regroup(self, inode: Inode, generation: int) -> None: ...


class Maps:
    def __init__(self) -> None:
        self.inodes: dict[int, Inode] = {}
        self.runs: dict[int, dict[tuple[int, int], Run]] = {}  # zone → (epoch, start) → run
        self.fresh = 0  # extents that were mapped and that the journal does not know yet
        self.ledger: Ledger | None = None
        self.lost: Callable[[Inode], None] = lambda inode: None  # hears of bytes that are lost

    def run(self, zone: int, epoch: int, start: int, length: int, sums: bytes) -> Run:
        """Return the run at this place, made on first mention."""
        here = self.runs.setdefault(zone, {})
        run = here.get((epoch, start))
        if run is None:
            run = here[epoch, start] = Run(zone, epoch, start, length, sums)
        elif run.length != length or run.sums != sums:
            raise ValueError(f"two runs at zone {zone}, block {start}")
        return run

    def map(self, inode: Inode, extent: Extent, *, keep: bool = False) -> None:
        """Let the extent hold its blocks of the file, in place of what held them.

        With `keep` what the journal knows about these blocks stays live as a shadow.
        """
        # First, so that a run whose only owner is mapped anew is not forgotten in between.
        self._gain(inode, extent.run, extent.blocks)
        self.drop(inode, extent.block, extent.end, keep=keep)
        if extent.block == 0 and not keep:
            inode.content = inode.known_content = b""
        extents = inode.extents
        at = inode.find(extent.block)
        last = extents[at - 1] if at else None
        if (
            last is not None
            and last.run is extent.run
            and last.end == extent.block
            and last.first + last.blocks == extent.first
        ):
            extents[at - 1] = last._replace(blocks=last.blocks + extent.blocks)
        else:
            extents.insert(at, extent)
            inode.fresh += keep
            self.fresh += keep
        inode.blocks += extent.blocks

    def drop(self, inode: Inode, start: int, end: int, *, keep: bool = False) -> None:
        """Let nothing hold blocks [start, end) of the file."""
        extents = inode.extents
        if not extents or start >= extents[-1].end:
            return
        i = j = inode.find(start)
        remains: list[Extent] = []
        dropped: list[Extent] = []
        while j < len(extents) and extents[j].block < end:
            extent = extents[j]
            if extent.block < start:
                remains.append(extent.part(extent.block, start))
            if extent.end > end:
                remains.append(extent.part(end, extent.end))
            dropped.append(extent.part(max(start, extent.block), min(end, extent.end)))
            j += 1
        extents[i:j] = remains
        inode.blocks -= sum(extent.blocks for extent in dropped)
        for extent in dropped:
            kept = list(inode.dirty.outside(extent)) if keep else []
            if kept:
                inode.shadow = inode.shadow or []
                inode.shadow += kept
            lost = extent.blocks - sum(e.blocks for e in kept)
            if lost:
                self._lose(inode, extent.run, lost)

    def revert(self, inode: Inode, run: Run) -> bool:
        """Let the blocks that a failed run should have held be where the journal knows them.

        False, and nothing changed, when the journal does not know them all.
        """
        failed = [e for e in inode.extents if e.run is run]
        wanted = sum(e.blocks for e in failed)
        known: list[Extent] = []
        rest: list[Extent] = []
        spans = Spans((e.block, e.end) for e in failed)
        for extent in inode.shadow or ():
            outside = list(spans.outside(extent))
            rest += outside
            known += Spans((e.block, e.end) for e in outside).outside(extent)
        if sum(e.blocks for e in known) != wanted:
            return False
        for extent in failed:
            self.drop(inode, extent.block, extent.end)
        inode.shadow = rest
        inode.blocks += wanted
        for extent in known:  # their runs count them already
            inode.extents.insert(inode.find(extent.block), extent)
        return True

    def cut(self, inode: Inode, size: int) -> None:
        """Drop everything behind `size` bytes, what the journal knows included."""
        end = -(-size // BLOCK)
        self.drop(inode, end, FOREVER)
        inode.content = inode.content[:size]
        inode.known_content = inode.known_content[:size]
        inode.dirty.cut(end)
        for extent in inode.shadow or ():
            if extent.end > end:
                self._lose(inode, extent.run, extent.end - max(end, extent.block))
        inode.shadow = [
            e.part(e.block, min(e.end, end)) for e in inode.shadow or () if e.block < end
        ] or None

    def drop_shadow(self, inode: Inode) -> None:
        """The journal is about to forget what `dirty` blocks were."""
        for extent in inode.shadow or ():
            self._lose(inode, extent.run, extent.blocks)
        inode.shadow = None

    def _gain(self, inode: Inode, run: Run, count: int) -> None:
        run.owners[inode.ino] = run.owners.get(inode.ino, 0) + count
        run.held += count
        if self.ledger is not None:
            self.ledger.gain(inode, run, count)

    def _lose(self, inode: Inode, run: Run, count: int) -> None:
        left = run.owners[inode.ino] - count
        assert left >= 0, "an inode gives back no more of a run than it holds"
        run.held -= count
        if left:
            run.owners[inode.ino] = left
        else:
            del run.owners[inode.ino]
        if self.ledger is not None:
            self.ledger.lose(inode, run, count)
        if not run.owners and run.zone >= 0:
            self.runs.get(run.zone, {}).pop((run.epoch, run.start), None)

    def fail(self, inode: Inode, error: RetainzError) -> None:
        """Bytes that were accepted for the inode are lost; its next caller gets the error."""
        inode.error = error
        self.lost(inode)

    # Staged runs

    def split(self, run: Run, blocks: int) -> Run:
        """Cut a staged run in two; extents behind the cut move to the new one."""
        assert run.buffer is not None, "only staged runs are cut"
        rest = Run(-1, 0, 0, run.length - blocks, b"")
        rest.buffer = run.buffer[blocks * BLOCK :]
        run.buffer = run.buffer[: blocks * BLOCK]
        run.length = blocks
        self._repoint(run, rest, blocks)
        return rest

    def compact(self, run: Run) -> None:
        """Squeeze out the blocks that no extent holds any more; they are not worth writing."""
        assert run.buffer is not None, "only staged runs are compacted"
        held: list[tuple[int, Inode, int]] = []  # first block in the run, inode, index of extent
        for ino in run.owners:
            inode = self.inodes[ino]
            held += [(e.first, inode, i) for i, e in enumerate(inode.extents) if e.run is run]
        at = 0
        for first, inode, i in sorted(held, key=lambda item: item[0]):
            extent = inode.extents[i]
            if first > at:
                data = bytes(run.buffer[first * BLOCK : (first + extent.blocks) * BLOCK])
                run.buffer[at * BLOCK : (at + extent.blocks) * BLOCK] = data
                inode.extents[i] = extent._replace(first=at)
            at += extent.blocks
        assert at == run.held, "the extents of a run's owners hold what the run counts"
        run.length = at

    def _repoint(self, run: Run, rest: Run, cut: int) -> None:
        for ino in list(run.owners):
            inode = self.inodes[ino]
            extents: list[Extent] = []
            for extent in inode.extents:
                if extent.run is not run or extent.first + extent.blocks <= cut:
                    extents.append(extent)
                    continue
                edge = extent.block + max(0, cut - extent.first)
                if edge > extent.block:
                    extents.append(extent.part(extent.block, edge))
                moved = extent.part(edge, extent.end)
                extents.append(Extent(edge, moved.blocks, rest, moved.first - cut))
                run.owners[ino] -= moved.blocks
                run.held -= moved.blocks
                rest.held += moved.blocks
                rest.owners[ino] = rest.owners.get(ino, 0) + moved.blocks
            if not run.owners[ino]:
                del run.owners[ino]
            inode.extents = extents
