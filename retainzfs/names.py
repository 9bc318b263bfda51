"""Operations on names: create, link, remove, rename."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterator

from retainzfs import layout, lifetimes
from retainzfs.core import GROWTH, RESERVE, Core
from retainzfs.errors import RetainzError
from retainzfs.lifetimes import FileClass
from retainzfs.namespace import FSError, Inode
from retainzfs.streams import State

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
LINK_MAX = 65000
TREE_MAX = 100  # names that are removed as one operation; their records fit into any batch


log = logging.getLogger(__name__)


class Names(Core):
    """Operations on names; `Volume` adds those on bytes and attributes."""

    async def make(
        self,
        parent: int,
        name: bytes,
        mode: int,
        uid: int,
        gid: int,
        rdev: int = 0,
        target: bytes = b"",
    ) -> Inode:
        """Create a file, directory, symbolic link (with `target`), fifo, socket or device node."""
        await self._admit(GROWTH)
        directory = self._new_name(parent, name)
        if len(target) > layout.SYMLINK_MAX:
            raise FSError(errno.ENAMETOOLONG, os.fsdecode(name))
        now = self.options.wall_ns()
        if directory.mode & stat.S_ISGID:
            gid = directory.gid
            mode |= stat.S_ISGID if stat.S_ISDIR(mode) else 0
        ino = self.namespace.next_ino
        is_dir = stat.S_ISDIR(mode)
        generation = 0
        records: list[layout.Record] = []
        if stat.S_ISREG(mode):
            generation, records = self.retention.assign(parent, name)
        begins = generation not in self.namespace.generations
        records += [
            layout.InodeRecord(
                ino, mode, uid, gid, 2 if is_dir else 1, rdev, now, now, now, generation, parent
            ),
            layout.LinkRecord(parent, name, ino),
            self._touched(directory, now, links=int(is_dir)),
        ]
        if target:
            records += [layout.ContentRecord(ino, target), layout.SizeRecord(ino, len(target))]
        self.committer.log(*records)
        inode = self.namespace.get(ino)
        inode.judged = -1  # nobody has closed it yet
        self.retention.joined(inode)
        if not generation:
            self.retention.sighted(parent, name)
        elif begins:
            self._begun(generation)
        return inode

    async def link(self, ino: int, parent: int, name: bytes) -> Inode:
        await self._admit(GROWTH)
        directory = self._new_name(parent, name)
        inode = self.namespace.get(ino)
        if inode.is_dir:
            raise FSError(errno.EPERM, self.namespace.path(ino))
        if inode.nlink == 0:
            raise FSError(errno.ENOENT, f"inode {ino}")
        if inode.nlink >= LINK_MAX:
            raise FSError(errno.EMLINK, self.namespace.path(ino))
        now = self.options.wall_ns()
        self.committer.log(
            self.namespace.describe(inode)._replace(
                nlink=inode.nlink + 1, ctime_ns=now, parent=parent
            ),
            layout.LinkRecord(parent, name, ino),
            self._touched(directory, now),
        )
        return inode

    async def unlink(self, parent: int, name: bytes) -> None:
        await self._admit()
        inode = self.namespace.child(parent, name)
        if inode.is_dir:
            raise FSError(errno.EISDIR, self.namespace.path(inode.ino))
        now = self.options.wall_ns()
        self.committer.log_each(self.retention.vanished(parent, name))
        self.committer.log(
            *self.retention.unmarked(parent, name),
            layout.UnlinkRecord(parent, name),
            self._touched(self.namespace.get(parent), now),
            *self._unlinked(inode, now),
        )

    async def rmdir(self, parent: int, name: bytes) -> None:
        await self._admit()
        inode = self.namespace.child(parent, name)
        if not inode.is_dir:
            raise FSError(errno.ENOTDIR, self.namespace.path(inode.ino))
        if inode.entries:
            raise FSError(errno.ENOTEMPTY, self.namespace.path(inode.ino))
        now = self.options.wall_ns()
        self.committer.log_each(self.retention.vanished(parent, name))
        self.committer.log(
            layout.UnlinkRecord(parent, name),
            self._touched(self.namespace.get(parent), now, links=-1),
            *self._unlinked(inode, now),
        )

    def entries(self, ino: int) -> list[tuple[bytes, int]]:
        """Return the names of a directory, completion markers first.

        `rm -r` deletes in this order; a crash in its middle must not leave what looks complete.
        """
        names = list(self.namespace.directory(ino).items())
        names.sort(key=lambda item: not lifetimes.is_marker(item[0]))
        return names

    def remove_tree(self, parent: int, name: bytes) -> None:
        """Remove a name with everything below it, as one operation: a reader, or a crash, finds
        the whole tree or none of it. Only of a tree that is too large for one batch parts go
        first, completion markers before all."""
        top = self.namespace.child(parent, name)
        below = list(self._below(top))
        if len(below) > TREE_MAX:
            below.reverse()  # what is in a directory before the directory
            below.sort(key=lambda found: not (found[0].is_file and lifetimes.is_marker(found[2])))
            for part in below:
                self._remove([part])
            below = []
        self._remove([(top, parent, name), *below])

    def _remove(self, found: list[tuple[Inode, int, bytes]]) -> None:
        """Remove names, and what has no other, as one operation; the first one holds the rest."""
        now = self.options.wall_ns()
        top, parent, name = found[0]
        records: list[layout.Record] = [
            layout.UnlinkRecord(parent, name),
            self._touched(self.namespace.get(parent), now, links=-int(top.is_dir)),
        ]
        # A directory that somebody has open stays; nobody finds in it what is gone.
        records += [
            layout.UnlinkRecord(directory, below)
            for _, directory, below in found[1:]
            if self.namespace.get(directory).handles
        ]
        names: dict[int, int] = {}
        for inode, _, _ in found:
            names[inode.ino] = names.get(inode.ino, 0) + 1
        for ino, count in names.items():
            records += self._unlinked(self.namespace.get(ino), now, count)
        self.committer.log(*records)

    def _below(self, top: Inode) -> Iterator[tuple[Inode, int, bytes]]:
        """Yield (inode, directory, name) for every name below, a directory before its names."""
        waiting = [top]
        while waiting:
            directory = waiting.pop()
            for name, ino in list((directory.entries or {}).items()):
                inode = self.namespace.get(ino)
                yield inode, directory.ino, name
                if inode.entries:
                    waiting.append(inode)

    async def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int = 0
    ) -> None:
        """Rename atomically. Durable on return inside streams and in class output; elsewhere the
        bytes of the source reach the log before the name does."""
        await self._admit(RESERVE if len(new_name) > len(name) else None)
        ends = (parent, name, new_parent, new_name, flags)
        source, target = self._ends(*ends)
        durable = self.syncs(source) or self._syncs_at(new_parent, new_name)
        exchange = bool(flags & RENAME_EXCHANGE)
        below = self._dirty_below(source, target if exchange else None)
        if durable and source is not target and below:
            await self.committer.commit(below)
            source, target = self._ends(*ends)  # others had their turn
        if source is target:
            return
        for inode in self._dirty_below(source, target if exchange else None):
            self.committer.order(inode)
        if flags & RENAME_EXCHANGE:
            assert target is not None, "an exchange was checked to have both names"
            self._exchange(source, target, (parent, name), (new_parent, new_name))
        else:
            self._move(source, target, (parent, name), (new_parent, new_name))
        self._regroup(source, (parent, name), (new_parent, new_name))
        if flags & RENAME_EXCHANGE and target is not None:
            self._regroup(target, (new_parent, new_name), (parent, name))
        if durable:
            await self.committer.commit()

    def _ends(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int
    ) -> tuple[Inode, Inode | None]:
        """Return what a rename moves and what it meets. Raises FSError when it may not."""
        source = self.namespace.child(parent, name)
        ino = self.namespace.directory(new_parent).get(new_name)
        target = self.namespace.get(ino) if ino is not None else None
        self._check_rename(source, target, parent, new_parent, new_name, flags)
        return source, target

    def _check_rename(
        self,
        source: Inode,
        target: Inode | None,
        parent: int,
        new_parent: int,
        new_name: bytes,
        flags: int,
    ) -> None:
        where = os.fsdecode(new_name)
        if not self.namespace.get(new_parent).nlink:
            raise FSError(errno.ENOENT, where, "its directory was removed")
        if flags & ~(RENAME_NOREPLACE | RENAME_EXCHANGE):
            raise FSError(errno.EINVAL, where, f"unknown rename flags {flags:#x}")
        if len(new_name) > layout.NAME_MAX:
            raise FSError(errno.ENAMETOOLONG, where)
        if self.namespace.get(new_parent).nlink == 0:
            raise FSError(errno.ENOENT, where, "its directory was removed")
        if flags & RENAME_NOREPLACE and target is not None:
            raise FSError(errno.EEXIST, where)
        if flags & RENAME_EXCHANGE and target is None:
            raise FSError(errno.ENOENT, where)
        if source.is_dir and self.namespace.below(self.namespace.get(new_parent), source.ino):
            raise FSError(errno.EINVAL, where, "a directory cannot move below itself")
        if flags & RENAME_EXCHANGE and target is not None and target.is_dir:
            if self.namespace.below(self.namespace.get(parent), target.ino):
                raise FSError(errno.EINVAL, where, "a directory cannot move below itself")
            return
        if target is None or flags & RENAME_EXCHANGE or source is target:
            return
        if source.is_dir and not target.is_dir:
            raise FSError(errno.ENOTDIR, where)
        if target.is_dir and not source.is_dir:
            raise FSError(errno.EISDIR, where)
        if target.entries:
            raise FSError(errno.ENOTEMPTY, where)

    def _move(
        self,
        source: Inode,
        target: Inode | None,
        old: tuple[int, bytes],
        new: tuple[int, bytes],
    ) -> None:
        now = self.options.wall_ns()
        records: list[layout.Record] = [layout.UnlinkRecord(*old)]
        records.append(layout.LinkRecord(*new, source.ino))
        gone = int(target is not None and target.is_dir)
        moved = int(source.is_dir)
        old_parent, new_parent = self.namespace.get(old[0]), self.namespace.get(new[0])
        if old_parent is new_parent:
            records.append(self._touched(old_parent, now, links=-gone))
        else:
            records.append(self._touched(old_parent, now, links=-moved))
            records.append(self._touched(new_parent, now, links=moved - gone))
        described = self.namespace.describe(source)
        records.append(described._replace(parent=new[0], ctime_ns=now))
        if target is not None:
            records += self._unlinked(target, now)
        self.committer.log(*records)

    def _exchange(
        self, one: Inode, other: Inode, at: tuple[int, bytes], there: tuple[int, bytes]
    ) -> None:
        now = self.options.wall_ns()
        links = int(other.is_dir) - int(one.is_dir)
        first, second = self.namespace.get(at[0]), self.namespace.get(there[0])
        records: list[layout.Record] = [
            layout.LinkRecord(*at, other.ino),
            layout.LinkRecord(*there, one.ino),
            self.namespace.describe(one)._replace(parent=there[0], ctime_ns=now),
            self.namespace.describe(other)._replace(parent=at[0], ctime_ns=now),
        ]
        if first is second:
            records.append(self._touched(first, now))
        else:
            records.append(self._touched(first, now, links=links))
            records.append(self._touched(second, now, links=-links))
        self.committer.log(*records)
        self.namespace.version += 1

    # Parts of an operation

    def _new_name(self, parent: int, name: bytes) -> Inode:
        """Return the directory that is about to get a new name."""
        if len(name) > layout.NAME_MAX:
            raise FSError(errno.ENAMETOOLONG, os.fsdecode(name))
        entries = self.namespace.directory(parent)
        directory = self.namespace.get(parent)
        if directory.nlink == 0:
            raise FSError(errno.ENOENT, os.fsdecode(name), "its directory was removed")
        if name in entries:
            raise FSError(errno.EEXIST, os.fsdecode(name))
        return directory

    def _touched(self, directory: Inode, now_ns: int, links: int = 0) -> layout.InodeRecord:
        record = self.namespace.describe(directory)
        return record._replace(mtime_ns=now_ns, ctime_ns=now_ns, nlink=record.nlink + links)

    def _unlinked(self, inode: Inode, now_ns: int, names: int = 1) -> list[layout.Record]:
        """Return the records for a name less; the last one takes the bytes along, unless the
        inode is in use."""
        left = 0 if inode.is_dir else inode.nlink - names
        if inode.is_dir:
            self.retention.forget(inode)
        record = self.namespace.describe(inode)._replace(nlink=left, ctime_ns=now_ns)
        records: list[layout.Record] = [record]
        if left == 0 and not inode.in_use:
            self.committer.forget(inode)
            records.append(layout.FreeRecord(inode.ino))
        if left == 0:
            records += self.left(inode)
        return records

    def syncs(self, inode: Inode) -> bool:
        """Whether close and rename of the inode return only when it is durable."""
        within = bool(inode.generation) or inode.parent in self.retention.streams
        if inode.is_dir:
            within = self.retention.context(inode.ino).match is not None
        return self._rule(self.retention.policy_of(inode), within)

    def _syncs_at(self, parent: int, name: bytes) -> bool:
        context = self.retention.context(parent, name)
        within = context.match is not None or parent in self.retention.streams
        return self._rule(context.policy, within)

    def _rule(self, policy: lifetimes.Policy, within_stream: bool) -> bool:
        rule = self.options.commit if policy.commit is None else policy.commit
        if rule != "fsync":
            return rule == "close"
        if policy.file_class is FileClass.CHECKPOINT:
            return within_stream
        return policy.file_class is FileClass.OUTPUT

    def _dirty_below(self, *trees: Inode | None) -> list[Inode]:
        """Return the dirty inodes of what is about to get a new name."""
        dirty = self.committer.dirty
        found: dict[int, Inode] = {}
        for top in trees:
            if top is not None and top.is_dir:
                found |= {i.ino: i for i in dirty.values() if self.namespace.below(i, top.ino)}
            elif top is not None and top.ino in dirty:
                found[top.ino] = top
        return list(found.values())

    # Generations follow names

    def _regroup(self, source: Inode, old: tuple[int, bytes], new: tuple[int, bytes]) -> None:
        """The files of a moved tree belong where their new names say."""
        was = self.retention.context(*old).match
        if was is not None and was.temporary and was.final == new[1] and old[0] == new[0]:
            # Even if the final name alone would not be recognised.
            for generation in {i.generation for i, *_ in self._files(source, *new)} - {0}:
                self.completed(generation)
            return
        for inode, parent, name in self._files(source, *new):
            if self.retention.owns(inode):
                continue
            generation, records = self.retention.assign(parent, name, again=False)
            if generation == inode.generation:
                continue
            begins = generation not in self.namespace.generations
            left = self.left(inode)
            described = self.namespace.describe(inode)._replace(generation=generation)
            self.committer.log(*records, described, *left)
            self.retention.joined(inode)
            if generation and begins:
                self._begun(generation)
        now = self.retention.context(*new).match
        if now is None or now.temporary:
            return
        itself = now.depth == len(self.namespace.components(new[0]))
        arrived = itself and (was is None or was.temporary)
        if arrived or (source.is_file and self.retention.marked(*new)):
            self.completed(self.retention.known(*new))

    def _files(self, inode: Inode, parent: int, name: bytes) -> Iterator[tuple[Inode, int, bytes]]:
        found = ((inode, parent, name), *self._below(inode))
        return (one for one in found if one[0].is_file)

    def _begun(self, generation: int) -> None:
        """A save has begun, and may end those before it."""
        self.committer.log_each(self.retention.deserted(generation))
        self.presume(generation)

    def presume(self, generation: int) -> None:
        """Take for complete what a mount without markers may."""
        for older in list(self.retention.presumable(generation)):
            self.completed(older, State.PRESUMED)

    def completed(self, generation: int, state: State = State.COMPLETE) -> None:
        """Evidence says that a generation is complete. If its files do not speak against that, it
        counts; the next round makes that durable, no sooner than the bytes of its files: a crash
        must not leave a torn one that counts."""
        records = self.retention.complete(generation, state)
        if records:
            for ino in self.retention.members.get(generation, set()) & self.committer.dirty.keys():
                self.committer.order(self.namespace.get(ino))
            self.committer.log_each(records)
        record = self.namespace.generations.get(generation)
        if records and record is not None and record.state == state:
            self.committer.log_each(self.retention.overtaken(generation))
            self.lanes.close(generation)
            if self.retention.reapable(generation):
                self.nursery.start_soon(self._reap, generation)

    async def _reap(self, generation: int) -> None:
        """Delete what the stream keeps no longer, once the generation that retires it is durable.

        An open file keeps its bytes until it is closed.
        """
        try:
            await self.committer.commit()
            due = frozenset(self.retention.reapable(generation))
            # Asked anew each time: meanwhile a name may be another's, or a generation kept.
            while (first := next(self._retired(generation, due), None)) is not None:
                parent, name = first
                log.info("reaping %s/%s", self.namespace.path(parent), os.fsdecode(name))
                self.remove_tree(parent, name)
                await self.reaped(parent, name)
        except RetainzError as error:
            log.warning("reaping is left to the next save: %s", error)

    def _retired(self, generation: int, due: frozenset[int]) -> Iterator[tuple[int, bytes]]:
        for retired in self.retention.reapable(generation):
            if retired in due:
                self.retention.reaping.add(retired)
                yield from self.retention.names_of(retired)

    async def reaped(self, parent: int, name: bytes) -> None:
        """A name is gone without anybody having asked; whoever caches names overrides this."""
