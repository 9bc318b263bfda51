"""When generations retire: what policy says, corrected by what their streams have taught."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any

from retainzfs import layout, lifetimes, streams
from retainzfs.lifetimes.prediction import E_PER_CADENCE, LAG_LEAST, weighted_median
from retainzfs.membership import Membership
from retainzfs.namespace import Inode
from retainzfs.placement import Arrival
from retainzfs.planning import Hint, of_files
from retainzfs.streams import Outlook, State, Stream
from retainzfs.zone import Kind

CADENCE_GUESS_S = 60.0  # of the very first stream, until its second save
GUESSED = b"; ranked with the latest known retirement"  # end of the origin of a mere rank
LONG = 32  # generations; a stream with more looks at all of them not at every save
STATED = (b"anchor=", b"keep_every=", b"retire=")  # origins of what was not left to retention
UNIT_STEP = 1.25  # the unit changes only by so much at once: else plans made with it are not alike
ALIVE = 8.0  # cadences without a save, from which on a stream is taken for ended
DELETIONS = 8  # of a stream, that all have to be in time for the next to be counted on


class Forecast(Membership):
    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.announced: dict[int, dict[int, int]] = {}  # generation → inode → promised size
        self._unit = CADENCE_GUESS_S / E_PER_CADENCE
        self._guessed = self._unit_due = True

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
        self.looked_again(stream)
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
        return Hint(kind, record.retire, size, stream.files)

    def announce(self, inode: Inode, size: int) -> None:
        """A file grew to its size before its bytes came (ftruncate, posix_fallocate)."""
        if inode.generation:
            self.announced.setdefault(inode.generation, {})[inode.ino] = size

    def unit_s(self) -> float:
        """Return placement's unit E in seconds: a quarter of the median cadence of the streams,
        each weighed by the bytes that it keeps."""
        if self._unit_due:
            self._unit_due = False
            cadences = [
                (cadence, (stream.size or 1) * len(stream.numbers))
                for stream in self.all_streams()
                if stream.numbers and (cadence := self.cadence_of(stream))
            ]
            unit = (weighted_median(cadences) or CADENCE_GUESS_S) / E_PER_CADENCE
            if self._guessed or not 1 / UNIT_STEP < unit / self._unit < UNIT_STEP:
                self._unit, self._guessed = unit, not cadences
        return self._unit

    def looked_again(self, stream: Stream) -> None:
        """A stream has saved, deleted, or another policy: what is expected of it may change."""
        stream.outlook = None
        self._unit_due = True

    def arrivals(self) -> list[Arrival]:
        """Return the next save of each stream that is alive; none lies in the past."""
        now = self.now_s()
        coming = []
        for stream in self._alive(now):
            last, every, lifetime, _ = self._outlook(stream)
            if math.isfinite(every + lifetime) and stream.size:
                time = last + every if last + every > now else now + every
                coming.append(Arrival(time, lifetime, of_files(stream.size, stream.files), every))
        return coming

    def milestones(self) -> bool:
        """Whether a stream that is alive will make anchors, as declared or learned."""
        return any(self._outlook(stream).anchors for stream in self._alive(self.now_s()))

    def _alive(self, now: float) -> Iterator[Stream]:
        for stream in self.all_streams():
            if stream.numbers:
                last, every, *_ = self._outlook(stream)
                if now - last <= ALIVE * (every if math.isfinite(every) else CADENCE_GUESS_S):
                    yield stream

    def _outlook(self, stream: Stream) -> Outlook:
        if stream.outlook is None:
            stream.outlook = self._looked_up(stream)
        return stream.outlook

    def _looked_up(self, stream: Stream) -> Outlook:
        inode = self.namespace.inodes.get(stream.ino)
        known = self.namespace.generations
        latest = islice(reversed(stream.numbers.values()), LONG)
        records = [known[generation] for generation in latest if generation in known]
        if inode is None or not inode.is_dir or not records:
            return Outlook(-math.inf, math.inf, math.inf, anchors=False)  # it saves no more
        policy = self.policy_of(inode)
        every = self.cadence_of(stream) or math.inf
        last = max(record.birth for record in records)
        lives = (r.retire - r.birth for r in records if math.isfinite(r.retire))
        made = any(math.isinf(record.retire) for record in records)
        anchors = bool(policy.anchor or policy.keep_every or made)
        return Outlook(last, every, next(lives, math.inf), anchors)

    def same_stream(self, one: int, other: int) -> bool:
        """Return whether two generations are of one stream."""
        stream = self._of.get(one)
        return stream is not None and stream is self._of.get(other)

    def due(self, generation: int) -> set[int]:
        """Return the generations that this save makes its program delete when it is complete; none
        of a stream of which that is not known: its last deletions were not all in time."""
        stream = self._of.get(generation)
        inode = self.namespace.inodes.get(stream.ino) if stream is not None else None
        if stream is None or inode is None:
            return set()
        keep = self.policy_of(inode).keep_last
        ended = stream.history.ended[-DELETIONS:]
        late = [e.saves - (keep or e.saves_predicted) > LAG_LEAST for e in ended]
        if not ended or any(late):
            return set()
        known = [r for r in self.counted(stream) if r.generation != generation]
        if keep is None:
            soon = self.now_s() + self.unit_s()
            known = [record for record in known if record.retire <= soon]
        else:
            known = known[keep - 1 :]
        return {r.generation for r in known if math.isfinite(r.retire) and self._is_free(r)}

    def _is_free(self, record: layout.GenerationRecord) -> bool:
        """Whether the bytes of a generation go with its names: nobody has a file of it open, and
        no file has another name."""
        members = self.members.get(record.generation, ())
        inodes = [self.namespace.inodes[ino] for ino in members]
        return not any(i.handles or i.ino in self.namespace.links for i in inodes)


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))
