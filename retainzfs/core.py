"""The parts of a volume, how they are put together, and its life up to the last batch."""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from typing import Self

import trio

from retainzfs import errors, layout, lifetimes, placement, recovery
from retainzfs.admitting import Admission
from retainzfs.committer import DATA_INTERVAL_S, Committer
from retainzfs.compaction import Compaction
from retainzfs.config import Configured, StreamTable
from retainzfs.copying import Copier
from retainzfs.device import Device
from retainzfs.lanes import Lanes
from retainzfs.layout import BLOCK
from retainzfs.namespace import Inode, Namespace, Run
from retainzfs.placement import admission, collection
from retainzfs.placement.admission import Rule
from retainzfs.planning import Lane
from retainzfs.reader import Reader
from retainzfs.reclaim import Reclaim
from retainzfs.retention import Retention
from retainzfs.scrub import Scrub
from retainzfs.stream import POOL, Stream
from retainzfs.streams import State
from retainzfs.trouble import Trouble
from retainzfs.zones import ZoneTable

log = logging.getLogger(__name__)

GROWTH = 7 / 8  # of the budget for metadata: files and their bytes
RESERVE = 1.0  # longer names and policies, which a full filesystem still takes


@dataclass(frozen=True)
class Options:
    """How a volume is mounted. `commit`: close, fsync, or the seconds between commits.

    Raises UsageError for a policy, a rule or a rank that there is not.
    """

    commit: lifetimes.Durability = "fsync"
    policy: str = "plan"
    admission: str = ""  # a rule of placement.admission; "" is the policy's usual one
    rank: str = "dead-time"  # of placement.collection
    pool: int = POOL  # bytes of staging memory
    streams: tuple[StreamTable, ...] = ()  # of the configuration
    wall_ns: Callable[[], int] = time.time_ns
    monotonic_s: Callable[[], float] = time.monotonic

    def __post_init__(self) -> None:
        placement.policy(self.policy)
        self.rule()
        collection.ranking(self.rank)

    def rule(self) -> Rule:
        """The rule by which saves are admitted."""
        return admission.rule(admission.usual(self.admission, self.policy))


@dataclass(frozen=True, slots=True)
class StatFs:
    block_size: int
    blocks: int
    free: int
    available: int
    files: int
    files_free: int
    name_max: int = layout.NAME_MAX


class Accounts:
    """Keeps the zones' live bytes in step with the extents."""

    def __init__(self, table: ZoneTable, round_of: Callable[[], int]) -> None:
        self.table = table
        self.round_of = round_of

    def gain(self, inode: Inode, run: Run, count: int) -> None:
        if run.zone >= 0 and not run.failed:
            self.table.add_live(self.table[run.zone], inode.generation, count * BLOCK)

    def lose(self, inode: Inode, run: Run, count: int) -> None:
        if run.zone >= 0 and not run.failed:
            zone = self.table[run.zone]
            self.table.drop_live(zone, inode.generation, count * BLOCK, self.round_of())

    def regroup(self, inode: Inode, generation: int) -> None:
        for extent in (*inode.extents, *(inode.shadow or ())):
            run = extent.run
            if run.zone >= 0 and not run.failed:
                zone = self.table[run.zone]
                nbytes = extent.blocks * BLOCK
                self.table.move_live(zone, inode.generation, generation, nbytes)


