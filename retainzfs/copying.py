"""Moving what lives in a zone: where each piece goes, and the move itself.

A piece is what one generation has in the zone. It goes to tails of its kind as long as nothing that
is staged counts on them, and what they do not hold to the zone of copies, which is the emergency
zone once it is begun. The move is made with the writer's own machinery (stage, append, commit), so
it needs no crash rules of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import NamedTuple

from retainzfs import errors
from retainzfs.committer import Committer
from retainzfs.lanes import Lanes
from retainzfs.layout import BLOCK, INLINE_SUMS_MAX, RUN_BLOCKS_MAX
from retainzfs.namespace import Extent, Inode, Namespace
from retainzfs.placement import Step, collection
from retainzfs.planning import DATA_KINDS, Lane, usable
from retainzfs.stream import Stream
from retainzfs.zone import Kind, Zone, ZoneSummary, summary

COPIES = -1000  # lane keys of copies, below those of the kinds; one for each zone that they go to
COPIES_APART = COPIES - len(Kind)


class Routes(NamedTuple):
    """`tails`: generation → (zone, data blocks) in order; the rest goes to the zone of copies.
    `reserve`: whether what finds a tail taken may go there too."""

    tails: dict[int, list[tuple[int, int]]]
    reserve: bool


class Copier:
    def __init__(
        self,
        lanes: Lanes,
        stream: Stream,
        namespace: Namespace,
        committer: Committer,
        now_s: Callable[[], float],
        kept: Callable[[Inode], AbstractContextManager[None]],
    ) -> None:
        self.lanes = lanes
        self.table = lanes.table
        self.stream = stream
        self.namespace = namespace
        self.committer = committer
        self.now_s = now_s
        self.kept = kept  # keeps an inode from being freed
        self.copied = 0  # bytes
        self._kinds: dict[int, Kind] = {}  # zone of copies → kind of what has no generation in it

    # Where to

    def kind_of(self, generation: int, zone: Zone) -> Kind:
        """The kind of a generation's bytes; of what has none, that of its zone."""
        if generation:
            return self.lanes.kind_of(generation)
        return self._kinds.get(zone.index, zone.kind)

    def tails(self, victim: Zone) -> list[Zone]:
        """Zones of the victim's kinds that take more."""
        kinds = {self.table.group(self.kind_of(generation, victim)) for generation in victim.live}
        found = [zone for kind in sorted(kinds) for zone in self.table.partial(kind)]
        return [zone for zone in found if zone is not victim and zone.kind is not Kind.COLLECTION]

    def routes(
        self, victim: Zone, tails: Sequence[Zone] | None = None, *, fresh: bool = True
    ) -> Routes | None:
        """How to empty a zone, by default into any tails; None if there is no room for that.
        Without `fresh` the zone of copies is not for it."""
        now, unit = self.now_s(), self.lanes.unit_s()
        seen: dict[Kind, dict[int, ZoneSummary]] = {}
        for zone in self.tails(victim) if tails is None else tails:
            tail = _data(summary(zone, self.lanes.retire_of, now, unit))
            seen.setdefault(self.table.group(zone.kind), {})[zone.index] = tail
        budget = self.lanes.spare() - (usable(victim.tail) if victim.partial else 0)
        routes: dict[int, list[tuple[int, int]]] = {}
        rest = victim.live_bytes
        for piece in self.pieces(victim):
            kind = self.table.group(self.kind_of(piece.generation, victim))
            for into, nbytes in collection.into_tails(
                piece,
                seen.get(kind, {}),
                self.table.capacity,
                unit,
                apart=self.lanes.policy.apart,
            ):
                blocks = nbytes // BLOCK
                if blocks + 2 > budget:
                    break
                routes.setdefault(piece.generation, []).append((into, blocks))
                budget -= blocks + 2
                rest -= nbytes
        room = self._room() if fresh else 0
        reserve = self._blocks(victim, victim.live_bytes) <= room
        if not reserve and rest and self._blocks(victim, rest) > room:
            return None
        return Routes(routes, reserve)

    def apart(self) -> Routes:
        """How to empty a zone to fresh zones only."""
        return Routes({}, reserve=True)

    def pieces(self, zone: Zone) -> list[collection.Piece]:
        """What each generation has in a zone, the largest first."""
        retire_of = self.lanes.retire_of
        pieces = (collection.Piece(g, n, retire_of(g)) for g, n in zone.live.items())
        return sorted(pieces, key=lambda piece: (-piece.size, piece.generation))

    def _room(self) -> int:
        """Blocks that the zone of copies has, begun or not."""
        room = sum(usable(zone.tail) for zone in self.table.active(Kind.COLLECTION))
        if self.table.empty and not self.table.borrowed:
            room += self.table.capacity // BLOCK
        return room

    def _blocks(self, victim: Zone, nbytes: int) -> int:
        """Blocks that so much of a victim takes at most: each file may get a run of its own, with a
        trailer. Where not all has a place the emergency zone would be lost to some of it."""
        runs = self.namespace.runs.get(victim.index, {}).values()
        files = len({ino for run in runs for ino in run.owners})
        blocks = nbytes // BLOCK
        return blocks + min(files, blocks // INLINE_SUMS_MAX) + blocks // RUN_BLOCKS_MAX + 1

    # The move

    async def move(
        self, victim: Zone, routes: Routes, stop: Callable[[], bool] = lambda: False
    ) -> tuple[list[Inode], bool]:
        """Copy what lives in a zone. Return the inodes whose bytes were moved, to be committed, and
        whether some bytes had to stay. It ends early when `stop` says so."""
        moved: dict[int, Inode] = {}
        stuck = False
        lanes = self._lanes(victim, routes)
        left = {g: deque(tails) for g, tails in routes.tails.items()}
        try:
            for run in list(self.namespace.runs.get(victim.index, {}).values()):
                for ino in list(run.owners):
                    inode = self.namespace.inodes.get(ino)
                    if inode is None or run.failed or stop():
                        continue
                    if inode.error is not None:
                        stuck = True
                        continue
                    with self.kept(inode):
                        async with self.stream.stage(inode).lock:
                            for extent in [e for e in inode.extents if e.run is run]:
                                for part, zone in self._parts(inode, extent, left):
                                    stuck |= not await self._move(inode, part, lanes[zone])
                    moved[ino] = inode
        finally:
            for lane in lanes.values():
                lane.closed = True
                if lane.open is not None:
                    self.stream.seal(lane.open)
                self.lanes.drop_idle(lane)
        return list(moved.values()), stuck

    def _lanes(self, victim: Zone, routes: Routes) -> dict[int | None, Lane]:
        """A lane for each zone that something goes to, and one for the rest."""
        kind = victim.kind
        rest = self.lanes.lane(COPIES - kind, kind, copies=True)
        lanes: dict[int | None, Lane] = {None: rest}
        blocks: dict[int, int] = {}
        for zone, count in (tail for tails in routes.tails.values() for tail in tails):
            blocks[zone] = blocks.get(zone, 0) + count
        for zone, count in blocks.items():
            lane = lanes[zone] = self.lanes.lane(COPIES_APART - zone, kind, copies=True)
            lane.steps = deque([Step(zone, count * BLOCK)])
            lane.reserve = routes.reserve
        for lane in lanes.values():
            lane.closed, lane.zone = False, None
        return lanes

    @staticmethod
    def _parts(
        inode: Inode, extent: Extent, left: dict[int, deque[tuple[int, int]]]
    ) -> Iterator[tuple[Extent, int | None]]:
        """Cut an extent to what its generation has left in each tail."""
        tails = left.get(inode.generation)
        start = extent.block
        while start < extent.end:
            end, into = extent.end, None
            if tails:
                into, blocks = tails.popleft()
                end = min(end, start + blocks)
                if blocks > end - start:
                    tails.appendleft((into, blocks - (end - start)))
            for part in list(inode.spans(start, end)):
                if part.run is extent.run:
                    yield part, into
            start = end

    async def _move(self, inode: Inode, extent: Extent, lane: Lane) -> bool:
        """Return False for bytes that cannot be read: they stay, and their file answers EIO."""
        try:
            if await self.stream.rewrite(inode, extent, lane):
                self.copied += extent.blocks * BLOCK
                self.committer.touch(inode)
        except errors.Unreadable:
            return False
        return True

    # Afterwards

    def adopt(self, victim: Kind) -> None:
        """Let data fill what copies have left of their zone, if the ledger has a slot for it and
        all of it is of one kind; `victim` is that of the zone which they came from."""
        for zone in self.table.active(Kind.COLLECTION):
            if victim is not Kind.COLLECTION:
                self._kinds[zone.index] = victim
            kinds = {self.table.group(self.kind_of(g, zone)) for g in zone.live}
            kind = next(iter(kinds), Kind.COLLECTION)
            if len(kinds) != 1 or kind not in DATA_KINDS:
                continue
            if zone.partial and not zone.reserved and self.table.has_slot(kind):
                self.table.adopt(zone, kind)


def _data(seen: ZoneSummary) -> ZoneSummary:
    """A tail without what trailers take of it."""
    blocks = usable(seen.tail)
    return replace(seen, tail=max(0, blocks - blocks // RUN_BLOCKS_MAX - 1) * BLOCK)
