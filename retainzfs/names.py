"""Operations on names: create, link, remove, rename."""

from __future__ import annotations

import errno
import logging
import os
import stat
from collections.abc import Iterator

from retainzfs import layout, lifetimes
from retainzfs.core import GROWTH, RESERVE
from retainzfs.errors import RetainzError
from retainzfs.lifetimes import FileClass
from retainzfs.namespace import LIMBO, ROOT, FSError, Inode
from retainzfs.removal import Removal
from retainzfs.streams import State

RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2
LINK_MAX = 65000

log = logging.getLogger(__name__)


class Names(Removal):
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
        held = self.retention.unfinished_by(parent, name)
        self.committer.log_each(self.retention.incomplete(held, "it is called unfinished"))
        return inode

    async def link(self, ino: int, parent: int, name: bytes) -> Inode:
        await self._admit(GROWTH)
        self._new_name(parent, name)
        await self.inspect(self.namespace.get(ino), parent, name)
        directory = self._new_name(parent, name)
        inode = self.namespace.get(ino)
        if inode.is_dir:
            raise FSError(errno.EPERM, self.namespace.path(ino))
        if inode.nlink == 0:
            raise FSError(errno.ENOENT, f"inode {ino}")
        if inode.nlink >= LINK_MAX:
            raise FSError(errno.EMLINK, self.namespace.path(ino))
        now = self.options.wall_ns()
        was = self.namespace.generations.get(inode.generation)
        generation, born = self._linked(inode, (parent, name))
        described = self.namespace.describe(inode)
        self.committer.log(
            *born,
            layout.LinkRecord(parent, name, ino),
            described._replace(
                nlink=inode.nlink + 1, ctime_ns=now, generation=generation, parent=parent
            ),
            self._touched(directory, now),
        )
        for record in born:
            if isinstance(record, layout.GenerationRecord):
                self._begun(record.generation)
        self._doubtful(inode)
        known = self.retention.known(parent, name)
        whole = (State.COMPLETE, State.PRESUMED)
        if was is None or was.state in whole or was.generation == known:
            self._arrived(inode, (parent, name))
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
            *self._unlinked(inode, now, (parent, name)),
        )
        held = self.retention.unfinished_by(parent, name)
        if held in self.retention.claimed:
            self.completed(held)

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
            *self._unlinked(inode, now, (parent, name)),
        )

    def entries(self, ino: int) -> list[tuple[bytes, int]]:
        """Return the names of a directory, completion markers first.

        `rm -r` deletes in this order; a crash in its middle must not leave what looks complete.
        """
        names = [
            item
            for item in self.namespace.directory(ino).items()
            if ino != ROOT or item[0] != LIMBO
        ]
        names.sort(key=lambda item: not lifetimes.is_marker(item[0]))
        return names

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
        await self.inspect(self._ends(*ends)[0], new_parent, new_name)
        source, target = self._ends(*ends)  # others had their turn
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
        if self.namespace.removed(self.namespace.get(new_parent)):
            raise FSError(errno.ENOENT, where, "its directory was removed")
        if flags & ~(RENAME_NOREPLACE | RENAME_EXCHANGE):
            raise FSError(errno.EINVAL, where, f"unknown rename flags {flags:#x}")
        if len(new_name) > layout.NAME_MAX:
            raise FSError(errno.ENAMETOOLONG, where)
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
            records += self._unlinked(target, now, new)
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
        if self.namespace.removed(directory):
            raise FSError(errno.ENOENT, os.fsdecode(name), "its directory was removed")
        if name in entries:
            raise FSError(errno.EEXIST, os.fsdecode(name))
        return directory

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
            files = [inode for inode, *_ in self._files(source, *new) if inode.nlink == 1]
            generations = {inode.generation for inode in files} | {self.retention.known(*old)}
            for generation in generations - {0}:
                self.completed(generation)
            return
        for inode, parent, name in self._files(source, *new):
            if self.retention.owns(inode):
                continue
            if inode.nlink > 1:
                generation, born = self._linked(inode, (parent, name))
                described = self.namespace.describe(inode)
                self.committer.log(*born, described._replace(generation=generation))
                generation, left = self._left_with(inode, ())
                self.committer.log(described._replace(generation=generation), *left)
                self._doubtful(inode)
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
            self._doubtful(inode)
        self._arrived(source, new, renamed=was is not None and not was.temporary)

    def _doubtful(self, inode: Inode) -> None:
        """A file came into generations: what speaks against it speaks against them."""
        for generation in self.retention.generations_of(inode) if inode.doubt else ():
            self.committer.log_each(self.retention.incomplete(generation, inode.doubt))

    def _arrived(self, inode: Inode, place: tuple[int, bytes], *, renamed: bool = False) -> None:
        """What was written elsewhere, or under a temporary name, has its final one: it is whole.
        Not what has only been `renamed` from one final name to another, but for a marker."""
        match = self.retention.context(*place).match
        if match is None or match.temporary:
            return
        itself = match.depth == len(self.namespace.components(place[0]))
        if (itself and not renamed) or (inode.is_file and self.retention.marked(*place)):
            self.completed(self.retention.known(*place))

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
                self._reaping.add(generation)
                self.nursery.start_soon(self._reap, generation)

    async def _reap(self, generation: int) -> None:
        """Delete what the stream keeps no longer, once the generation that retires it is durable.

        An open file keeps its bytes until it is closed.
        """
        try:
            due = self.retention.overdue(generation)  # by what is durable behind the commit
            await self.committer.commit()
            await self._ask_for_best(generation)
            # Asked anew each time: meanwhile a name may be another's, or a generation kept.
            while (first := next(self._retired(generation, due), None)) is not None:
                await self._reap_one(*first)
            await self.clear()
        except RetainzError as error:
            log.warning("reaping is left to the next save: %s", error)
        finally:
            self._reaping.discard(generation)
            self.lanes.changed()

    async def _reap_one(self, retired: int, names: list[tuple[int, bytes]]) -> None:
        """Remove a generation. Nothing of it is freed before its names are forgotten everywhere."""
        fading = self.namespace.fading
        tops = {self.namespace.child(parent, name).ino for parent, name in names}
        fading |= tops
        try:
            for parent, name in names:
                log.info("reaping %s/%s", self.namespace.path(parent), os.fsdecode(name))
            self.remove_trees(names, *self.retention.retire(retired))
            await self.reaped()
        finally:
            fading -= tops

    async def _ask_for_best(self, generation: int) -> None:
        """Read what a complete generation's trainer says is the best one of its stream."""
        if generation not in self.namespace.generations:
            return
        for parent, name in self.retention.names_of(generation):
            top = self.namespace.child(parent, name)
            ino = (top.entries or {}).get(lifetimes.markers.TRAINER_STATE)
            if ino is None:
                continue
            head = await self.reader.read(
                self.namespace.get(ino), 0, lifetimes.markers.TRACKER_LENGTH_MAX
            )
            best = lifetimes.markers.best(bytes(head))
            if best is None:
                self.retention.best.pop(parent, None)
            else:
                self.retention.best[parent] = best

    def _retired(
        self, generation: int, due: frozenset[int]
    ) -> Iterator[tuple[int, list[tuple[int, bytes]]]]:
        """Yield (generation, its names) of what the stream keeps no longer."""
        for retired in self.retention.reapable(generation):
            names = self.retention.names_of(retired)
            if retired in due and names:
                yield retired, names

    async def inspect(self, inode: Inode, parent: int, name: bytes) -> None:
        """A file is about to get a name; whoever can read it overrides this."""

    async def reaped(self) -> None:
        """Names are gone without anybody having asked; whoever answers for them overrides this."""

    def reaps(self, directory: int) -> bool:
        """Whether names may go from a directory without anybody having asked."""
        return self.retention.policy_of(self.namespace.get(directory)).reap
