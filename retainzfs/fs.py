"""The pyfuse3 adapter: handles, open flags, page cache, error numbers. No policy, no placement.

Every handler has one shape: it asks the volume, and an error of ours becomes the number that the
caller sees. Any other exception is a mistake in this program; it leaves `pyfuse3.main`, and the
mount stops answering rather than go on with a state that nobody understands (see `session`).

Handles
- Write-only handles are `direct_io`: several times the speed of the page cache. Handles that read
  go through the page cache, since a shared map needs it.
- The kernel may keep the pages that it has of a file (`keep_cache`) only if the file has not been
  modified since it was last opened through the page cache.
- Inode numbers are never used twice, so `forget` has nothing to give back but our own notes.
"""

from __future__ import annotations

import errno
import functools
import logging
import os
import stat
from collections import Counter
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, RequestContext, SetattrFields

from retainzfs import control, lifetimes, processes
from retainzfs.errors import DeviceError, DeviceGone, RetainzError, Unreadable
from retainzfs.volume import ROOT, FSError, Inode, Volume

log = logging.getLogger(__name__)

BLOCK_SIZE = 1 << 20  # st_blksize: programs size their buffers by it
# All changes but reaping come through this kernel, so it could keep names and attributes for long;
# more than a second gains nothing, and the times of a reaped directory shall not be stale for long.
# Names that may be reaped it does not keep at all. Telling it of one that went would be the other
# way; then its lock on the directory is waited for, in the kernel, for ever if a kill -9 meets us
# there and the holder of the lock waits for our answer.
TIMEOUT_S = 1.0
GRACE_S = 0.1  # for a request that follows a lookup which was answered just before a reaping
# Since 6.6 the kernel drops the pages of what is written past them; before, we have to ask for it.
DROPS_PAGES = tuple(map(int, os.uname().release.split(".")[:2])) >= (6, 6)

P = ParamSpec("P")
R = TypeVar("R")


