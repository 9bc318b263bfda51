"""Inodes, directories and attributes in memory; `apply` is the only way to change them.

The same `apply` serves a live call and the replay of the journal, so the two cannot drift apart.

Invariant: what lies in limbo has no names for anybody: `directory` is empty there. Only a tree that
is `fading` is whole: who has met its name a moment ago shall find all of it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator

from retainzfs import layout, lifetimes
from retainzfs.errors import FSError
from retainzfs.inodes import Extent, Inode, Run, Spans
from retainzfs.maps import FOREVER, Ledger, Maps

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


class Namespace(Maps):
    """All inodes of a volume. `name` is the target, for messages."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.zone_epochs: dict[int, int] = {}
        self.generations: dict[int, layout.GenerationRecord] = {}
        self.next_ino = ROOT + 1
        self.next_generation = 1
        self.next_order = 1
        self.version = 0  # of everything that a path or an inherited attribute depends on
        self.lenient = False  # replaying what a fuzzy snapshot may already have outlived
        # Names of files that have several, in the order in which they came.
        self.links: dict[int, dict[tuple[int, bytes], None]] = {}
        self._modes: dict[int, int] = {}  # each to itself
        self.fading: set[int] = set()  # tops in limbo whose names somebody may still have
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
        # There are many files: numbers that are equal shall be one object.
        inode.mode = self._modes.setdefault(record.mode, record.mode)
        if record.ctime_ns == record.mtime_ns:
            inode.ctime_ns = record.mtime_ns
        if record.atime_ns == record.mtime_ns:
            inode.atime_ns = record.mtime_ns
        parent = self.inodes.get(record.parent)
        if parent is not None:
            inode.parent = parent.ino

    def _set_size(self, record: layout.SizeRecord) -> None:
        inode = self._known(record.ino)
        if inode is None:
            return
        if record.size > _most(inode, layout.FILE_SIZE_MAX):
            raise ValueError(f"inode {record.ino} is no file and has {record.size} bytes")
        if record.size < max(inode.size, len(inode.content)):
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
            self.drop(inode, 0, FOREVER)
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
        parent.entries[record.name] = record.ino if child is None else child.ino
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
        for extent in inode.shadow or ():
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


def map_record(ino: int, extent: Extent) -> layout.MapRecord:
    run = extent.run
    assert run.buffer is None, "the journal names no run that is not on the device"
    return layout.MapRecord(
        ino, extent.block, extent.blocks, extent.first, run.zone, run.epoch, run.start, run.length,
        run.sums,
    )  # fmt: skip
