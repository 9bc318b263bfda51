"""Removal: of a name, and of whole trees that nobody asked us to walk.

A tree is removed in two steps. One operation moves it into limbo, whatever its size: from then on
no name leads to it, for readers and after a crash. Then it is freed name by name, in pieces; what
is left of that at a crash is for the next mount. docs/design/retention.md gives the reasons.
"""

from __future__ import annotations

import logging
import stat
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager
from typing import Any, Self

import trio

from retainzfs import layout
from retainzfs.core import Core, Options
from retainzfs.device import Device
from retainzfs.errors import RetainzError
from retainzfs.namespace import LIMBO, ROOT, Inode

log = logging.getLogger(__name__)

NAME_COST = 400  # bytes of records, at most, that move a name into limbo
PIECE = 100  # names that are freed before others have their turn


class Removal(Core):
    """A mounted volume that can forget; `Names` adds the operations that programs ask for."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._clearing = trio.Lock()
        self._reaping: set[int] = set()  # generations whose predecessors are being deleted
        self.reclaim.reaping = lambda: bool(self._reaping)

    @classmethod
    @asynccontextmanager
    async def mounted(cls, device: Device, options: Options) -> AsyncIterator[Self]:
        async with super().mounted(device, options) as volume:
            volume.nursery.start_soon(volume.clear)
            yield volume
            volume.namespace.fading.clear()
            await volume.clear()

    def remove_trees(self, names: Sequence[tuple[int, bytes]], *records: layout.Record) -> None:
        """Remove names, and all below them, as one operation, `records` included.

        Of more names than fit into a batch the last ones go in further operations.
        """
        limbo = self.namespace.limbo or self._make_limbo()
        step = self.journal.batch_max // NAME_COST
        for at in range(0, len(names), step):
            self._move_away(limbo, names[at : at + step], records)
            records = ()

    def _move_away(
        self, limbo: Inode, names: Sequence[tuple[int, bytes]], also: Sequence[layout.Record]
    ) -> None:
        now = self.options.wall_ns()
        records = list(also)
        taken = set(limbo.entries or ())
        moved = dict.fromkeys((parent for parent, _ in names), 0)  # directory → directories in it
        for parent, name in names:
            inode = self.namespace.child(parent, name)
            generation, left = inode.generation, list[layout.Record]()
            if inode.is_file and inode.nlink > 1:
                generation, left = self._left_with(inode, names)
            place = b"%d" % inode.ino
            while place in taken:  # another name of the same file
                place += b"+"
            taken.add(place)
            moved[parent] += inode.is_dir
            described = self.namespace.describe(inode)
            home = self._home(inode, names, limbo.ino)
            records += [
                layout.UnlinkRecord(parent, name),
                layout.LinkRecord(limbo.ino, place, inode.ino),
                described._replace(generation=generation, parent=home, ctime_ns=now),
                *left,
            ]
        for parent, count in moved.items():
            records.append(self._touched(self.namespace.get(parent), now, links=-count))
        records.append(self._touched(limbo, now, links=sum(moved.values())))
        self.committer.log(*records)

    def _make_limbo(self) -> Inode:
        now = self.options.wall_ns()
        ino = self.namespace.next_ino
        mode = stat.S_IFDIR | 0o700
        root = self.namespace.describe(self.namespace.get(ROOT))
        self.committer.log(
            layout.InodeRecord(ino, mode, 0, 0, 2, 0, now, now, now, 0, ROOT),
            layout.LinkRecord(ROOT, LIMBO, ino),
            root._replace(nlink=root.nlink + 1),  # its times are for what people see
        )
        return self.namespace.get(ino)

    async def clear(self) -> None:
        """Free what lies in limbo and is not fading."""
        async with self._clearing:
            try:
                while (limbo := self.namespace.limbo) is not None:
                    if not limbo.entries:
                        self._drop(ROOT, LIMBO)
                    elif not await self._empty(limbo):
                        break
            except RetainzError as error:
                log.warning("what was removed is left to the next mount to free: %s", error)

    async def _empty(self, limbo: Inode) -> bool:
        """Free what has no name for anybody any more; False when there is nothing."""
        tops = (limbo.entries or {}).items()
        waiting = [(limbo.ino, name) for name, ino in tops if ino not in self.namespace.fading]
        dropped = 0
        while waiting:
            parent, name = waiting[-1]
            inode = self.namespace.get((self.namespace.get(parent).entries or {})[name])
            if inode.entries:
                waiting += [(inode.ino, below) for below in inode.entries]
                continue
            waiting.pop()
            self._drop(parent, name)
            dropped += 1
            if dropped % PIECE == 0:
                await self._admit()
                await trio.lowlevel.checkpoint()
        return dropped > 0

    def _drop(self, parent: int, name: bytes) -> None:
        directory = self.namespace.get(parent)
        inode = self.namespace.get((directory.entries or {})[name])
        described = self.namespace.describe(directory)
        inode.faded = inode.is_dir or inode.nlink == 1
        self.committer.log(
            layout.UnlinkRecord(parent, name),
            described._replace(nlink=described.nlink - inode.is_dir),
            *self._unlinked(inode, self.options.wall_ns(), (parent, name)),
        )

    # Parts of an operation

    def _touched(self, directory: Inode, now_ns: int, links: int = 0) -> layout.InodeRecord:
        record = self.namespace.describe(directory)
        return record._replace(mtime_ns=now_ns, ctime_ns=now_ns, nlink=record.nlink + links)

    def _linked(self, inode: Inode, name: tuple[int, bytes]) -> tuple[int, list[layout.Record]]:
        """A file gets one more name. Return the generation that its bytes go with from now on, and
        the records that make the name's."""
        if not inode.is_file or self.retention.owns(inode):
            return inode.generation, []
        generation, born = self.retention.assign(*name, again=False)
        generations = self.retention.generations_of(inode) | {generation} - {0}
        self.belongs(inode, generations)
        return self.retention.latest(generations, born), born

    def _left_with(
        self, inode: Inode, lost: Collection[tuple[int, bytes]]
    ) -> tuple[int, list[layout.Record]]:
        """A file with several names loses some. Return the generation that its bytes go with from
        now on, and the records of those that it leaves."""
        before = self.retention.generations_of(inode)
        if not before or self.retention.owns(inode):
            return inode.generation, []
        generations: set[int] = set()
        for place in self.retention.visible(inode):
            if generations == before:
                break
            if place not in lost:
                generations.add(self.retention.known(*place))
        generations &= before
        return self.retention.latest(generations, []), self.belongs(inode, generations)

    def _home(self, inode: Inode, lost: Collection[tuple[int, bytes]], otherwise: int) -> int:
        """Return the directory of a name that an inode keeps, the one it is known by if it can."""
        if inode.is_file and inode.nlink > 1 and (inode.parent, inode.name) not in lost:
            return inode.parent
        left = (place[0] for place in self.retention.visible(inode) if place not in lost)
        return next(left, otherwise)

    def _unlinked(self, inode: Inode, now_ns: int, lost: tuple[int, bytes]) -> list[layout.Record]:
        """Return the records for a name less; the last one takes the bytes along, unless the
        inode is in use."""
        left = 0 if inode.is_dir else inode.nlink - 1
        if inode.is_dir:
            self.retention.forget(inode)
        record = self.namespace.describe(inode)._replace(nlink=left, ctime_ns=now_ns)
        records: list[layout.Record] = [record]
        if left:
            generation, ended = self._left_with(inode, [lost])
            home = self._home(inode, [lost], inode.parent)
            records = [record._replace(generation=generation, parent=home), *ended]
        if left == 0 and not inode.in_use:
            self.committer.forget(inode)
            records.append(layout.FreeRecord(inode.ino))
        if left == 0:
            records += self.left(inode)
        return records
