"""The volume: POSIX operations over the namespace, the stream and the journal. No FUSE here.

Concurrency contract
- One trio task at a time runs; code between two awaits is atomic. An operation on names or
  attributes checks, changes the namespace and queues its records in one such piece. One that must
  await in its middle (a durable rename, reaping, judging a closed file) looks again afterwards:
  names may lead elsewhere by then, and a generation may be another's.
- An inode lives while it has a name, an open handle, or a lookup that the kernel remembers; who
  awaits in the middle of changing one holds it open himself (`kept`).
- The bytes and the size of an inode change only under its lock, which a write, a truncation,
  collection and the round that makes them durable hold across awaits. Nobody else sees a
  difference when collection moves bytes. While a writer waits for the lock, or for room, anything
  may change but that the inode is there: size, bytes, name, generation. What depends on these is
  looked up under the lock.
- A write is atomic block by block, not as a whole: it becomes visible from its first block to its
  last, and the size grows along. Appends are put in order by the kernel.
- Readers take no lock. In one piece a read takes the size, copies what is staged, and pins the
  zones of the rest. So each block of it is what the file held at some time of the read, whatever
  is written, truncated, removed or moved meanwhile; two blocks may be of different times.
- Who waits for what, from the outside in: collection's lock, a round, inodes' locks, staging
  memory, the lanes' lock, the resets' lock, a zone's turn. The holder of one waits only for those
  behind it. Only the round holds several inodes' locks, and there is one round at a time. A zone's
  turn lets one command at a time to the zone: append, close, finish, reset.

Ordering invariants
- An acknowledged `fsync`, durable `close` or durable `rename` is in the log, behind the flush of
  the bytes that its records name.
- A zone is reset after every record that freed its bytes is durable.
- The first failure of the journal is final: nothing is acknowledged behind it.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from typing import Any

from retainzfs import attributes, errors, generations, layout, lifetimes, observe, scrub
from retainzfs.core import GROWTH, RESERVE, Options
from retainzfs.inodes import Spans
from retainzfs.layout import BLOCK, stored
from retainzfs.names import RENAME_EXCHANGE, RENAME_NOREPLACE, Names
from retainzfs.namespace import ROOT, FSError, Inode

__all__ = [
    "RENAME_EXCHANGE",
    "RENAME_NOREPLACE",
    "ROOT",
    "FSError",
    "Inode",
    "Options",
    "StatFs",
    "Volume",
]

WRITE_SLACK = 2 * BLOCK  # a write touches at most a partial block at either end
CAPABILITY = b"security.capability"
TIME_NS_MIN, TIME_NS_MAX = -(1 << 63), (1 << 63) - 1  # years 1677 to 2262, as the record holds
TRACKER_READ = lifetimes.markers.TRACKER_LENGTH_MAX + 1  # bytes of a tracker that are looked at
# Runs that are cut short, at a drain or at a zone's end, have trailers too.
PROMISE_SLACK = 16 * BLOCK
INODE_COST = 256  # bytes of metadata that a file takes on average, for `statfs`
RELATIME_NS = 24 * 3600 * 10**9


@dataclass(frozen=True, slots=True)
class StatFs:
    """Counts in blocks of `block_size` bytes; `free` has dead bytes in it, `available` not."""

    block_size: int
    blocks: int
    free: int
    available: int
    files: int
    files_free: int
    name_max: int = layout.NAME_MAX


def _alive() -> bool:
    return False  # has not died


def _ill_closed(inode: Inode, *, died: Callable[[], bool]) -> str:
    """Return why the bytes of a closed file may not be all, whatever they are; "" if nothing."""
    if died():
        return "the process that was writing it was killed, or failed, with the file open"
    return "a write to it failed" if inode.error is not None or inode.missing else ""


class Volume(Names):
    """A mounted volume; made by `mounted`."""

    # Looking

    def inode(self, ino: int) -> Inode:
        return self.namespace.get(ino)

    def lookup(self, parent: int, name: bytes) -> Inode:
        if len(name) > layout.NAME_MAX:
            raise FSError(errno.ENAMETOOLONG, os.fsdecode(name))
        if name == b".":
            return self.namespace.get(parent)
        if name == b"..":
            return self.namespace.get(self.namespace.get(parent).parent)
        ino = self.namespace.directory(parent).get(name)
        if ino is None:
            raise FSError(errno.ENOENT, os.fsdecode(name))
        return self.namespace.get(ino)

    def parent(self, ino: int) -> int:
        return self.namespace.get(ino).parent

    def path(self, ino: int) -> str:
        return self.namespace.path(ino)

    def statfs(self) -> StatFs:
        totals = self.table.totals
        capacity = sum(totals)
        free = capacity - totals.live - totals.pending - totals.lost
        room = max(0, self.lanes.spare())
        usable = (room - room // layout.RUN_BLOCKS_MAX) * BLOCK - PROMISE_SLACK
        files = len(self.namespace.inodes)
        files_free = self.committer.growth_left(GROWTH) // INODE_COST
        return StatFs(
            BLOCK,
            capacity // BLOCK,
            free // BLOCK,
            max(0, min(usable, free)) // BLOCK,
            files + files_free,
            files_free,
        )

    # Handles and bytes

    async def read(self, ino: int, offset: int, size: int) -> memoryview:
        """Return up to `size` bytes. Raises FSError(EIO) where the stored bytes are damaged."""
        inode = self.namespace.get(ino)
        now = self.options.wall_ns()
        newest = max(inode.mtime_ns, inode.ctime_ns)
        if (inode.atime_ns <= newest or now - inode.atime_ns > RELATIME_NS) and not self.failed:
            self.committer.log(self.namespace.describe(inode)._replace(atime_ns=now))
        return await self.reader.read(inode, offset, size)

    async def write(self, ino: int, offset: int, data: bytes | bytearray | memoryview) -> int:
        """Stage bytes; they are durable after `fsync`, or `flush` where the class says so.

        Raises NoSpace before anything of this call is staged.
        """
        self._check()
        view = memoryview(data)
        if offset + len(view) > layout.FILE_SIZE_MAX:
            raise FSError(errno.EFBIG, self.path(ino))
        inode = self.namespace.get(ino)
        if inode.error is not None:
            raise inode.error.with_traceback(None)
        if not view:
            return 0
        with self.kept(inode), self._missed(inode, offset, len(view)), self.compaction.paused():
            end = offset + len(view)
            async with self._locked_with_room(inode, len(view) + WRITE_SLACK, end):
                inode.mtime_ns = inode.ctime_ns = self.options.wall_ns()
                if inode.mode & (stat.S_ISUID | stat.S_ISGID) or inode.xattrs:
                    self._drop_privileges(inode)
                self._change(inode)
                size = inode.size
                try:
                    await self.stream.write(inode, offset, view, self.lane(inode))
                finally:
                    inode.writes += 1  # a copy made meanwhile is neither the old nor the new
                if inode.size > size and inode.ends_in_hole:
                    self.retention.announce(inode, inode.size)
        self.logical += len(view)
        return len(view)

    @contextmanager
    def _missed(self, inode: Inode, offset: int, length: int) -> Iterator[None]:
        """Note the bytes of a write that fails, until a later one brings them."""
        try:
            yield
        except errors.RetainzError:
            inode.missing = inode.missing or Spans()
            inode.missing.add(offset, offset + length)
            raise
        if inode.missing:
            inode.missing.remove(offset, offset + length)

    @asynccontextmanager
    async def _locked_with_room(
        self, inode: Inode, nbytes: int, end: int = 0
    ) -> AsyncIterator[None]:
        """Hold the inode's lock, with room for so many bytes to be staged, up to byte `end` of the
        file; 0: it gets no more data. What fits into the inode's record needs no room: the marker
        that completes a save is not refused because the save has filled the device. Raises NoSpace.
        """
        lock = self.stream.stage(inode).lock
        await self._admit(GROWTH)
        lane = self.lane(inode)
        if lane.key > 0 and end and not inode.stays_inline(end):
            await self.admission.admit(lane, max(1, nbytes - WRITE_SLACK))
        tried = False
        while True:
            await lock.acquire()
            lane = self.lane(inode)  # a rename may have changed it
            kind = self.lanes.hint(lane).kind
            if end and inode.stays_inline(end):
                nbytes = 0
                break
            placed = tried or lane.planned  # one that is planned has its place
            if self.lanes.fits(kind, nbytes) or (placed and self.lanes.holds(nbytes)):
                break
            lock.release()
            await self.reclaim.make_room(kind, nbytes)
            tried = True
        room = stored(nbytes) if nbytes else 0
        self.lanes.admitted[kind] += room  # staging awaits; nobody else may count on this
        try:
            yield
        finally:
            self.lanes.admitted[kind] -= room
            lock.release()

    def _change(self, inode: Inode) -> None:
        """The bytes of a file change; the caller holds its lock."""
        self.committer.log_each(self.retention.reopened(inode))
        inode.writes += 1
        if inode.ino in self.committer.dirty:
            return
        commit = self.retention.policy_of(inode).commit
        self.committer.touch(inode, commit if isinstance(commit, float) else None)

    def _drop_privileges(self, inode: Inode) -> None:
        """A write takes set-user-ID and set-group-ID bits and file capabilities away; past the
        page cache that is ours to do."""
        inode.mode &= ~stat.S_ISUID
        if inode.mode & stat.S_IXGRP:
            inode.mode &= ~stat.S_ISGID
        if CAPABILITY in (inode.xattrs or {}):
            self.committer.log(layout.XattrRemovedRecord(inode.ino, CAPABILITY))

    async def flush(
        self, ino: int, *, wrote: bool = True, died: Callable[[], bool] = _alive
    ) -> None:
        """A descriptor was closed: durable where the class says so, and perhaps the end of a save.

        `wrote`: it was one that changed the file; a reader's close says nothing about a save.
        `died` tells, when asked, whether nobody closed it because its process came to a bad end. A
        clean inode costs nothing. Raises the error of a write that failed in the background.
        """
        inode = self.namespace.inodes.get(ino)
        if inode is None:
            return
        if inode.error is not None:
            raise inode.error.with_traceback(None)
        if not wrote:
            return
        if inode.judged != inode.writes:
            await self._judge(inode, died=died)
        if inode.nlink and self.syncs(inode):
            await self.fsync(ino)

    async def fsync(self, ino: int, datasync: bool = False) -> None:
        """Return when the inode and its bytes are durable; its name too, as on ext4."""
        inode = self.namespace.inodes.get(ino)
        if inode is None:
            return
        self._check()
        if not self.committer.clean(inode):
            with self.compaction.paused():
                await self.committer.commit([inode])
        if inode.error is not None:
            raise inode.error.with_traceback(None)

    async def syncfs(self) -> None:
        self._check()
        dirty = list(self.committer.dirty.values())
        with self.compaction.paused():
            await self.committer.commit(dirty)
        for inode in dirty:
            if inode.error is not None:
                raise inode.error.with_traceback(None)

    async def _judge(self, inode: Inode, *, died: Callable[[], bool]) -> None:
        """Look for the evidence of completeness that a close gives, and for what speaks against."""
        writes = inode.writes
        if inode.nlink == 0 or not inode.is_file:
            return
        names = self.namespace.components(inode.ino)
        match = self.retention.context(inode.parent, names[-1]).match
        completes = False
        doubt = _ill_closed(inode, died=died)
        if not inode.generation:
            inode.judged, inode.doubt = writes, doubt  # it may yet get the name of one
            await self._follow_tracker(inode)
            return
        if doubt:
            pass
        elif match is None or match.depth != len(names) - 1:
            completes = self.retention.marked(inode.parent, names[-1])
        else:
            try:
                finding = await self._examine(inode, names[-1])
            except errors.Unreadable as error:
                finding = None
                doubt = f"its bytes cannot be read: {error.args[2]}"
            if inode.writes != writes:
                return  # it changed while it was read; its next close judges it
            if self.namespace.components(inode.ino) != names:
                await self._judge(inode, died=died)
                return
            if finding is not None:
                doubt = self.retention.judge(inode, match, finding)
            completes = not doubt and not match.temporary
        inode.judged, inode.doubt = writes, doubt  # not before: others of the generation wait
        if inode.doubt:
            self.committer.log_each(self.retention.incomplete(inode.generation, inode.doubt))
        elif completes or inode.generation in self.retention.claimed:
            self.completed(inode.generation)
        elif not self.retention.is_newest(inode.generation):
            self.presume(inode.generation)

    async def _examine(self, inode: Inode, name: bytes) -> lifetimes.Finding:
        """Return what a file's own format says about it being whole."""
        size = inode.size
        examination = lifetimes.examination(name, size)
        try:
            wanted = next(examination)
            while True:
                data = bytes(await self.reader.read(inode, *wanted))
                wanted = examination.send(data)
        except StopIteration as stop:
            finding: lifetimes.Finding = stop.value
            return finding

    async def inspect(self, inode: Inode, parent: int, name: bytes) -> None:
        """A file that was in no generation gets a name of one: judge its bytes as a close would."""
        context = self.retention.context(parent, name)
        match = context.match
        if match is None or match.temporary or match.depth < len(context.names):
            return
        if inode.generation or not inode.is_file or inode.doubt:
            return
        writes = inode.writes
        try:
            with self.kept(inode):
                finding = await self._examine(inode, name)
        except errors.Unreadable as error:
            finding = lifetimes.Finding(lifetimes.Verdict.BROKEN, error.args[2])
        if finding.verdict is lifetimes.Verdict.BROKEN and inode.writes == writes:
            inode.doubt = finding.reason

    async def _follow_tracker(self, inode: Inode) -> None:
        """A file outside the generations was closed; perhaps it says which one is complete."""
        if not lifetimes.is_tracker(inode.name):
            return
        try:
            told = bytes(await self.reader.read(inode, 0, TRACKER_READ))
        except errors.Unreadable:
            return
        target = lifetimes.tracked(inode.name, told)
        if target is not None:
            self.completed(self.retention.known(inode.parent, target))
            inode.changed = self.committer.round  # to be durable with it, if its close waits at all

    # Attributes

    async def setattr(
        self,
        ino: int,
        *,
        mode: int | None = None,
        uid: int | None = None,
        gid: int | None = None,
        size: int | None = None,
        atime_ns: int | None = None,
        mtime_ns: int | None = None,
        ctime_ns: int | None = None,
    ) -> Inode:
        await self._admit()
        inode = self.namespace.get(ino)
        if size is not None:
            with self.kept(inode):
                await self._resize(inode, size)
            inode = self.namespace.get(ino)
        now = self.options.wall_ns()
        if size is not None and mtime_ns is None:
            mtime_ns = now
        record = self.namespace.describe(inode)
        changes = {"uid": uid, "gid": gid, "atime_ns": atime_ns, "mtime_ns": mtime_ns}
        fields = {name: value for name, value in changes.items() if value is not None}
        for name in ("atime_ns", "mtime_ns"):
            if name in fields:
                fields[name] = max(TIME_NS_MIN, min(fields[name], TIME_NS_MAX))
        if mode is not None:
            fields["mode"] = stat.S_IFMT(inode.mode) | stat.S_IMODE(mode)
        fields["ctime_ns"] = now if ctime_ns is None else ctime_ns
        self.committer.log(record._replace(**fields))
        return inode

    async def _resize(self, inode: Inode, size: int) -> None:
        if inode.is_dir:
            raise FSError(errno.EISDIR, self.path(inode.ino))
        if not inode.is_file:
            raise FSError(errno.EINVAL, self.path(inode.ino))
        if size > layout.FILE_SIZE_MAX:
            raise FSError(errno.EFBIG, self.path(inode.ino))
        if size <= inode.size:
            async with self.stream.stage(inode).lock:
                if size <= inode.size:
                    await self._set_size(inode, size)
                    return
        if inode.error is not None and size:
            raise inode.error.with_traceback(None)
        async with self._locked_with_room(inode, WRITE_SLACK):
            await self._set_size(inode, size)

    async def _set_size(self, inode: Inode, size: int) -> None:
        self._change(inode)
        if size < inode.size:
            self._shrink(inode, size)
        elif size > inode.size:
            await self.stream.extend(inode, self.lane(inode))
            self.retention.announce(inode, size)
            inode.size = size
        if size == 0:
            inode.error = None
        if inode.missing:
            inode.missing.cut(size)

    def _shrink(self, inode: Inode, size: int) -> None:
        self.stream.trim(inode, size)
        if size < inode.logged_size or size == 0:
            self.committer.log(layout.SizeRecord(inode.ino, size))
        else:
            self.namespace.cut(inode, size)
            inode.size = size

    def getxattr(self, ino: int, name: bytes) -> bytes:
        return attributes.get(self, self.namespace.get(ino), name)

    def listxattr(self, ino: int) -> list[bytes]:
        names = self.namespace.get(ino).xattrs or {}
        return [name for name in names if not name.startswith(attributes.HIDDEN)]

    async def setxattr(self, ino: int, name: bytes, value: bytes, flags: int = 0) -> None:
        """Set an extended attribute; ours are checked and acted on (BadAttribute, NotYet)."""
        await self._admit(RESERVE if lifetimes.is_ours(name) else GROWTH)
        await attributes.set_(self, self.namespace.get(ino), name, value, flags)

    async def removexattr(self, ino: int, name: bytes) -> None:
        await self._admit()
        await attributes.remove(self, self.namespace.get(ino), name)

    # For people

    def statistics(self) -> dict[str, Any]:
        return observe.statistics(self)

    def zone_map(self) -> list[dict[str, Any]]:
        return observe.zone_map(self)

    def generations(self, ino: int) -> list[dict[str, Any]]:
        return generations.table(self.retention, self.table, ino)

    def explain(self, ino: int) -> dict[str, Any]:
        return generations.explain(self.retention, self.namespace.get(ino))

    async def collect(self) -> dict[str, int]:
        """Reclaim now (`gc`)."""
        self._check()
        return await self.reclaim.collect()

    def scrub_as(self, order: lifetimes.ScrubOrder) -> None:
        """Begin or end a scrub. Raises FSError(EBUSY) while one runs."""
        if order.rate == 0:
            self.scrub.stop()
        else:
            self.scrub.start(order.rate or scrub.RATE)
