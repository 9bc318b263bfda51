"""Bytes being written: staged in memory, appended to zones in runs, drained on demand.

A write copies into an open run and returns; the run is sealed when it is full, when one of its
files is drained, or when its memory is needed. A large file has a run of its own, small files of a
lane share one, block by block. Blocks in an open run are changed in place; a block in a sealed run
is never touched again, it is written anew and remapped.

Invariants
- A staged block is whole: the bytes behind the end of the file are zero.
- A run's memory is given back only after its bytes are on the device.
- Everything staged has room on the device: `Lanes.fits` is asked before.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Awaitable

import trio

from retainzfs import errors, layout
from retainzfs._zio import Slot
from retainzfs.device import Device, Sums
from retainzfs.lanes import Lanes, Place
from retainzfs.layout import BLOCK, INLINE_SUMS_MAX, RUN_BLOCKS_MAX
from retainzfs.namespace import Extent, Inode, Namespace, Run
from retainzfs.planning import Lane
from retainzfs.reader import Reader
from retainzfs.zone import Kind

SLOT = RUN_BLOCKS_MAX * BLOCK
POOL = 64 << 20  # bytes of staging memory
SHARED_MAX = 256 << 10  # bytes that a file stages in its lane's shared run before it gets its own
ATTEMPTS = 3  # zones that are tried before a write counts as failed


class OpenRun:
    """A run that still takes blocks."""

    __slots__ = ("attempts", "kind", "lane", "parts", "run", "slot", "stage", "waiting")

    def __init__(self, lane: Lane, kind: Kind, slot: memoryview) -> None:
        self.lane = lane
        self.kind = kind  # under which its bytes are counted as staged
        self.slot = slot
        self.run = Run(-1, 0, 0, 0, b"")
        self.run.buffer = slot
        self.stage: Stage | None = None  # of the file that has the run for itself
        # After the seal; zone ends may cut it into parts.
        self.waiting: list[Run] = [self.run]  # parts without a place
        self.parts = 1  # not yet on the device
        self.attempts = 0  # appends of its parts that failed

    @property
    def room(self) -> int:
        return RUN_BLOCKS_MAX - self.run.length


class Stage:
    """What the stream keeps for an inode that is or was being written."""

    __slots__ = ("lock", "open", "shared")

    def __init__(self) -> None:
        self.lock = trio.Lock()
        self.open: OpenRun | None = None  # the file's own run
        self.shared = 0  # bytes staged in shared runs


class Stream:
    def __init__(
        self,
        device: Device,
        lanes: Lanes,
        reader: Reader,
        uuid: bytes,
        nursery: trio.Nursery,
        pool: int = POOL,
    ) -> None:
        self.device = device
        self.lanes = lanes
        self.reader = reader
        self.namespace: Namespace = reader.namespace
        self.uuid = uuid
        self.nursery = nursery
        self.slots = self.slots_left = max(4, pool // SLOT)
        self._free: list[memoryview] = []
        self._open: OrderedDict[int, OpenRun] = OrderedDict()  # id(run) → open run, oldest first
        self._sealed: list[OpenRun] = []  # not yet wholly on the device
        self._slot_free = trio.Event()
        self._events: dict[int, trio.Event] = {}  # id(run) → set when it is on the device
        self.written = 0  # bytes appended, trailers included
        self.write_errors = 0

    def stage(self, inode: Inode) -> Stage:
        if inode.stage is None:
            inode.stage = Stage()
        assert isinstance(inode.stage, Stage), "only the stream sets an inode's stage"
        return inode.stage

    def staged(self) -> dict[Kind, int]:
        """Return the bytes, by kind of zone, that have no place on the device yet, trailers
        included. Those of copies do not count: they go to a zone of their own."""
        staged: dict[Kind, int] = {}
        # What nobody holds any more is dropped when a run is sealed, and not later.
        held = [(opened, opened.run.held) for opened in self._open.values()]
        held += [(opened, run.length) for opened in self._sealed for run in opened.waiting]
        for opened, blocks in held:
            if blocks and not opened.lane.copies:
                nbytes = (blocks + (blocks > INLINE_SUMS_MAX)) * BLOCK
                staged[opened.kind] = staged.get(opened.kind, 0) + nbytes
        return staged

    # Writing; the caller holds the inode's lock

    async def write(self, inode: Inode, offset: int, data: memoryview, lane: Lane) -> None:
        """Stage bytes of a file. Raises FSError; what was staged before the error stays."""
        end = offset + len(data)
        if inode.stays_inline(end):
            content = bytearray(inode.content.ljust(end, b"\0"))
            content[offset:end] = data
            inode.content = bytes(content)
            inode.dirty.add(0, 1)
            inode.fresh += 1
            self.namespace.fresh += 1
            inode.size = max(inode.size, end)
            return
        if inode.content and inode.size and not self._mapped(inode, 0):
            await self._put(inode, 0, memoryview(await self.reader.block(inode, 0)), lane)
        if offset > inode.size:
            await self._zero_tail(inode, lane)
        at = 0
        while at < len(data):
            block, low = divmod(offset + at, BLOCK)
            whole = (len(data) - at) // BLOCK
            if low or not whole:
                n = min(BLOCK - low, len(data) - at)
                # Zeros in a part of a hole leave it one: so glibc allocates where it cannot ask,
                # a byte in each block. A whole block of zeros is somebody's data.
                if self._mapped(inode, block) or any(data[at : at + n]):
                    await self._patch(inode, block, low, data[at : at + n], lane)
            else:
                n = whole * BLOCK
                await self._put(inode, block, data[at : at + n], lane)
            at += n
            inode.size = max(inode.size, offset + at)

    async def extend(self, inode: Inode, lane: Lane) -> None:
        """The file is about to grow by a hole: what lies behind its end must read as zero."""
        await self._zero_tail(inode, lane)

    def trim(self, inode: Inode, size: int) -> None:
        """The file is about to shrink to `size`: keep staged blocks zero behind its end."""
        low = size % BLOCK
        view = self._view(inode, size // BLOCK) if low else None
        if view is not None:
            view[low:] = bytes(BLOCK - low)

    async def rewrite(self, inode: Inode, extent: Extent, lane: Lane) -> bool:
        """Stage an extent's bytes anew, to move them; False when they changed hands meanwhile."""
        zone = self.lanes.table[extent.run.zone]
        self.lanes.table.pin(zone)
        try:
            data = await self.reader.fetch(inode, extent)
        finally:
            self.lanes.table.unpin(zone)
        if list(inode.spans(extent.block, extent.end)) != [extent]:
            return False
        await self._put(inode, extent.block, data, lane)
        return True

    def seal_of(self, inode: Inode) -> None:
        """Seal every open run that holds bytes of the inode."""
        for opened in list(self._open.values()):
            if inode.ino in opened.run.owners:
                self.seal(opened)

    async def drain(self, inode: Inode) -> None:
        """Everything staged of the inode is on the device, or its error is on the inode."""
        self.seal_of(inode)
        while True:
            waiting = self._unwritten(inode)
            if waiting is None:
                return
            await self._event(waiting).wait()

    def _unwritten(self, inode: Inode) -> Run | None:
        for start, end in inode.dirty:
            for extent in inode.spans(start, end):
                if extent.run.buffer is not None:
                    return extent.run
        return None

    def _mapped(self, inode: Inode, block: int) -> bool:
        i = inode.find(block)
        return i < len(inode.extents) and inode.extents[i].block <= block

    def _view(self, inode: Inode, block: int) -> memoryview | None:
        """Return the block's memory when it may be changed in place."""
        if not self._mapped(inode, block):
            return None
        extent = inode.extents[inode.find(block)]
        opened = self._open.get(id(extent.run))
        if opened is None or opened.lane.copies:
            return None  # a copy that finds no place is given up, and what was changed in it too
        at = (extent.first + block - extent.block) * BLOCK
        return opened.slot[at : at + BLOCK]

    async def _patch(
        self, inode: Inode, block: int, low: int, data: memoryview, lane: Lane
    ) -> None:
        view = self._view(inode, block)
        if view is not None:
            view[low : low + len(data)] = data
            return
        base = (
            await self.reader.block(inode, block)
            if block * BLOCK < inode.size
            else bytearray(BLOCK)
        )
        base[low : low + len(data)] = data
        await self._put(inode, block, memoryview(base), lane)

    async def _zero_tail(self, inode: Inode, lane: Lane) -> None:
        block, low = divmod(inode.size, BLOCK)
        if not low or not self._mapped(inode, block) or self._view(inode, block) is not None:
            return
        extent = next(inode.spans(block, block + 1))
        buffer = extent.run.buffer
        stored = buffer[extent.first * BLOCK :][:BLOCK] if buffer else None
        data = stored if stored is not None else await self.reader.fetch(inode, extent)
        if any(data[low:]):
            await self._put(inode, block, memoryview(await self.reader.block(inode, block)), lane)

    async def _put(self, inode: Inode, block: int, data: memoryview, lane: Lane) -> None:
        """Stage whole blocks."""
        at = 0
        while at < len(data):
            opened = await self._room(inode, lane, len(data) - at)
            n = min((len(data) - at) // BLOCK, opened.room)
            run = opened.run
            first = run.length
            opened.slot[first * BLOCK : (first + n) * BLOCK] = data[at : at + n * BLOCK]
            run.length += n
            start = block + at // BLOCK
            self.namespace.map(inode, Extent(start, n, run, first), keep=True)
            inode.dirty.add(start, start + n)
            at += n * BLOCK

    async def _room(self, inode: Inode, lane: Lane, nbytes: int) -> OpenRun:
        """Return an open run with room: the file's own, or the one its lane shares."""
        stage = self.stage(inode)
        large = stage.open is not None  # one that has had a run of its own gets another
        if stage.open is not None and not stage.open.room:
            self.seal(stage.open)
        if stage.open is not None and stage.open.lane is not lane:
            self.seal(stage.open)
        if stage.open is not None:
            self._open.move_to_end(id(stage.open.run))
            return stage.open
        # Copies always share: a trailer for each file would undo what collection has gained.
        if not lane.copies and (large or stage.shared + nbytes > SHARED_MAX):
            opened = await self._new(lane)
            stage.open, opened.stage = opened, stage
            return opened
        while lane.open is None or not lane.open.room:
            if lane.open is not None:
                self.seal(lane.open)
            opened = await self._new(lane)
            if lane.open is None:
                lane.open = opened
            else:  # another file of the lane was as quick
                self.seal(opened)
        stage.shared += nbytes
        self._open.move_to_end(id(lane.open.run))
        return lane.open

    async def _new(self, lane: Lane) -> OpenRun:
        while not self._free and not self.slots_left:
            if self._open:
                self.seal(next(iter(self._open.values())))
            if not self._free:
                await self._slot_free.wait()
        if self._free:
            slot = self._free.pop()
        else:
            self.slots_left -= 1
            slot = memoryview(Slot(SLOT, clear=False))
        opened = OpenRun(lane, self.lanes.hint(lane).kind, slot)
        self._open[id(opened.run)] = opened
        return opened

    # Appending

    def seal(self, opened: OpenRun) -> None:
        """The run takes no more blocks and is appended next."""
        run = opened.run
        del self._open[id(run)]
        if opened.lane.open is opened:
            opened.lane.open = None
        if opened.stage is not None:
            opened.stage.open = None
        for ino in run.owners:
            self.stage(self.namespace.inodes[ino]).shared = 0
        if not run.owners:
            self._release(opened)
            self.lanes.drop_idle(opened.lane)
            return
        if run.held < run.length:
            self.namespace.compact(run)
        run.buffer = opened.slot[: run.length * BLOCK]
        lane = opened.lane
        self._sealed.append(opened)
        lane.queue.append(opened)
        self._start(lane)

    def _start(self, lane: Lane) -> None:
        if not lane.working:
            lane.working = True
            self.nursery.start_soon(self._work, lane)

    async def _work(self, lane: Lane) -> None:
        """Submit the lane's sealed runs in order, a few ahead of the device."""
        while lane.redo or lane.queue:
            rest: Run | None
            if lane.redo:
                opened, rest = lane.redo.popleft()
            else:
                opened = lane.queue.popleft()
                rest = opened.run
            while rest is not None:
                await lane.room.acquire()
                rest = await self._submit(rest, opened)
        lane.working = False
        self.lanes.drop_idle(lane)

    async def _submit(self, run: Run, opened: OpenRun) -> Run | None:
        """Submit the run, or as much as the zone takes; return what is left of it."""
        trouble = self.lanes.trouble
        if trouble.stopped is not None:
            self._give_up(run, opened, trouble.stopped)
            return None
        try:
            place = await self.lanes.claim(opened.lane, run.length)
        except errors.RetainzError as no_space:
            self._give_up(run, opened, no_space)
            return None
        rest = self.namespace.split(run, place.blocks) if place.blocks < run.length else None
        if rest is not None:
            opened.waiting.append(rest)
            opened.parts += 1
        opened.waiting.remove(run)
        self._assign(run, place)
        zone = place.zone
        try:
            async with self.lanes.turn(zone):
                await self.lanes.opened(zone)
                await self.device.ready(zone.index)
                if zone.index in trouble.suspect:
                    what = "an append before it failed"
                    raise errors.ZoneRuleError(self.device.name, zone.index, what)
                assert run.buffer is not None, "a run keeps its bytes until they are on the device"
                at = place.start * BLOCK
                append = self.device.append(zone.index, at, run.buffer, self._header(run))
        except errors.RetainzError as failure:
            self._again(run, place, opened, failure)
        else:
            self.nursery.start_soon(self._complete, run, place, opened, append)
        return rest

    async def _complete(
        self, run: Run, place: Place, opened: OpenRun, append: Awaitable[Sums]
    ) -> None:
        try:
            sums = await append
        except errors.RetainzError as failure:
            self._again(run, place, opened, failure)
            return
        self.lanes.table.written(place.zone, run.blocks * BLOCK)
        self.written += run.blocks * BLOCK
        if run.length > INLINE_SUMS_MAX:
            run.sums = sums.trailer.to_bytes(4, "little")
            self.reader.stored.remember((run.zone, run.epoch, run.start), sums.blocks)
        else:
            run.sums = sums.blocks
        self.lanes.changed()
        self._finished(run, opened)

    def _again(self, run: Run, place: Place, opened: OpenRun, failure: errors.RetainzError) -> None:
        """An append failed: its bytes are still here, and go to another zone."""
        self.write_errors += 1
        opened.lane.zone = None
        self._withdraw(run, place)
        # Whose append stood behind another one that failed is not to blame.
        opened.attempts += self.lanes.trouble.distrust(place.zone, failure)
        self.lanes.changed()
        opened.waiting.append(run)
        stopped = self.lanes.trouble.stopped
        if stopped is not None or opened.attempts >= ATTEMPTS * opened.parts:
            self._give_up(run, opened, stopped or failure)
            return
        opened.lane.room.release()
        opened.lane.redo.append((opened, run))
        self._start(opened.lane)

    def _give_up(self, run: Run, opened: OpenRun, error: errors.RetainzError) -> None:
        opened.waiting.remove(run)
        run.failed = True
        for ino in list(run.owners):
            inode = self.namespace.inodes[ino]
            # A copy that found no place is given up: the original is still there.
            if not (opened.lane.copies and self.namespace.revert(inode, run)):
                self.namespace.fail(inode, error)
        self._finished(run, opened)

    def _header(self, run: Run) -> bytes:
        if run.length <= INLINE_SUMS_MAX:
            return b""
        return layout.trailer_header(run.length, next(iter(run.owners), 0), 0, self.uuid)

    def _assign(self, run: Run, place: Place) -> None:
        run.zone, run.epoch, run.start = place.zone.index, place.zone.epoch, place.start
        if run.owners:
            self.namespace.runs.setdefault(run.zone, {})[run.epoch, run.start] = run
        for ino, count in run.owners.items():
            generation = self.namespace.inodes[ino].generation
            self.lanes.table.add_live(place.zone, generation, count * BLOCK)

    def _withdraw(self, run: Run, place: Place) -> None:
        """Take bytes out of a zone that they did not get to."""
        table, zone = self.lanes.table, place.zone
        self.namespace.runs.get(zone.index, {}).pop((run.epoch, run.start), None)
        for ino, count in run.owners.items():
            generation = self.namespace.inodes[ino].generation
            table.drop_live(zone, generation, count * BLOCK, zone.freed_at)
        run.zone = -1
        table.cancel(zone, run.blocks * BLOCK)

    def _finished(self, run: Run, opened: OpenRun) -> None:
        run.buffer = None
        opened.lane.room.release()
        opened.parts -= 1
        if not opened.parts:
            self._sealed.remove(opened)
            self._release(opened)
        self._wake(run)

    def _wake(self, run: Run) -> None:
        """Whoever waits for the run looks again."""
        event = self._events.pop(id(run), None)
        if event is not None:
            event.set()

    def _release(self, opened: OpenRun) -> None:
        self._free.append(opened.slot)
        self._slot_free.set()
        self._slot_free = trio.Event()

    def _event(self, run: Run) -> trio.Event:
        event = self._events.get(id(run))
        if event is None:
            event = self._events[id(run)] = trio.Event()
        return event
