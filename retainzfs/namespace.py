"""Inodes, directories, extents and attributes in memory; `apply` is the only way to change them.

The same `apply` serves a live call and the replay of the journal, so the two cannot drift apart.
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
- What lies in limbo has no names for anybody: `directory` is empty there. Only a tree that is
  `fading` is whole: who has met its name a moment ago shall find all of it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from typing import Protocol

from retainzfs import layout, lifetimes
from retainzfs.errors import FSError, RetainzError
from retainzfs.inodes import Extent, Inode, Run, Spans
from retainzfs.layout import BLOCK

__all__ = [
    "LIMBO",
    "ROOT",
    "Extent",
    "FSError",
    "Inode",
    "Ledger",
    "Namespace",
    "Run",
    "map_record",
]

ROOT = 1
# In the root: the directory of trees that were removed and are not yet freed. Nobody meets it: a
# mount answers to this name with its control directory.
LIMBO = b".retainz"


class Ledger(Protocol):
    """Told of every block that begins or ceases to be held; keeps the zones' live bytes."""

    def gain(self, inode: Inode, run: Run, count: int) -> None: ...
    def lose(self, inode: Inode, run: Run, count: int) -> None: ...
    def regroup(self, inode: Inode, generation: int) -> None: ...


class Namespace:
    """All inodes of a volume. `name` is the target, for messages."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.inodes: dict[int, Inode] = {}
        self.runs: dict[int, dict[tuple[int, int], Run]] = {}  # zone → (epoch, start) → run
        self.zone_epochs: dict[int, int] = {}
        self.generations: dict[int, layout.GenerationRecord] = {}
        self.next_ino = ROOT + 1
        self.next_generation = 1
        self.next_order = 1
        self.version = 0  # of everything that a path or an inherited attribute depends on
        self.fresh = 0  # extents that were mapped and that the journal does not know yet
        self.lenient = False  # replaying what a fuzzy snapshot may already have outlived
        # Names of files that have several, in the order in which they came.
        self.links: dict[int, dict[tuple[int, bytes], None]] = {}
        self.fading: set[int] = set()  # tops in limbo whose names somebody may still have
        self.ledger: Ledger | None = None
        self.lost: Callable[[Inode], None] = lambda inode: None  # hears of bytes that are lost
        self._apply = {
            layout.InodeRecord: self._set_inode,
            layout.SizeRecord: self._set_size,
            layout.ContentRecord: self._set_content,
            layout.MapRecord: self._map_record,
            layout.FreeRecord: self._free,
            layout.LinkRecord: self._link,
            layout.UnlinkRecord: self._unlink,
            layout.XattrRecord: self._set_xattr,
            layout.XattrRemovedRecord: self._remove_xattr,
            layout.ZoneRecord: self._set_zone,
            layout.GenerationRecord: self._set_generation,
            layout.CountersRecord: self._set_counters,
        }

    def apply(self, record: layout.Record) -> None:
        """Raises ValueError for a record that contradicts the state, which is damage."""
        self._apply[type(record)](record)  # type: ignore[operator]

    def get(self, ino: int) -> Inode:
        inode = self.inodes.get(ino)
        if inode is None:
            raise FSError(errno.ENOENT, f"inode {ino}")
        return inode

    def directory(self, ino: int) -> dict[bytes, int]:
        """Return the names in a directory, none once they are being freed. Raises FSError."""
        inode = self.get(ino)
        if inode.entries is None:
            raise FSError(errno.ENOTDIR, self.path(ino))
        if self.removed(inode) and not any(self.below(inode, top) for top in self.fading):
            return {}
        return inode.entries

    def removed(self, inode: Inode) -> bool:
        """Whether nothing leads to the inode any more."""
        return not inode.nlink or (self.limbo is not None and self.below(inode, self.limbo.ino))

    @property
    def limbo(self) -> Inode | None:
        root = self.inodes.get(ROOT)
        ino = root.entries.get(LIMBO) if root is not None and root.entries else None
        inode = self.inodes.get(ino) if ino is not None else None
        return inode if inode is not None and inode.is_dir else None

    def child(self, parent: int, name: bytes) -> Inode:
        ino = self.directory(parent).get(name)
        if ino is None:
            raise FSError(errno.ENOENT, os.path.join(self.path(parent), os.fsdecode(name)))
        return self.get(ino)

    def components(self, ino: int) -> list[bytes]:
        """Return the names from the root to the inode; of a file, by one of its names."""
        names: list[bytes] = []
        while ino != ROOT:
            inode = self.get(ino)
            parent = self.inodes.get(inode.parent)
            entries = parent.entries if parent is not None else None
            name: bytes | None = inode.name
            if entries is None or entries.get(inode.name) != ino:
                name = next((n for n, i in (entries or {}).items() if i == ino), None)
            names.append(name if name is not None else b"(unlinked inode %d)" % ino)
            ino = inode.parent if entries is not None else ROOT
        return names[::-1]

    def path(self, ino: int) -> str:
        return "/" + "/".join(map(os.fsdecode, self.components(ino)))

    def names(self, inode: Inode) -> list[tuple[int, bytes]]:
        """Return the names of a file as (directory, name); of a directory its one."""
        known = self.links.get(inode.ino)
        if known is not None:
            return list(known)
        if self._leads(inode):
            return [(inode.parent, inode.name)]
        parent = self.inodes.get(inode.parent)
        entries = (parent.entries if parent is not None else None) or {}
        return [(inode.parent, name) for name, ino in entries.items() if ino == inode.ino]

    def _leads(self, inode: Inode) -> bool:
        """Whether its newest name still leads to the inode."""
        parent = self.inodes.get(inode.parent)
        return parent is not None and (parent.entries or {}).get(inode.name) == inode.ino

    def count_links(self) -> None:
        """Note the names of all inodes, after a replay; `apply` follows from then on."""
        self.links = {i.ino: {} for i in self.inodes.values() if i.nlink > 1 and not i.is_dir}
        for directory in self.inodes.values():
            for name, ino in (directory.entries or {}).items():
                inode = self.inodes[ino]
                if ino in self.links:
                    self.links[ino][directory.ino, name] = None
                elif not inode.is_dir:
                    inode.parent = directory.ino  # that of its newest name may be gone
                if inode.parent == directory.ino:
                    inode.name = name

    def below(self, inode: Inode, ancestor: int) -> bool:
        while inode.ino != ROOT:
            if inode.ino == ancestor:
                return True
            parent = self.inodes.get(inode.parent)
            if parent is None:
                return False
            inode = parent
        return ancestor == ROOT

    # Records

    def _known(self, ino: int) -> Inode | None:
        inode = self.inodes.get(ino)
        if inode is None and not self.lenient:
            raise ValueError(f"a record names inode {ino}, which does not exist")
        return inode

    def _set_inode(self, record: layout.InodeRecord) -> None:
        inode = self.inodes.get(record.ino)
        if inode is None:
            inode = self.inodes[record.ino] = Inode(record.ino)
            if stat.S_ISDIR(record.mode):
                inode.entries = {}
            self.next_ino = max(self.next_ino, record.ino + 1)
        elif stat.S_IFMT(inode.mode) != stat.S_IFMT(record.mode):
            raise ValueError(f"inode {record.ino} becomes another type of file")
        if inode.generation != record.generation and self.ledger is not None:
            self.ledger.regroup(inode, record.generation)
        if inode.is_dir and inode.parent != record.parent:
            self.version += 1
        (
            _, inode.mode, inode.uid, inode.gid, inode.nlink, inode.rdev, inode.atime_ns,
            inode.mtime_ns, inode.ctime_ns, inode.generation, inode.parent,
        ) = record  # fmt: skip

    def _set_size(self, record: layout.SizeRecord) -> None:
        inode = self._known(record.ino)
        if inode is None:
            return
        if record.size > _most(inode, layout.FILE_SIZE_MAX):
            raise ValueError(f"inode {record.ino} is no file and has {record.size} bytes")
        if record.size < inode.size:
            self.cut(inode, record.size)
        inode.size = inode.logged_size = record.size

    def trim(self) -> None:
        """A commit that was torn may have left blocks behind the end of its file: drop them."""
        for inode in self.inodes.values():
            self.cut(inode, inode.size)

    def name_all(self) -> None:
        """Name the inodes that a snapshot has only behind the names that lead to them."""
        for directory in self.inodes.values():
            entries = directory.entries or {}
            for name, ino in entries.items():
                child = self.inodes.get(ino)
                if child is None or child.parent != directory.ino:
                    continue
                if entries.get(child.name) != ino:
                    child.name = name

    def _set_content(self, record: layout.ContentRecord) -> None:
        inode = self._known(record.ino)
        if inode is not None:
            if len(record.data) > _most(inode, layout.INLINE_DATA_MAX):
                raise ValueError(f"inode {record.ino} has {len(record.data)} bytes in its record")
            self.drop(inode, 0, 1)
            inode.content = inode.known_content = record.data

    def _map_record(self, record: layout.MapRecord) -> None:
        inode = self._known(record.ino)
        if inode is None:
            return
        if not inode.is_file:
            raise ValueError(f"inode {record.ino} is no file and has blocks")
        if not 0 < record.blocks <= record.length - record.first <= layout.RUN_BLOCKS_MAX:
            raise ValueError(f"an extent of inode {record.ino} leaves its run")
        inline = record.length <= layout.INLINE_SUMS_MAX
        if len(record.sums) != 4 * (record.length if inline else 1):
            raise ValueError(f"a run of inode {record.ino} has not one checksum a block")
        run = self.run(record.zone, record.epoch, record.start, record.length, record.sums)
        self.map(inode, Extent(record.block, record.blocks, run, record.first))

    def _free(self, record: layout.FreeRecord) -> None:
        inode = self._known(record.ino)
        if inode is not None:
            self.drop(inode, 0, _FOREVER)
            self.drop_shadow(inode)
            self.fresh -= inode.fresh
            self.links.pop(record.ino, None)
            del self.inodes[record.ino]

    def _link(self, record: layout.LinkRecord) -> None:
        parent = self._known(record.parent)
        if parent is None:
            return
        if parent.entries is None:
            raise ValueError(f"inode {record.parent} has a name in it and is no directory")
        child = self.inodes.get(record.ino)
        place = record.parent, record.name
        self.links.get(parent.entries.get(record.name, 0), {}).pop(place, None)
        if child is not None and not child.is_dir:
            if record.ino not in self.links and self._leads(child):
                self.links[record.ino] = {(child.parent, child.name): None}
            if record.ino in self.links:
                self.links[record.ino][place] = None
        parent.entries[record.name] = record.ino
        if child is not None:
            child.name = record.name
            self.version += child.is_dir

    def _unlink(self, record: layout.UnlinkRecord) -> None:
        parent = self._known(record.parent)
        if parent is None:
            return
        if parent.entries is None or (record.name not in parent.entries and not self.lenient):
            raise ValueError(f"inode {record.parent} has no name {record.name!r} to remove")
        ino = parent.entries.pop(record.name, 0)
        self.links.get(ino, {}).pop((record.parent, record.name), None)

    def _set_xattr(self, record: layout.XattrRecord) -> None:
        inode = self._known(record.ino)
        if inode is not None:
            inode.xattrs = inode.xattrs or {}
            inode.xattrs[record.name] = record.value
            self.version += lifetimes.is_ours(record.name)

    def _remove_xattr(self, record: layout.XattrRemovedRecord) -> None:
        inode = self._known(record.ino)
        if inode is not None and inode.xattrs is not None:
            inode.xattrs.pop(record.name, None)
            inode.xattrs = inode.xattrs or None
            self.version += lifetimes.is_ours(record.name)

    def _set_zone(self, record: layout.ZoneRecord) -> None:
        self.zone_epochs[record.zone] = max(record.epoch, self.zone_epochs.get(record.zone, 0))

    def _set_generation(self, record: layout.GenerationRecord) -> None:
        if record.state < 0:
            self.generations.pop(record.generation, None)
        else:
            self.generations[record.generation] = record
        self.next_generation = max(self.next_generation, record.generation + 1)
        self.next_order = max(self.next_order, record.order + 1)

    def _set_counters(self, record: layout.CountersRecord) -> None:
        self.next_ino = max(self.next_ino, record.next_ino)
        self.next_generation = max(self.next_generation, record.next_generation)
        self.next_order = max(self.next_order, record.next_order)

    # Extents

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
        for extent in inode.shadow:
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
        self.drop(inode, end, _FOREVER)
        inode.content = inode.content[:size]
        inode.known_content = inode.known_content[:size]
        inode.dirty.cut(end)
        for extent in inode.shadow:
            if extent.end > end:
                self._lose(inode, extent.run, extent.end - max(end, extent.block))
        inode.shadow = [
            e.part(e.block, min(e.end, end)) for e in inode.shadow if e.block < end
        ]  # fmt: skip

    def drop_shadow(self, inode: Inode) -> None:
        """The journal is about to forget what `dirty` blocks were."""
        for extent in inode.shadow:
            self._lose(inode, extent.run, extent.blocks)
        inode.shadow = []

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

    # What the journal knows

    def collect(self, inode: Inode) -> Iterator[layout.Record]:
        """Yield the records that tell the journal all it does not know about the inode's bytes.

        Every run that the inode holds must be on the device, and flushed before the records.
        """
        for start, end in inode.dirty:
            for extent in inode.spans(start, end):
                yield map_record(inode.ino, extent)
            if start == 0:
                if inode.extents and inode.extents[0].block == 0:
                    inode.content = b""
                else:
                    yield layout.ContentRecord(inode.ino, inode.content)
        yield layout.SizeRecord(inode.ino, inode.size)
        inode.dirty = Spans()
        self.fresh -= inode.fresh
        inode.fresh = 0
        inode.known_content = inode.content
        inode.logged_size = inode.size
        self.drop_shadow(inode)

    def describe(self, inode: Inode) -> layout.InodeRecord:
        return layout.InodeRecord(
            inode.ino, inode.mode, inode.uid, inode.gid, inode.nlink, inode.rdev, inode.atime_ns,
            inode.mtime_ns, inode.ctime_ns, inode.generation, inode.parent,
        )  # fmt: skip

    def known(self, inode: Inode) -> Iterator[layout.Record]:
        """Yield the records that bring the inode back as the journal knows it now."""
        yield self.describe(inode)
        if inode.known_content:
            yield layout.ContentRecord(inode.ino, inode.known_content)
        yield layout.SizeRecord(inode.ino, inode.logged_size)
        for extent in inode.extents:
            for part in inode.dirty.outside(extent):
                yield map_record(inode.ino, part)
        for extent in inode.shadow:
            yield map_record(inode.ino, extent)
        for name, value in (inode.xattrs or {}).items():
            yield layout.XattrRecord(inode.ino, name, value)
        for name, ino in (inode.entries or {}).items():
            yield layout.LinkRecord(inode.ino, name, ino)


def _most(inode: Inode, of_file: int) -> int:
    """Return how many bytes an inode can have, which are `of_file` for a regular file."""
    if inode.is_file:
        return of_file
    return layout.SYMLINK_MAX if stat.S_ISLNK(inode.mode) else 0


_FOREVER = 1 << 62  # a block behind every file


def map_record(ino: int, extent: Extent) -> layout.MapRecord:
    run = extent.run
    assert run.buffer is None, "the journal names no run that is not on the device"
    return layout.MapRecord(
        ino, extent.block, extent.blocks, extent.first, run.zone, run.epoch, run.start, run.length,
        run.sums,
    )  # fmt: skip
