"""Random programs on a volume: everything that a trainer, an editor or a vandal does to files."""

from __future__ import annotations

import errno
import random
import stat
from collections.abc import Awaitable, Callable

from retainzfs.errors import NoSpace
from retainzfs.volume import RENAME_EXCHANGE, RENAME_NOREPLACE, FSError, Volume
from tests.helpers import DIRECTORY, FILE

NAMES = [b"a", b"b", b"c", b"log", b"step-1.pt", b"step-2.pt", b"model-10.bin"]
SIZES = [1, 100, 256, 257, 4096, 5000, 20_000, 70_000]
LARGE = 300_000
EXPECTED = (errno.ENOENT, errno.EEXIST, errno.EISDIR, errno.ENOTDIR,
            errno.ENOTEMPTY, errno.EINVAL, errno.EPERM)  # fmt: skip


class Actor:
    """Runs random operations below one directory. `kinds` counts them."""

    def __init__(self, volume: Volume, top: int, rng: random.Random) -> None:
        self.volume = volume
        self.top = top
        self.rng = rng
        self.run = 0
        self.directories: list[int] = []
        self.generation = 0
        self.kinds: dict[str, int] = {}

    async def prepare(self) -> None:
        """Make the directories that the operations take for granted."""
        volume = self.volume
        self.run = (await volume.make(self.top, b"run", DIRECTORY, 0, 0)).ino
        await volume.setxattr(self.run, b"user.retainz.keep_last", b"2")
        if self.rng.random() < 0.7:
            await volume.setxattr(self.run, b"user.retainz.reap", b"1")
        other = (await volume.make(self.top, b"other", DIRECTORY, 0, 0)).ino
        cache = (await volume.make(self.top, b"cache", DIRECTORY, 0, 0)).ino
        await volume.setxattr(cache, b"user.retainz.class", b"cache")
        deep = (await volume.make(other, b"deep", DIRECTORY, 0, 0)).ino
        self.directories = [self.top, other, other, cache, deep]

    async def step(self) -> str:
        """Do one operation; return its name."""
        name = self.rng.choices(list(OPERATIONS), list(OPERATIONS.values()))[0]
        operation: Callable[[], Awaitable[None]] = getattr(self, name)
        try:
            await operation()
        except FSError as error:
            if error.errno not in EXPECTED:
                raise
        except NoSpace:
            await self.make_room()
        self.kinds[name] = self.kinds.get(name, 0) + 1
        return name

    def place(self) -> tuple[int, bytes]:
        return self.rng.choice(self.directories), self.rng.choice(NAMES)

    def existing(self, *, directories: bool = False) -> tuple[int, bytes]:
        """Return a name that exists, where there is one; a directory's only if asked for."""
        for _ in range(8):
            parent, name = self.place()
            ino = dict(self.volume.entries(parent)).get(name)
            if ino is not None and self.volume.inode(ino).is_dir <= directories:
                return parent, name
        return self.place()

    def data(self) -> bytes:
        size = LARGE if self.rng.random() < 0.05 else self.rng.choice(SIZES)
        return self.rng.randbytes(size)

    async def opened(self, parent: int, name: bytes) -> int:
        try:
            inode = self.volume.lookup(parent, name)
        except FSError:
            inode = await self.volume.make(parent, name, FILE, 0, 0)
        if not inode.is_file:
            raise FSError(errno.EISDIR, name)
        self.volume.open(inode.ino)
        return inode.ino

    async def closed(self, ino: int) -> None:
        try:
            await self.volume.flush(ino)
        finally:
            self.volume.close(ino)

    # Bytes

    async def write(self) -> None:
        ino = await self.opened(*self.place())
        try:
            for _ in range(self.rng.randrange(1, 4)):
                at = self.rng.randrange(self.volume.inode(ino).size + 10_000)
                await self.volume.write(ino, at, self.data())
        finally:
            await self.closed(ino)

    async def overwrite(self) -> None:
        """Whole blocks in place, as a map or a database does."""
        ino = await self.opened(*self.existing())
        try:
            blocks = self.volume.inode(ino).size // 4096 + 1
            for _ in range(self.rng.randrange(1, 6)):
                at = self.rng.randrange(blocks) * 4096
                await self.volume.write(ino, at, self.rng.randbytes(4096))
        finally:
            await self.closed(ino)

    async def append(self) -> None:
        ino = await self.opened(*self.place())
        try:
            await self.volume.write(ino, self.volume.inode(ino).size, self.data())
        finally:
            await self.closed(ino)

    async def replace(self) -> None:
        ino = await self.opened(*self.place())
        try:
            await self.volume.setattr(ino, size=0)
            await self.volume.write(ino, 0, self.data())
        finally:
            await self.closed(ino)

    async def truncate(self) -> None:
        ino = self.volume.lookup(*self.existing()).ino
        size = self.rng.randrange(self.volume.inode(ino).size + 9000)
        await self.volume.setattr(ino, size=size)

    async def unfinished(self) -> None:
        """Write, and unlink while it is open."""
        parent, name = self.place()
        ino = await self.opened(parent, name)
        try:
            await self.volume.write(ino, 0, self.data())
            await self.volume.unlink(parent, name)
            await self.volume.write(ino, 5000, self.data())
        finally:
            await self.closed(ino)

    async def fsync(self) -> None:
        await self.volume.fsync(self.volume.lookup(*self.existing(directories=True)).ino)

    async def fsync_directory(self) -> None:
        await self.volume.fsync(self.rng.choice(self.directories))

    async def sync(self) -> None:
        await self.volume.syncfs()

    # Names

    async def unlink(self) -> None:
        await self.volume.unlink(*self.existing())

    async def rename(self) -> None:
        flags = self.rng.choice([0, 0, 0, RENAME_NOREPLACE])
        source = self.existing(directories=True)
        target = self.existing() if self.rng.random() < 0.5 else self.place()
        await self.volume.rename(*source, *target, flags)

    async def exchange(self) -> None:
        one, other = self.existing(directories=True), self.existing(directories=True)
        await self.volume.rename(*one, *other, RENAME_EXCHANGE)

    async def edit(self) -> None:
        """Write beside and rename over, without any fsync, as editors do."""
        parent, name = self.place()
        ino = await self.opened(parent, b"new~")
        try:
            await self.volume.setattr(ino, size=0)
            await self.volume.write(ino, 0, self.data())
        finally:
            await self.closed(ino)
        await self.volume.rename(parent, b"new~", parent, name)

    async def link(self) -> None:
        ino = self.volume.lookup(*self.existing()).ino
        await self.volume.link(ino, *self.place())

    async def symlink(self) -> None:
        parent, name = self.place()
        await self.volume.make(parent, name, stat.S_IFLNK | 0o777, 0, 0, target=b"../" + name)

    async def directory(self) -> None:
        parent, name = self.place()
        try:
            made = await self.volume.make(parent, name, DIRECTORY, 0, 0)
            self.directories.append(made.ino)
        except FSError:
            await self.volume.rmdir(parent, name)

    async def attribute(self) -> None:
        ino = self.volume.lookup(*self.existing(directories=True)).ino
        name = self.rng.choice([b"user.one", b"user.two"])
        if self.rng.random() < 0.7:
            await self.volume.setxattr(ino, name, self.rng.randbytes(self.rng.choice([0, 9, 9000])))
        elif name in self.volume.listxattr(ino):
            await self.volume.removexattr(ino, name)

    async def mode(self) -> None:
        ino = self.volume.lookup(*self.existing()).ino
        await self.volume.setattr(ino, mode=self.rng.choice([0o600, 0o644, 0o755]))

    # Generations

    async def save(self) -> None:
        """A generation in one file; its close is durable and may retire older ones."""
        self.generation += 1
        ino = await self.opened(self.run, b"epoch-%d.bin" % self.generation)
        try:
            for at in range(0, self.rng.choice([20_000, 200_000]), 50_000):
                await self.volume.write(ino, at, self.rng.randbytes(50_000))
            if self.rng.random() < 0.3:
                await self.volume.fsync(ino)
        finally:
            await self.closed(ino)

    async def save_directory(self) -> None:
        """A generation as PyTorch DCP writes it: shards, then the marker by a rename."""
        self.generation += 1
        name = b"step-%d" % self.generation
        step = (await self.volume.make(self.run, name, DIRECTORY, 0, 0)).ino
        for file in (b"__0_0.distcp", b"__1_0.distcp", b".metadata.tmp"):
            ino = await self.opened(step, file)
            try:
                await self.volume.write(ino, 0, self.rng.randbytes(self.rng.choice([300, 90_000])))
                if file == b".metadata.tmp":
                    await self.volume.fsync(ino)
            finally:
                await self.closed(ino)
        await self.volume.rename(step, b".metadata.tmp", step, b".metadata")

    async def commit(self) -> None:
        """Say of a generation that it is complete."""
        for name, ino in self.volume.entries(self.run):
            if name.endswith(b".bin") and self.rng.random() < 0.5:
                await self.volume.setxattr(ino, b"user.retainz.commit", b"1")
                return

    async def retire(self) -> None:
        """Delete a generation as a framework does."""
        names = self.volume.entries(self.run)
        if len(names) > 2:
            name, ino = self.rng.choice(names)
            if not self.volume.inode(ino).is_dir:
                await self.volume.unlink(self.run, name)
                return
            for child, _ in self.volume.entries(ino):
                await self.volume.unlink(ino, child)
            await self.volume.rmdir(self.run, name)

    async def collect(self) -> None:
        await self.volume.collect()

    async def make_room(self) -> None:
        """The device is full: delete what is largest."""
        there = sorted({*self.directories, self.run} & set(self.volume.namespace.inodes))
        found = [(parent, name, ino) for parent in there
                 for name, ino in self.volume.entries(parent)
                 if self.volume.inode(ino).is_file]  # fmt: skip
        found.sort(key=lambda entry: self.volume.inode(entry[2]).size)
        for parent, name, _ in found[-3:]:
            await self.volume.unlink(parent, name)


# How often each comes, relative to the others.
OPERATIONS = {
    "write": 8, "overwrite": 6, "append": 5, "replace": 4, "truncate": 4, "unfinished": 2,
    "fsync": 6, "fsync_directory": 2, "sync": 1, "unlink": 5, "rename": 5, "exchange": 2,
    "edit": 4, "link": 3, "symlink": 2, "directory": 3, "attribute": 4, "mode": 2, "save": 6,
    "save_directory": 4, "commit": 2, "retire": 3, "collect": 2,
}  # fmt: skip