class Core:
    """A mounted volume without its operations; made by `mounted`."""

    def __init__(
        self,
        device: Device,
        options: Options,
        recovered: recovery.Recovered,
        nursery: trio.Nursery,
    ) -> None:
        self.device = device
        self.options = options
        self.namespace: Namespace = recovered.namespace
        self.journal = recovered.journal
        self.uuid = self.journal.superblock.uuid
        self.rolled_back = recovered.rolled_back
        self.nursery = nursery
        self._clock_base_s = recovered.clock_s - options.monotonic_s()
        self.retention = Retention(self.namespace, self.now_s, Configured(options.streams))
        self.namespace.count_links()
        self.retention.restore()
        self.table = recovery.rebuild_table(device, self.namespace, self.retention)
        self.trouble = Trouble(device, self.table, self.namespace, nursery, self.now_s)
        self.lanes = Lanes(
            device,
            self.table,
            self.trouble,
            placement.policy(options.policy),
            self.retention,
            self.now_s,
        )
        self.reader = Reader(device, self.table, self.namespace, self.trouble)
        self.reader.left = self.lanes.changed
        self.stream = Stream(device, self.lanes, self.reader, self.uuid, nursery, pool=options.pool)
        self.lanes.staged = self.stream.staged
        self.committer = Committer(
            device,
            self.journal,
            self.namespace,
            self.stream,
            self.now_s,
            self._now_durable,
            options.commit if isinstance(options.commit, float) else DATA_INTERVAL_S,
        )
        self.trouble.stop = self.committer.fail
        self.trouble.turned = self._zones_changed
        self.namespace.lost = self.lost
        self.namespace.ledger = Accounts(self.table, lambda: self.committer.round)
        self.copier = Copier(
            self.lanes, self.stream, self.namespace, self.committer, self.now_s, self.kept
        )
        self.reclaim = Reclaim(
            device,
            self.lanes,
            self.stream,
            self.namespace,
            self.committer,
            self.copier,
            self.now_s,
            collection.ranking(options.rank),
        )
        self.admission = Admission(
            self.lanes,
            self.reclaim,
            self.namespace,
            options.rule(),
            self.retention.due,
            self.retention.members,
        )
        self.compaction = Compaction(
            self.lanes,
            self.reclaim,
            self.now_s,
            lambda: self.logical,
            compacts=self.lanes.policy.compacts,
        )
        self.scrub = Scrub(device, self.table, self.namespace, nursery, self.reader.tell)
        self.logical = 0  # bytes that programs wrote
        self.failure_event = trio.Event()

    @staticmethod
    async def format(device: Device, *, uuid: bytes, now_ns: int) -> None:
        """Write an empty volume to a started device."""
        await recovery.format_volume(device, uuid, now_ns)

    @classmethod
    @asynccontextmanager
    async def mounted(cls, device: Device, options: Options) -> AsyncIterator[Self]:
        """Recover the volume of a started device; on leaving, commit and end the log cleanly.

        Raises ForeignTarget, NewerFormat or Damaged, and then has changed nothing.
        """
        recovered = await recovery.recover(device)
        await device.settle()
        recovered.journal.settled()
        async with trio.open_nursery() as nursery:
            volume = cls(device, options, recovered, nursery)
            if recovered.rolled_back:
                log.warning("rolled back %d bytes of unfinished log", recovered.rolled_back)
            if recovered.fallback:
                log.warning(
                    "the newest snapshot of the metadata is damaged, nothing is lost: %s;"
                    " the one before it was read, and a new one is written",
                    recovered.fallback,
                )
            for ino in recovered.orphans:
                volume.discard(volume.namespace.get(ino))
            for record in list(volume.namespace.generations.values()):
                if record.generation not in volume.retention.members:
                    volume.committer.log(record._replace(state=State.DELETED))
                elif record.state == State.WRITING and not (
                    recovered.clean and volume.retention.closed(record.generation)
                ):
                    ended = "the mount ended while it was being written"
                    records = volume.retention.incomplete(record.generation, ended)
                    volume.committer.log_each(records)
            for generation in volume.retention.torn:
                moved = "its files were being moved when the mount ended"
                volume.committer.log_each(volume.retention.incomplete(generation, moved))
            volume.committer.log_each(volume.retention.reconfigured())
            if not recovered.clean:
                await volume._begin_anew()
            nursery.start_soon(volume._serve)
            if volume.failed is None:
                await volume.reclaim.reset_dead()
                volume._zones_changed()
            nursery.start_soon(volume.compaction.run)
            yield volume
            volume.scrub.stop()
            await volume.compaction.end()
            if volume.failed is None:
                for inode in [i for i in volume.namespace.inodes.values() if not i.nlink]:
                    volume.discard(inode)  # nobody can use it any more
                await volume.committer.close()
                volume._tell_of_losses()
            else:
                nursery.cancel_scope.cancel()

    async def _begin_anew(self) -> None:
        """Write the snapshot that an unclean log wants; without room for it nothing is written."""
        try:
            await self.committer.snapshot()
        except errors.NoSpace:
            what = "the metadata zones have no room for a new snapshot; copy the files elsewhere"
            self.committer.failed = errors.NoSpace(what)

    async def _serve(self) -> None:
        await self.committer.run()
        if self.failed is not None:
            log.error("the filesystem stops: %s", self.failed)
            self.failure_event.set()

    @property
    def failed(self) -> errors.RetainzError | None:
        return self.committer.failed

    def now_s(self) -> float:
        """Return the mount's timeline: seconds that the volume was mounted so far."""
        return self._clock_base_s + self.options.monotonic_s()

    def lane(self, inode: Inode) -> Lane:
        """Return the lane that an inode's next bytes take."""
        if inode.generation in self.namespace.generations:
            return self.lanes.lane(inode.generation)
        kind = self.retention.kind_of(inode)
        return self.lanes.lane(-int(kind), kind)

    def open(self, ino: int) -> None:
        self.namespace.get(ino).handles += 1

    def close(self, ino: int) -> None:
        inode = self.namespace.get(ino)
        inode.handles -= 1
        assert inode.handles >= 0, "an inode is closed as often as it was opened"
        if inode.nlink == 0 and not inode.in_use:
            self.discard(inode)

    def forget(self, ino: int, count: int) -> bool:
        """So many lookups of an inode are not remembered any more; return whether none is."""
        inode = self.namespace.inodes.get(ino)
        if inode is None:
            return True  # it was reaped
        inode.lookups -= count
        assert inode.lookups >= 0, "an inode is forgotten as often as it was looked up"
        if inode.nlink == 0 and not inode.in_use:
            self.discard(inode)
        return inode.lookups == 0

    @contextmanager
    def kept(self, inode: Inode) -> Iterator[None]:
        """Whoever awaits in the middle of changing an inode holds it open meanwhile, so that the
        last name going does not free it."""
        self.open(inode.ino)
        try:
            yield
        finally:
            self.close(inode.ino)

    def discard(self, inode: Inode) -> None:
        """The last name is gone, and nobody uses the inode."""
        records = self.left(inode)
        self.committer.forget(inode)
        self.committer.log(layout.FreeRecord(inode.ino), *records)

    def left(self, inode: Inode) -> list[layout.Record]:
        """Return the records of an inode that leaves its generations; the last one ends them."""
        return self.belongs(inode, set())

    def belongs(self, inode: Inode, generations: set[int]) -> list[layout.Record]:
        """Return the records of an inode that is in these generations from now on, no others."""
        records: list[layout.Record] = []
        for generation in self.retention.joins(inode, generations):
            ended = self.retention.left(generation, inode.ino)
            if ended:
                self.lanes.close(generation)
            records += ended
        return records

    def _tell_of_losses(self) -> None:
        """What nobody has asked for since its write failed is lost with the mount."""
        for inode in self.committer.dirty.values():
            if inode.error is not None:
                path = self.namespace.path(inode.ino)
                log.error("%s: its last changes are lost: %s", path, inode.error)

    def _now_durable(self) -> None:
        if self.table.resettable(self.committer.durable_round):
            self.nursery.start_soon(self.reclaim.reset_dead)
        self._zones_changed()

    def lost(self, inode: Inode) -> None:
        """Bytes of a file are lost. A round that is under way may say that its generation is
        complete: what is logged now comes behind that."""
        if inode.generation:
            inode.doubt = "a write to it failed"
            self.committer.log_each(self.retention.incomplete(inode.generation, inode.doubt))

    def _zones_changed(self) -> None:
        """Perhaps there are read-only zones now, or there is room for what lives in them."""
        if self.reclaim.drainable():
            self.nursery.start_soon(self._drain)

    async def _drain(self) -> None:
        with suppress(errors.RetainzError):  # the volume has stopped, and has told why
            await self.reclaim.drain()

    def _check(self) -> None:
        if self.committer.failed is not None:
            raise errors.ReadOnly(self.device.name, self.committer.failed)

    async def _admit(self, growth: float | None = None) -> None:
        """An operation is about to queue records: wait while too many are queued.

        It may let metadata grow up to the share `growth` of the budget; None: it makes nothing
        grow. Raises ReadOnly, NoSpace.
        """
        self._check()
        await self.committer.make_way()
        if growth is not None:
            await self.committer.admit_growth(growth)