def answers(handler: Callable[P, Awaitable[R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Let the caller of a handler get the number of an error of ours, and the log its text."""

    @functools.wraps(handler)
    async def answer(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await handler(*args, **kwargs)
        except RetainzError as error:
            # The host's own numbers mean something to who reads the log, and nothing to a program.
            number = errno.EIO if isinstance(error, DeviceError) else error.errno
            # Of these the log has been told, once.
            if number == errno.EIO and not isinstance(error, DeviceGone | Unreadable):
                log.error("%s", error)
            raise FUSEError(number) from None

    return answer


class ServedVolume(Volume):
    """A volume behind a mount; `served` while the kernel's requests are answered."""

    served = False

    async def reaped(self) -> None:
        """The kernel did not ask for this deletion: let it do what it is about to."""
        if self.served:
            await trio.sleep(GRACE_S)


@dataclass(slots=True)
class File:
    ino: int
    cached: bool  # goes through the page cache
    changed: bool = False  # the file, by a write through it or by creating or truncating it
    wrote: bool = False  # since the kernel was last told
    opener: int = 0  # process (or thread, of no generation); 0 in a namespace that we do not see


@dataclass(slots=True)
class Directory:
    ino: int
    entries: list[tuple[bytes, int]]  # as they were when reading began


class Filesystem(pyfuse3.Operations):
    """`owner` is the user who mounted and may do what root may; `started` is set when the kernel
    has its first answer."""

    def __init__(self, volume: ServedVolume, controls: control.Control, owner: int) -> None:
        super().__init__()
        self.volume = volume
        self.control = controls
        self.owner = owner
        self.started = trio.Event()
        self._files: dict[int, File] = {}
        self._directories: dict[int, Directory] = {}
        self._next_handle = 1
        self._readers: Counter[int] = Counter()  # inode → open handles with pages
        self._pages: dict[int, int] = {}  # inode → its `writes` when pages were last allowed

    def init(self) -> None:
        self.started.set()

    # Attributes

    @staticmethod
    def _attributes(inode: Inode) -> EntryAttributes:
        entry = EntryAttributes()
        entry.st_ino = inode.ino
        entry.st_mode = inode.mode
        entry.st_nlink = inode.nlink
        entry.st_uid = inode.uid
        entry.st_gid = inode.gid
        entry.st_rdev = inode.rdev
        entry.st_size = inode.size
        entry.st_blksize = BLOCK_SIZE
        # Bytes kept in the inode count too: what takes no blocks at all passes for a hole.
        inline = -(-len(inode.content) // 512) if inode.is_file else 0
        entry.st_blocks = inode.blocks * 8 or inline
        entry.st_atime_ns = inode.atime_ns
        entry.st_mtime_ns = inode.mtime_ns
        entry.st_ctime_ns = inode.ctime_ns
        entry.attr_timeout = entry.entry_timeout = TIMEOUT_S
        return entry

    def _entry(self, inode: Inode, parent: int) -> EntryAttributes:
        """Return the attributes for a reply after which the kernel knows the inode by a name."""
        inode.lookups += 1
        entry = self._attributes(inode)
        if self.volume.reaps(parent):
            entry.entry_timeout = 0
        return entry

    @answers
    async def lookup(self, parent: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        if control.owns(parent) and name == b"..":
            return self._entry(self.volume.inode(ROOT), ROOT)
        if control.owns(parent) or (parent == ROOT and name == control.NAME):
            return self.control.lookup(parent, name)
        return self._entry(self.volume.lookup(parent, name), parent)

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        for ino, count in inode_list:
            if control.owns(ino):
                continue
            if self.volume.forget(ino, count):
                self._pages.pop(ino, None)

    @answers
    async def getattr(self, ino: int, ctx: RequestContext) -> EntryAttributes:
        if control.owns(ino):
            return self.control.attributes(ino)
        return self._attributes(self.volume.inode(ino))

    @answers
    async def setattr(
        self,
        ino: int,
        attr: EntryAttributes,
        fields: SetattrFields,
        fh: int | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        self._ours(ino)
        inode = self.volume.inode(ino)
        mode = attr.st_mode if fields.update_mode else None
        uid = attr.st_uid if fields.update_uid else None
        gid = attr.st_gid if fields.update_gid else None
        size = attr.st_size if fields.update_size else None
        if mode is None and not (uid is gid is size is None):
            mode = _without_privileges(inode)
        inode = await self.volume.setattr(
            ino,
            mode=mode,
            uid=uid,
            gid=gid,
            size=size,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
            ctime_ns=attr.st_ctime_ns if fields.update_ctime else None,
        )
        return self._attributes(inode)

    @answers
    async def readlink(self, ino: int, ctx: RequestContext) -> bytes:
        inode = self.volume.inode(ino)
        return bytes(await self.volume.read(ino, 0, inode.size))

    @answers
    async def statfs(self, ctx: RequestContext) -> pyfuse3.StatvfsData:
        told = self.volume.statfs()
        out = pyfuse3.StatvfsData()
        out.f_bsize = out.f_frsize = told.block_size
        out.f_blocks, out.f_bfree, out.f_bavail = told.blocks, told.free, told.available
        out.f_files, out.f_ffree, out.f_favail = told.files, told.files_free, told.files_free
        out.f_namemax = told.name_max
        return out

    # Names

    @answers
    async def mknod(
        self, parent: int, name: bytes, mode: int, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        return self._entry(await self._make(parent, name, mode, ctx, rdev=rdev), parent)

    @answers
    async def mkdir(
        self, parent: int, name: bytes, mode: int, ctx: RequestContext
    ) -> EntryAttributes:
        return self._entry(await self._make(parent, name, mode, ctx), parent)

    @answers
    async def symlink(
        self, parent: int, name: bytes, target: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        self._ours(parent, name)
        mode = stat.S_IFLNK | 0o777
        inode = await self.volume.make(parent, name, mode, ctx.uid, ctx.gid, target=target)
        return self._entry(inode, parent)

    async def _make(
        self, parent: int, name: bytes, mode: int, ctx: RequestContext, rdev: int = 0
    ) -> Inode:
        self._ours(parent, name)
        mode &= ~ctx.umask
        return await self.volume.make(parent, name, mode, ctx.uid, ctx.gid, rdev=rdev)

    @answers
    async def link(
        self, ino: int, new_parent: int, new_name: bytes, ctx: RequestContext
    ) -> EntryAttributes:
        self._ours(ino)
        self._ours(new_parent, new_name)
        return self._entry(await self.volume.link(ino, new_parent, new_name), new_parent)

    @answers
    async def unlink(self, parent: int, name: bytes, ctx: RequestContext) -> None:
        self._ours(parent, name)
        await self.volume.unlink(parent, name)

    @answers
    async def rmdir(self, parent: int, name: bytes, ctx: RequestContext) -> None:
        self._ours(parent, name)
        await self.volume.rmdir(parent, name)

    @answers
    async def rename(
        self,
        parent: int,
        name: bytes,
        new_parent: int,
        new_name: bytes,
        flags: int,
        ctx: RequestContext,
    ) -> None:
        self._ours(parent, name)
        self._ours(new_parent, new_name)
        await self.volume.rename(parent, name, new_parent, new_name, flags)

    @staticmethod
    def _ours(ino: int, name: bytes = b"") -> None:
        """Refuse to change the control directory, or to make or remove its name."""
        if control.owns(ino) or (ino == ROOT and name == control.NAME):
            raise FUSEError(errno.EPERM)

    # Files

    @answers
    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        mode = stat.S_IFREG | stat.S_IMODE(mode)
        inode = await self._make(parent, name, mode, ctx)
        return self._open(inode, flags, ctx), self._entry(inode, parent)

    @answers
    async def open(self, ino: int, flags: int, ctx: RequestContext) -> FileInfo:
        if control.owns(ino):
            return self.control.open(ino, flags)
        inode = self.volume.inode(ino)
        if flags & os.O_TRUNC:  # libfuse leaves it to us (FUSE_CAP_ATOMIC_O_TRUNC)
            await self.volume.setattr(ino, size=0, mode=_without_privileges(inode))
        return self._open(inode, flags, ctx)

    def _open(self, inode: Inode, flags: int, ctx: RequestContext) -> FileInfo:
        ino = inode.ino
        self.volume.open(ino)
        cached = flags & os.O_ACCMODE != os.O_WRONLY
        keep = False
        if cached:
            keep = self._pages.get(ino) == inode.writes
            self._pages[ino] = inode.writes
            self._readers[ino] += 1
        fh = self._next_handle
        self._next_handle += 1
        changed = bool(flags & (os.O_TRUNC | os.O_CREAT))
        writes_generation = inode.generation and flags & os.O_ACCMODE
        opener = processes.of_thread(ctx.pid) if writes_generation else ctx.pid
        self._files[fh] = File(ino, cached, changed, opener=opener)
        return FileInfo(fh=fh, direct_io=not cached, keep_cache=keep)

    @answers
    async def read(self, fh: int, offset: int, size: int) -> bytes:
        if control.owns(fh):
            return self.control.read(fh, offset, size)
        # pyfuse3 takes any contiguous buffer, and copies it to the kernel at once.
        return await self.volume.read(self._files[fh].ino, offset, size)  # type: ignore[return-value]

    @answers
    async def write(self, fh: int, offset: int, data: bytes) -> int:
        file = self._files[fh]
        written = await self.volume.write(file.ino, offset, data)
        file.wrote = file.changed = True
        return written

    @answers
    async def flush(self, fh: int) -> None:
        if control.owns(fh):
            return
        file = self._files[fh]
        died = functools.partial(processes.ends_badly, file.opener)
        await self.volume.flush(file.ino, wrote=file.changed, died=died)
        await self._expire_pages(file)

    @answers
    async def fsync(self, fh: int, datasync: bool) -> None:
        if control.owns(fh):
            return
        file = self._files[fh]
        await self.volume.fsync(file.ino, datasync)
        await self._expire_pages(file)

    @answers
    async def release(self, fh: int) -> None:
        if control.owns(fh):
            self.control.release(fh)
            return
        file = self._files.pop(fh)
        if file.cached:
            self._readers[file.ino] -= 1
            if not self._readers[file.ino]:
                del self._readers[file.ino]
        self.volume.close(file.ino)

    async def _expire_pages(self, file: File) -> None:
        """Older kernels keep pages beside a write that went past them."""
        if DROPS_PAGES or file.cached or not file.wrote or not self._readers[file.ino]:
            return
        file.wrote = False
        # In a thread: the kernel may want to write pages back first, and we have to answer that.
        await trio.to_thread.run_sync(_expire_inode, file.ino, abandon_on_cancel=True)

    # Directories

    @answers
    async def opendir(self, ino: int, ctx: RequestContext) -> int:
        fh = self._next_handle
        if not control.owns(ino):
            self.volume.open(ino)
        self._next_handle += 1
        self._directories[fh] = Directory(ino, [])
        return fh

    @answers
    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        directory = self._directories[fh]
        if start_id == 0:  # also after rewinddir(3), which shall see what is new
            directory.entries = self._listing(directory.ino)
        for position in range(start_id, len(directory.entries)):
            name, ino = directory.entries[position]
            try:
                attributes = await self.getattr(ino, None)  # type: ignore[arg-type]
            except FUSEError:
                continue  # deleted since the listing was made
            if not control.owns(directory.ino) and self.volume.reaps(directory.ino):
                attributes.entry_timeout = 0
            if not pyfuse3.readdir_reply(token, name, attributes, position + 1):
                return
            if name not in (b".", b"..") and not control.owns(ino):
                self.volume.inode(ino).lookups += 1

    def _listing(self, ino: int) -> list[tuple[bytes, int]]:
        if control.owns(ino):
            return [(b".", ino), (b"..", ROOT), *self.control.entries()]
        parent = self.volume.inode(ino).parent
        return [(b".", ino), (b"..", parent), *self.volume.entries(ino)]

    @answers
    async def releasedir(self, fh: int) -> None:
        directory = self._directories.pop(fh)
        if not control.owns(directory.ino):
            self.volume.close(directory.ino)

    @answers
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        directory = self._directories[fh]
        if directory.ino == ROOT:  # stands for syncfs(2), which the kernel does not pass on
            await self.volume.syncfs()
        elif not control.owns(directory.ino):
            await self.volume.fsync(directory.ino, datasync)

    # Extended attributes

    @answers
    async def getxattr(self, ino: int, name: bytes, ctx: RequestContext) -> bytes:
        if control.owns(ino):
            raise FUSEError(errno.ENODATA)
        return self.volume.getxattr(ino, name)

    @answers
    async def setxattr(self, ino: int, name: bytes, value: bytes, ctx: RequestContext) -> None:
        self._ours(ino)
        self._allowed(name, ctx)
        await self.volume.setxattr(ino, name, value)

    @answers
    async def listxattr(self, ino: int, ctx: RequestContext) -> list[bytes]:
        names = [] if control.owns(ino) else self.volume.listxattr(ino)
        # The kernel keeps the values from others than root, but not the names.
        return [n for n in names if not (ctx.uid and n.startswith(b"trusted."))]

    @answers
    async def removexattr(self, ino: int, name: bytes, ctx: RequestContext) -> None:
        self._ours(ino)
        self._allowed(name, ctx)
        await self.volume.removexattr(ino, name)

    def _allowed(self, name: bytes, ctx: RequestContext) -> None:
        """Some attributes reach beyond their file: only for root and the mounting user."""
        if not lifetimes.is_ours(name) or ctx.uid in (0, self.owner):
            return
        short = name.removeprefix(lifetimes.PREFIX.encode()).decode(errors="replace")
        attribute = lifetimes.ATTRIBUTES.get(short)
        if attribute is not None and attribute.access is lifetimes.Access.ADMIN:
            raise FSError(errno.EPERM, os.fsdecode(name))


def _without_privileges(inode: Inode) -> int | None:
    """Return the mode of a file that changes owner or length, None if it stays.

    The kernel leaves set-user-ID and set-group-ID to us (FUSE_CAP_HANDLE_KILLPRIV); chown(2)
    clears them whoever asks, but the latter only if it does not stand for mandatory locking.
    """
    if not inode.is_file or not inode.mode & (stat.S_ISUID | stat.S_ISGID):
        return None
    mode = inode.mode & ~stat.S_ISUID
    return mode & ~stat.S_ISGID if mode & stat.S_IXGRP else mode


def _expire_inode(ino: int) -> None:
    with suppress(FileNotFoundError):  # the kernel has forgotten it
        pyfuse3.invalidate_inode(ino)
