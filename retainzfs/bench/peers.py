"""Two small pyfuse3 filesystems to compare with.

python -m retainzfs.bench.peers null DIR [FILE]
    takes writes past the page cache and forgets the bytes, and shows FILE, from memory: what
    FUSE through pyfuse3 can reach at all
python -m retainzfs.bench.peers naive DIR BACKING
    what a first attempt looks like: page cache, and each write passed on to a file of the
    directory BACKING
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pyfuse3
import trio
from pyfuse3 import EntryAttributes, FileInfo, FUSEError, RequestContext, SetattrFields

BLOCK_SIZE = 1 << 20
TIMEOUT_S = 1.0  # as a mount of retainzfs


class Null(pyfuse3.Operations):
    """Files have a name, a mode and a size; one may have bytes, `shown`."""

    direct_io = True

    def __init__(self, shown: Path | None = None) -> None:
        super().__init__()
        self.names: dict[int, dict[bytes, int]] = {pyfuse3.ROOT_INODE: {}}
        self.modes: dict[int, int] = {pyfuse3.ROOT_INODE: stat.S_IFDIR | 0o755}
        self.sizes: dict[int, int] = {}
        self.numbers = itertools.count(pyfuse3.ROOT_INODE + 1)
        self.content = memoryview(b"")
        if shown is not None:
            self.content = memoryview(shown.read_bytes())
            inode = self._make(pyfuse3.ROOT_INODE, os.fsencode(shown.name), stat.S_IFREG | 0o644)
            self.sizes[inode] = len(self.content)

    def _attributes(self, inode: int) -> EntryAttributes:
        entry = EntryAttributes()
        entry.st_ino = inode
        entry.st_mode = self.modes[inode]
        entry.st_nlink = 1
        entry.st_uid, entry.st_gid = os.getuid(), os.getgid()
        entry.st_size = self.sizes.get(inode, 0)
        entry.st_blksize = BLOCK_SIZE
        entry.st_atime_ns = entry.st_mtime_ns = entry.st_ctime_ns = time.time_ns()
        entry.attr_timeout = entry.entry_timeout = TIMEOUT_S
        return entry

    async def lookup(self, parent: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        if name not in self.names[parent]:
            raise FUSEError(errno.ENOENT)
        return self._attributes(self.names[parent][name])

    def _make(self, parent: int, name: bytes, mode: int) -> int:
        inode = next(self.numbers)
        self.names[parent][name] = inode
        self.modes[inode] = mode
        if stat.S_ISDIR(mode):
            self.names[inode] = {}
        else:
            self.sizes[inode] = 0
        return inode

    async def mkdir(
        self, parent: int, name: bytes, mode: int, ctx: RequestContext
    ) -> EntryAttributes:
        return self._attributes(self._make(parent, name, stat.S_IFDIR | mode))

    async def getattr(self, inode: int, ctx: RequestContext) -> EntryAttributes:
        return self._attributes(inode)

    async def setattr(
        self,
        inode: int,
        attr: EntryAttributes,
        fields: SetattrFields,
        fh: int | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        if fields.update_size:
            self.sizes[inode] = attr.st_size
        if fields.update_mode:
            self.modes[inode] = attr.st_mode
        return self._attributes(inode)

    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        inode = self._make(parent, name, mode)
        return FileInfo(fh=inode, direct_io=self.direct_io), self._attributes(inode)

    async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        return FileInfo(fh=inode, keep_cache=False)

    async def unlink(self, parent: int, name: bytes, ctx: RequestContext) -> None:
        inode = self.names[parent].pop(name)
        del self.modes[inode], self.sizes[inode]

    async def rmdir(self, parent: int, name: bytes, ctx: RequestContext) -> None:
        inode = self.names[parent].pop(name)
        del self.modes[inode], self.names[inode]

    async def opendir(self, inode: int, ctx: RequestContext) -> int:
        return inode

    async def readdir(self, fh: int, start_id: int, token: pyfuse3.ReaddirToken) -> None:
        entries = itertools.islice(self.names[fh].items(), start_id, None)
        for position, (name, inode) in enumerate(entries, start_id + 1):
            if not pyfuse3.readdir_reply(token, name, self._attributes(inode), position):
                return

    async def read(self, fh: int, offset: int, size: int) -> bytes:
        # Any contiguous buffer will do.
        return self.content[offset : offset + size]  # type: ignore[return-value]

    async def write(self, fh: int, offset: int, data: bytes) -> int:
        self.sizes[fh] = max(self.sizes[fh], offset + len(data))
        return len(data)

    async def flush(self, fh: int) -> None:
        pass

    async def fsync(self, fh: int, datasync: bool) -> None:
        pass

    async def release(self, fh: int) -> None:
        pass

    async def forget(self, inode_list: Sequence[tuple[int, int]]) -> None:
        pass


class Naive(Null):
    """Each write goes through the kernel's page cache and on to a file, in the handler."""

    direct_io = False

    def __init__(self, backing: Path) -> None:
        super().__init__()
        self.backing = backing
        self.descriptors: dict[int, int] = {}

    async def create(
        self, parent: int, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        info, entry = await super().create(parent, name, mode, flags, ctx)
        path = self.backing / os.fsdecode(name)
        self.descriptors[info.fh] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        return info, entry

    async def unlink(self, parent: int, name: bytes, ctx: RequestContext) -> None:
        await super().unlink(parent, name, ctx)
        (self.backing / os.fsdecode(name)).unlink()

    async def write(self, fh: int, offset: int, data: bytes) -> int:
        await super().write(fh, offset, data)
        return os.pwrite(self.descriptors[fh], data, offset)

    async def fsync(self, fh: int, datasync: bool) -> None:
        os.fsync(self.descriptors[fh])

    async def release(self, fh: int) -> None:
        os.close(self.descriptors.pop(fh))


def main(arguments: list[str]) -> int:
    """Serve until unmounted."""
    match arguments:
        case ["null", directory]:
            peer = Null()
        case ["null", directory, shown]:
            peer = Null(Path(shown))
        case ["naive", directory, backing]:
            peer = Naive(Path(backing))
        case _:
            print(__doc__, file=sys.stderr)
            return 2
    pyfuse3.init(peer, directory, {*pyfuse3.default_options, "fsname=bench-peer"})
    trio.run(pyfuse3.main)
    pyfuse3.close(unmount=False)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
