"""Rounds: everything that wants to be durable at one time shares one device flush.

A round is drain → collect → device flush → journal batches → journal flush → replies. What arrives
during a round joins the next. Records are numbered by the round that carries them, so "durable"
is one comparison.

Invariants
- An operation's records stay in one batch, unless they only map bytes; a crash shows it whole or
  not at all.
- A record that names extents follows the flush of their bytes.
- Between draining an inode and collecting it nobody writes to it: the round holds its lock.
- After the first failure nothing is ever acknowledged again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

import trio

from retainzfs import errors, failpoints, layout
from retainzfs.device import Device
from retainzfs.journal import Journal
from retainzfs.layout import BLOCK, BatchKind
from retainzfs.namespace import Inode, Namespace
from retainzfs.stream import Stream

METADATA_INTERVAL_S = 1.0  # queued records reach the log within this time
DATA_INTERVAL_S = 5.0  # dirty data reach the device within this time, in every class
MAPS_A_BATCH = 256  # records of a large file that go out as one piece; they fit into any batch
MEASURE = 1 / 16  # of a snapshot: with so much log behind it, another one may find less


class Committer:
    def __init__(
        self,
        device: Device,
        journal: Journal,
        namespace: Namespace,
        stream: Stream,
        clock_s: Callable[[], float],
        durable: Callable[[], None],
        interval_s: float = DATA_INTERVAL_S,
    ) -> None:
        self.device = device
        self.journal = journal
        self.namespace = namespace
        self.stream = stream
        self.clock_s = clock_s
        self.round = 1  # carries what is queued now
        self.durable_round = 0
        self.dirty: dict[int, Inode] = {}
        self._generations: dict[int, int] = {}  # generation → round of its newest record
        self.failed: errors.RetainzError | None = None
        self.rounds = 0
        self.snapshots = 0  # that are complete
        self.interval_s = interval_s
        self._durable = durable
        self._queue: list[bytes | int] = []  # operations, and inodes whose bytes go before the next
        self._queued = 0  # bytes in the queue
        self._looked_s = -math.inf  # when the dirty inodes were last searched for due ones
        self._waiting: list[tuple[list[Inode], trio.Event]] = []
        self._wake = trio.Event()
        self._flushed = 0  # the stream's count of written bytes at the last flush
        self._snapshot: Iterator[layout.Record] | None = None
        self._snapshot_size = 0
        self._grown = 0  # bytes by which the log since the newest snapshot may enlarge the next
        self._shrunk = 0  # bytes that the next snapshot holds no more, about
        self._before = (0, 0)  # those two when the snapshot that is being written began
        self._busy = trio.Lock()
        self._closed = False
        self._late: list[trio.Event] = []

    # Queueing

    def log(self, *records: layout.Record) -> None:
        """Apply the records of one operation and queue them for the next round."""
        for record in records:
            self._shrunk += _superseded(self.namespace, record)
            self.namespace.apply(record)
            if isinstance(record, layout.InodeRecord | layout.SizeRecord):
                self.namespace.inodes[record.ino].changed = self.round
            elif isinstance(record, layout.GenerationRecord):
                self._generations[record.generation] = self.round
        encoded = layout.encode_all(records)
        self._queue.append(encoded)
        self._queued += len(encoded)

    def log_each(self, records: Iterable[layout.Record]) -> None:
        """Queue records that do not depend on each other, each an operation of its own."""
        for record in records:
            self.log(record)

    @property
    def _maps(self) -> int:
        """Bytes of records for the extents that the journal does not know; each may split one."""
        return 2 * layout.MAP_MAX * self.namespace.fresh

    @property
    def metadata(self) -> int:
        """Bytes of records that a snapshot would take now, at most; exact just behind one."""
        return self.journal.snapshot_size + self._grown + self._queued + self._maps

    def growth_left(self, share: float) -> int:
        """Return by how many bytes metadata can grow within a share of its budget."""
        most = self.metadata + self.journal.snapshot_size * MEASURE
        return max(0, int(self.journal.budget * share - most))

    async def make_way(self) -> None:
        """Return when little enough is queued for an operation to queue its records."""
        if self._maps > self.journal.queue_max:
            await self.commit(list(self.dirty.values()))
        elif self._queued > self.journal.queue_max:
            await self.commit()

    async def admit_growth(self, share: float) -> None:
        """Metadata is about to grow. Raises NoSpace beyond a share of the budget for it.

        What was deleted counts until the next snapshot, so one is written where that may help.
        """
        limit = int(self.journal.budget * share)
        if self.metadata <= limit:
            return
        known = self.journal.snapshot_size
        if self.metadata - known + self._shrunk > known * MEASURE:
            await self.snapshot()
        if self.metadata > limit:
            raise errors.NoSpace("the metadata zones are nearly full; delete files")

    def order(self, inode: Inode) -> None:
        """What is logged next becomes durable no sooner than the inode's bytes."""
        self._queue.append(inode.ino)

    def touch(self, inode: Inode, interval_s: float | None = None) -> None:
        """The inode has bytes that the journal does not know, and shall soon."""
        if inode.ino not in self.dirty:
            self.dirty[inode.ino] = inode
            inode.due_s = self.clock_s() + (interval_s or self.interval_s)

    def clean(self, inode: Inode) -> bool:
        """Whether all is durable of the inode, and of what its generation counts as."""
        newest = max(inode.changed, self._generations.get(inode.generation, 0))
        return inode.ino not in self.dirty and newest <= self.durable_round

    def forget(self, inode: Inode) -> None:
        self.dirty.pop(inode.ino, None)

    # Committing

    async def commit(self, inodes: Iterable[Inode] = ()) -> None:
        """Return when everything queued, and the bytes of these inodes, are durable."""
        if self.failed is not None:
            raise self.failed
        if self._closed:
            raise errors.ReadOnly(self.journal.device.name, "it is being unmounted")
        done = trio.Event()
        self._waiting.append((list(inodes), done))
        self._wake.set()
        await done.wait()
        if self.failed is not None:
            raise self.failed
        if done in self._late:
            raise errors.ReadOnly(self.journal.device.name, "it is being unmounted")

    async def run(self) -> None:
        """Serve rounds until `close` or a failure."""
        while self.failed is None and not self._closed:
            with trio.move_on_after(METADATA_INTERVAL_S):
                await self._wake.wait()
            self._wake = trio.Event()
            try:
                await self._turn()
            except errors.RetainzError as error:
                self.fail(error)

    async def _turn(self) -> None:
        async with self._busy:
            if self._closed:
                return
            await self._round()
            if self._snapshot is not None:
                await self._advance_snapshot()
            elif self.journal.due(self.metadata):
                whole = not self.journal.spacious(self.metadata)
                await (self._close_snapshot() if whole else self._advance_snapshot())

    def fail(self, error: errors.RetainzError) -> None:
        """Sticky: nothing is acknowledged from here on."""
        if error.errno in errors.GONE:
            error = errors.DeviceGone(self.device.name, error)
        self.failed = self.failed or error
        self._wake.set()
        for _, done in self._waiting:
            done.set()
        self._waiting = []

    async def _round(self, *, closing: bool = False) -> None:
        """Commit what waits; with `closing` as the last part of a snapshot.

        So ends also a round that would leave no room for the snapshot of a mount after a crash.
        """
        waiting, self._waiting = self._waiting, []
        try:
            wanted = self._wanted(waiting)
            if wanted or self._queue or closing:
                closing = closing or not self._admitted()
                # What the slices see and the log does not hold yet is in this round.
                while closing and await self._slice():
                    failpoints.reach("snapshot-sliced")
                await self._commit(wanted, closing=closing)
        except errors.RetainzError as error:
            self.fail(error)
            for _, done in waiting:
                done.set()
            raise
        # Not in a finally: an error that is none of ours must not wake anybody as if all were well.
        for _, done in waiting:
            done.set()

    def _wanted(self, waiting: list[tuple[list[Inode], trio.Event]]) -> list[Inode]:
        inodes = {i.ino: i for group, _ in waiting for i in group if i.ino in self.dirty}
        now = self.clock_s()
        if now >= self._looked_s + METADATA_INTERVAL_S or now < self._looked_s:
            self._looked_s = now
            inodes |= {ino: inode for ino, inode in self.dirty.items() if inode.due_s <= now}
        return [inodes[ino] for ino in sorted(inodes)]

    def _admitted(self) -> bool:
        """Whether a round leaves room for the snapshot of a mount after a crash."""
        return self.journal.admits(self._queued + self._maps, self.metadata)

    async def _commit(self, inodes: list[Inode], *, closing: bool) -> None:
        held: dict[int, Inode] = {}
        try:
            pending = inodes or self._ordered_but(held)
            while pending:
                for inode in pending:
                    await self.stream.stage(inode).lock.acquire()
                    held[inode.ino] = inode
                for inode in pending:
                    self.stream.seal_of(inode)
                for inode in pending:
                    await self.stream.drain(inode)
                pending = self._ordered_but(held)
            operations = self._operations(held)
        finally:
            for inode in held.values():
                self.stream.stage(inode).lock.release()
        # Where zones are scarce the snapshot and this log count together or not at all: a mount
        # after a crash has its zones back.
        apart = not closing or self.journal.admits(sum(map(len, operations)), self.metadata)
        current = self.round
        self.round += 1
        self.rounds += 1
        failpoints.reach("commit-drained")
        if self.stream.written != self._flushed:
            written = self.stream.written
            await self.device.flush()
            self._flushed = written
            failpoints.reach("commit-flushed")
        kind = BatchKind.LOG if apart else BatchKind.SNAPSHOT_LOG
        for payload in self._batches(operations):
            await self.journal.append(kind, payload, self.clock_s())
            self._grown += len(payload)
        if closing:
            await self.journal.append(BatchKind.SNAPSHOT_END, b"", self.clock_s())
        failpoints.reach("commit-logged")
        await self.journal.flush()
        failpoints.reach("commit-durable")
        if closing:
            self._snapshot = None
            self.snapshots += 1
            self.journal.snapshot_complete(self._snapshot_size)
            self._grown -= self._before[0]
            self._shrunk -= self._before[1]
            failpoints.reach("snapshot-ended")
        self.durable_round = current
        self._generations = {g: r for g, r in self._generations.items() if r > current}
        self._durable()

    def _ordered_but(self, held: dict[int, Inode]) -> list[Inode]:
        """Return the inodes whose bytes must come before something queued, other than `held`."""
        numbers = {entry for entry in self._queue if isinstance(entry, int)}
        return [self.dirty[n] for n in sorted(numbers) if n in self.dirty and n not in held]

    def _operations(self, drained: dict[int, Inode]) -> list[bytes]:
        """Take the queue, and add what drained inodes hold.

        Bytes that were ordered before an operation stand before it, and once more behind the queue:
        it may hold older sizes of the same file. Attributes always go behind: an earlier batch
        must not count links that a later one makes.
        """
        queue, self._queue = self._queue, []
        self._queued = 0
        operations: list[bytes] = []
        pieces: dict[int, list[bytes]] = {}
        for entry in queue:
            if isinstance(entry, bytes):
                operations.append(entry)
            elif self._collectable(entry):
                pieces[entry] = self._collect(self.dirty[entry])
                operations += pieces[entry]
        for ino in drained:
            if self._collectable(ino):
                pieces[ino] = self._collect(self.dirty[ino])
        for ino, records in pieces.items():
            inode = self.namespace.inodes.get(ino)
            if inode is not None:
                operations += [*records, layout.encode(self.namespace.describe(inode))]
        return operations

    def _collectable(self, ino: int) -> bool:
        return ino in self.dirty and self.dirty[ino].error is None

    def _collect(self, inode: Inode) -> list[bytes]:
        records = list(self.namespace.collect(inode))
        self._grown += layout.MAP_MAX * len(records)  # each may cut an extent in two
        inode.changed = self.round
        self.forget(inode)
        pieces = range(0, len(records), MAPS_A_BATCH)
        return [layout.encode_all(records[i : i + MAPS_A_BATCH]) for i in pieces]

    def _batches(self, operations: list[bytes]) -> Iterator[bytes]:
        limit = self.journal.batch_max
        batch: list[bytes] = []
        size = 0
        for operation in operations:
            assert len(operation) <= limit, "an operation fits into one batch"
            if size + len(operation) > limit:
                yield b"".join(batch)
                batch, size = [], 0
            batch.append(operation)
            size += len(operation)
        if batch:
            yield b"".join(batch)

    # Snapshots

    async def snapshot(self) -> None:
        """Write a whole snapshot and return when it is the one that a mount would take."""
        async with self._busy:
            if self._closed:
                raise errors.ReadOnly(self.journal.device.name, "it is being unmounted")
            await self._close_snapshot()

    async def _close_snapshot(self) -> None:
        """Write what is missing of a snapshot, all of it if none has begun."""
        await self._round(closing=True)

    async def _advance_snapshot(self) -> None:
        """Write the next slice; behind the last one a round makes the snapshot valid."""
        if await self._slice():
            failpoints.reach("snapshot-sliced")
            self._wake.set()
        else:
            await self._close_snapshot()

    async def _slice(self) -> bool:
        """Write the next slice of the snapshot, of a new one if none has begun.

        Returns False when there is nothing left to write.
        """
        if self._snapshot is None:
            clock_s = self.clock_s()
            await self.journal.append(BatchKind.SNAPSHOT_BEGIN, b"", clock_s, self.metadata)
            failpoints.reach("snapshot-begun")
            self._before = (self._grown, self._shrunk)
            self._snapshot = state(self.namespace)
            self._snapshot_size = 0
        pieces: list[bytes] = []
        size = 0
        for record in self._snapshot:
            piece = layout.encode(record)
            pieces.append(piece)
            size += len(piece)
            if size >= self.journal.slice_max:
                break
        if pieces:
            await self.journal.append(BatchKind.SNAPSHOT, b"".join(pieces), self.clock_s())
            self._snapshot_size += size
        return bool(pieces)

    async def close(self) -> None:
        """Commit everything, write a snapshot, and mark the log as cleanly ended."""
        async with self._busy:
            for inode in self.dirty.values():
                inode.due_s = 0.0
            self._looked_s = -math.inf
            await self._round()
        await self.snapshot()
        async with self._busy:
            await self._round()
            await self.journal.append(BatchKind.CLEAN, b"", self.clock_s())
            await self.journal.flush()
            self._closed = True
            self._wake.set()
            self._late = [done for _, done in self._waiting]  # they came behind the last round
            for done in self._late:
                done.set()


