"""When generations retire: what policy says, corrected by what their streams have taught."""

from __future__ import annotations

import math
from collections.abc import Iterator
from statistics import median
from typing import Any

from retainzfs import layout, lifetimes, streams
from retainzfs.lanes import Hint
from retainzfs.membership import Membership
from retainzfs.namespace import Inode
from retainzfs.streams import State, Stream
from retainzfs.zones import Kind

CADENCE_GUESS_S = 60.0  # of the very first stream, until its second save
GUESSED = b"; ranked with the latest known retirement"  # end of the origin of a mere rank
LONG = 32  # generations; a stream with more looks at all of them not at every save
STATED = (b"anchor=", b"keep_every=", b"retire=")  # origins of what was not left to retention
E_PER_CADENCE = 4.0  # placement's constants are in quarters of a cadence


class Forecast(Membership):
    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.announced: dict[int, dict[int, int]] = {}  # generation → inode → promised size
        self._unit: float | None = None

    def cadence_of(self, stream: Stream) -> float | None:
        """Return the seconds between saves, declared or learned."""
        inode = self.namespace.inodes.get(stream.ino)
        declared = self.policy_of(inode).cadence_s if inode is not None else None
        return declared or stream.history.cadence_s

    def counted(self, stream: Stream) -> list[layout.GenerationRecord]:
        """Return the generations that count as complete, the last completed first."""
        weak = () if stream.marked else (State.PRESUMED,)
        states = (State.COMPLETE, *weak)
        counted = [record for record in self.records(stream) if record.state in states]
        return sorted(counted, key=lambda record: -record.order)

    def learned(self, stream: Stream, policy: lifetimes.Policy) -> lifetimes.Learned:
        history = stream.history
        if policy.reap:
            return lifetimes.Learned(history.cadence_s)  # we do as we are told
        last = max((e.birth for e in history.ended if not e.reaped), default=-math.inf)
        free = [r for r in self.counted(stream) if not r.origin.startswith(STATED)]
        older = [record.number for record in free if record.birth < last]
        life = history.life(policy.keep_last)
        return lifetimes.Learned(history.cadence_s, life, history.every(older))

    def retirement(
        self, birth: float, number: int, policy: lifetimes.Policy, learned: lifetimes.Learned
    ) -> tuple[float, bytes]:
        """Return the retirement epoch (nan: none) and why, as records hold it."""
        retire, origin = lifetimes.retirement(birth, learned, policy, number)
        if retire is None and policy.keep_last is not None:
            # The first save of a stream: rank it with the latest known retirement.
            finite = [g.retire for g in self.namespace.generations.values()]
            guess = birth + policy.keep_last * CADENCE_GUESS_S
            retire = max([guess, *filter(math.isfinite, finite)])
            origin += GUESSED.decode()
        text = origin.encode()[: layout.ORIGIN_MAX]
        return (math.nan if retire is None else retire), text

    def refreshed(
        self, stream: Stream, newest: layout.GenerationRecord | None = None
    ) -> Iterator[layout.GenerationRecord]:
        """Yield the records of a stream's generations whose retirement is another one by now.

        With `newest`, as it will be, the others of a long stream have their turn now and then.
        """
        if stream.ino not in self.namespace.inodes:
            return
        records = self.records(stream)
        stream.stale += 1
        if newest is not None and stream.stale * LONG < len(records):
            records = [newest]
        else:
            stream.stale = 0
        known: dict[tuple[int | None, bool], lifetimes.Learned] = {}
        for record in records:
            if newest is not None and record.generation == newest.generation:
                record = newest  # noqa: PLW2901
            policy = self._policy_for(record)
            says = policy.keep_last, policy.reap
            if says not in known:
                known[says] = self.learned(stream, policy)
            retire, origin = self.retirement(record.birth, record.number, policy, known[says])
            if not _same(retire, record.retire) or origin != record.origin:
                yield record._replace(retire=retire, origin=origin)

    def reconfigured(self) -> Iterator[layout.Record]:
        """The volume is mounted: the configuration may be another than the last time."""
        for stream in self.all_streams():
            yield from self.refreshed(stream)

    def refresh(self, inode: Inode) -> list[layout.Record]:
        """A policy changed at an inode: retirements of the streams at, below and around follow."""
        record = self.namespace.generations.get(inode.generation)
        around = {record.stream} if record is not None else set()
        if inode.is_dir:
            around.add(self._of_directory(inode.ino).stream)
        records: list[layout.Record] = []
        for stream in self.all_streams():
            top = self.namespace.inodes.get(stream.ino)
            if top is None:
                continue
            if stream.ino in around or self.namespace.below(top, inode.ino):
                records += self.refreshed(stream)
        return records

    def _policy_for(self, record: layout.GenerationRecord) -> lifetimes.Policy:
        """Return the policy of a generation: an anchor or a retirement that is stated at one of
        its files goes before what its stream says."""
        members = [self.namespace.get(i) for i in self.members.get(record.generation, ())]
        stating = [inode for inode in members if inode.xattrs]
        around = {i.parent for i in members if i.ino not in self.namespace.links}
        stating += [self.namespace.get(ino) for ino in sorted(around)]
        policies = [self.policy_of(inode) for inode in (*self.tops(record), *stating)]
        policies.append(self.policy_of(self.namespace.get(record.stream)))
        stated = [p for p in policies if p.anchor] or [p for p in policies if p.retire is not None]
        return (stated or policies)[0]

    def remembered(self, stream: Stream) -> list[layout.Record]:
        """Return the record that keeps what a directory's streams have taught."""
        inode = self.namespace.inodes.get(stream.ino)
        if inode is None or not inode.is_dir or not inode.nlink:
            return []
        stored = streams.dumps(self.streams[stream.ino])
        return [layout.XattrRecord(stream.ino, streams.STORED, stored)]

    # What placement asks

    def retire_of(self, generation: int) -> float:
        """Return the retirement epoch of a generation; inf for an anchor and for what has none."""
        record = self.namespace.generations.get(generation)
        if record is None or math.isnan(record.retire):
            return math.inf
        return record.retire

    def hint_of(self, generation: int) -> Hint:
        """Return what is known when bytes of a generation are about to be placed."""
        record = self.namespace.generations.get(generation)
        stream = self._of.get(generation)
        if record is None or stream is None:
            return Hint(Kind.UNHINTED, math.inf, 0)
        if generation not in stream.predicted:
            guessed = record.origin.endswith(GUESSED)
            foretold = math.nan if guessed else record.retire
            stream.predicted[generation] = foretold, record.origin.decode(errors="replace")
        if math.isnan(record.retire):
            return Hint(Kind.UNHINTED, math.inf, 0)
        # It may be stated for this generation alone, at its directory.
        first = next(iter(self.members.get(generation, ())), record.stream)
        inode = self.namespace.inodes.get(first)
        stated = self.policy_of(inode).size if inode is not None else None
        announced = sum(self.announced.get(generation, {}).values())
        size = stated or max(announced, stream.size)
        kind = Kind.ANCHOR if math.isinf(record.retire) else Kind.FINITE
        return Hint(kind, record.retire, size)

    def announce(self, inode: Inode, size: int) -> None:
        """A file grew to its size before its bytes came (ftruncate, posix_fallocate)."""
        if inode.generation:
            self.announced.setdefault(inode.generation, {})[inode.ino] = size

    def unit_s(self) -> float:
        """Return placement's unit E in seconds: a quarter of the streams' median cadence."""
        if self._unit is None:
            cadences = [self.cadence_of(s) for s in self.all_streams() if s.numbers]
            known = [c for c in cadences if c]
            self._unit = (median(known) if known else CADENCE_GUESS_S) / E_PER_CADENCE
        return self._unit


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))