def _superseded(namespace: Namespace, record: layout.Record) -> int:
    """Return about how many bytes of a snapshot the record makes unnecessary."""
    if isinstance(record, layout.UnlinkRecord):
        return len(record.name)
    inode = namespace.inodes.get(getattr(record, "ino", 0))
    if inode is None:
        return 0
    match record:
        case layout.FreeRecord():
            own = sum(len(value) for value in (inode.xattrs or {}).values())
            return own + len(inode.content) + layout.MAP_MAX * (1 + len(inode.extents))
        case layout.SizeRecord(_, size):
            return layout.MAP_MAX * (len(inode.extents) - inode.find(-(-size // BLOCK)))
        case layout.XattrRecord(_, name) | layout.XattrRemovedRecord(_, name):
            return len((inode.xattrs or {}).get(name, b""))
    return 0


def state(namespace: Namespace) -> Iterator[layout.Record]:
    """Yield every key as the journal knows it when its turn comes."""
    yield layout.CountersRecord(namespace.next_ino, namespace.next_generation, namespace.next_order)
    for ino in sorted(namespace.inodes):
        inode = namespace.inodes.get(ino)
        if inode is not None:
            yield from list(namespace.known(inode))
    for zone, epoch in sorted(namespace.zone_epochs.items()):
        yield layout.ZoneRecord(zone, epoch)
    for generation in sorted(namespace.generations):
        record = namespace.generations.get(generation)
        if record is not None:
            yield record
