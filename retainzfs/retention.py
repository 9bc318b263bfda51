"""Streams and generations: which file belongs to which, and what is complete.

What is learned is stored with the stream's directory, so a remount knows what the volume knew.
Nothing here touches bytes; a mistake costs placement, not data.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from retainzfs import layout, lifetimes, streams
from retainzfs.forecast import Forecast
from retainzfs.history import Ended
from retainzfs.lifetimes import FileClass
from retainzfs.namespace import ROOT, Inode, Namespace
from retainzfs.sightings import Series, Sightings
from retainzfs.streams import State, Stream

SIZE_EVIDENCE = 0.9  # of the learned size: what does not show its end counts with so much of it
YOUNG = 2  # births until which a stream may find that its generations have several files


class Retention(Forecast):
    def __init__(self, namespace: Namespace, now_s: Callable[[], float]) -> None:
        super().__init__(namespace, now_s)
        self.reasons: dict[int, str] = {}  # generation → why it does not count as complete
        self.claimed: set[int] = set()  # generations that count once what they lack is there
        self.reaping: set[int] = set()  # generations that we delete, not their programs
        self._sightings = Sightings()

    def restore(self) -> None:
        """Derive streams and members from the namespace, after a replay."""
        for inode in self.namespace.inodes.values():
            if inode.generation and inode.is_file:
                self.members.setdefault(inode.generation, set()).add(inode.ino)
            stored = (inode.xattrs or {}).get(streams.STORED)
            if stored is not None:
                self.streams[inode.ino] = streams.loads(inode.ino, stored)
                for stream in self.streams[inode.ino]:
                    self._know(stream)
        for record in sorted(self.namespace.generations.values(), key=lambda r: r.generation):
            stream = self._restored(record)
            stream.numbers[record.number] = record.generation
            self._of[record.generation] = stream
            if record.state == State.INCOMPLETE:
                self.reasons[record.generation] = "it was not complete at the last unmount"
                stream.history.fail(record.generation)
            elif record.birth <= self.now_s():
                stream.history.begin(record.generation, record.birth)
        for stream in self.all_streams():
            gone = stream.predicted.keys() - stream.numbers.values()
            for generation in gone:
                del stream.predicted[generation]
            for record in reversed(self.counted(stream)):
                self._measure(stream, record)

    def _restored(self, record: layout.GenerationRecord) -> Stream:
        """Return the stream of a generation by the names that it has."""
        series = set()
        for top in self.tops(record):
            match = self._match_of(record.stream, top)
            if match is not None:
                series.add(match.series)
        here = self.streams.setdefault(record.stream, [])
        for stream in here:
            if stream.series & series or not series:
                break
        else:
            stream = Stream(record.stream)
            here.append(stream)
        stream.series |= series
        return stream

    def _match_of(self, directory: int, top: Inode) -> lifetimes.Match | None:
        name = self.namespace.components(top.ino)[-1]
        return self.context(directory, name).match

    def _find(self, directory: int, match: lifetimes.Match) -> Stream | None:
        """Return the stream that a name belongs to, if there is one."""
        here = self.streams.get(directory, [])
        for stream in here:
            if match.series in stream.series:
                return stream
        for stream in here:
            # The second file of a save, like the optimizer's: no other job begins just now.
            young = len(stream.history.births) <= YOUNG
            if young and match.number == stream.newest:
                return stream
        return None

    def _stream(self, directory: int, match: lifetimes.Match) -> Stream:
        stream = self._find(directory, match)
        if stream is None:
            stream = Stream(directory)
            self.streams.setdefault(directory, []).append(stream)
        stream.series.add(match.series)
        self._know(stream)
        return stream

    def _know(self, stream: Stream) -> None:
        for series in stream.series:
            self.know(stream.ino, series)

    def forget(self, inode: Inode) -> None:
        """A directory was removed."""
        self.streams.pop(inode.ino, None)
        self.series.pop(inode.ino, None)
        self._contexts.pop(inode.ino, None)

    def _remembered(self, stream: Stream) -> list[layout.Record]:
        """Return the record that keeps what a directory's streams have taught."""
        inode = self.namespace.inodes.get(stream.ino)
        if inode is None or not inode.is_dir or not inode.nlink:
            return []
        stored = streams.dumps(self.streams[stream.ino])
        if len(stored) > layout.XATTR_VALUE_MAX // 16:
            return []  # of a directory with very many jobs
        return [layout.XattrRecord(stream.ino, streams.STORED, stored)]

    # Membership

    def assign(
        self, directory: int, name: bytes, *, again: bool = True
    ) -> tuple[int, list[layout.Record]]:
        """Return the generation of a name (0: none) and the records that make it.

        With `again` a generation that was complete is being written again.
        """
        context = self.context(directory, name)
        if context.match is None or context.policy.file_class is not FileClass.CHECKPOINT:
            return 0, []
        stream = self._stream(context.stream, context.match)
        known = stream.numbers.get(context.match.number)
        if known is not None:
            record = self.namespace.generations[known]
            whole = record.state == State.COMPLETE and context.match.is_directory
            if again and record.state != State.WRITING and not whole:
                return known, [self._writing(record)]
            return known, []
        return self._born(stream, context.match.number, context.policy)

    def known(self, directory: int, name: bytes) -> int:
        """Return the generation that a name belongs to, 0 when nothing was written of it."""
        context = self.context(directory, name)
        if context.match is None:
            return 0
        stream = self._find(context.stream, context.match)
        return 0 if stream is None else stream.numbers.get(context.match.number, 0)

    def owns(self, inode: Inode) -> bool:
        """Whether the file is a generation by its own attributes, whatever its name."""
        record = self.namespace.generations.get(inode.generation)
        return record is not None and record.stream == inode.ino

    def own(self, inode: Inode) -> tuple[int, list[layout.Record]]:
        """Return a generation for a single file that has a retirement of its own."""
        if inode.generation:
            return inode.generation, []
        policy = self.policy_of(inode)
        if policy.retire is None and not policy.anchor:
            return 0, []
        stream = Stream(inode.ino)
        self.streams[inode.ino] = [stream]
        return self._born(stream, 0, policy)

    def _born(
        self, stream: Stream, number: int, policy: lifetimes.Policy
    ) -> tuple[int, list[layout.Record]]:
        now = self.now_s()
        generation = self.namespace.next_generation
        if policy.birth is None:
            stream.history.begin(generation, now)
        birth = now if policy.birth is None else policy.birth
        retire, origin = self.retirement(birth, number, policy, self.learned(stream, policy))
        record = layout.GenerationRecord(
            generation, stream.ino, number, birth, retire, math.nan, 0, State.WRITING, 0, origin
        )
        stream.numbers[number] = generation
        self._of[generation] = stream
        self._unit = None
        return generation, [record]

    def joined(self, inode: Inode) -> None:
        if inode.generation and inode.is_file:
            self.members.setdefault(inode.generation, set()).add(inode.ino)

    def left(self, generation: int, ino: int) -> list[layout.Record]:
        """An inode is no longer in a generation; the last one takes it along."""
        members = self.members.get(generation)
        if members is None:
            return []
        members.discard(ino)
        if members:
            return []
        record = self.namespace.generations.get(generation)
        stream = self._of.get(generation)
        if record is None or stream is None:
            self._drop(generation)
            return []
        self._ended(stream, record)
        self._drop(generation)
        if stream.numbers.get(record.number) == generation:
            del stream.numbers[record.number]
        if record.stream == ino:
            del self.streams[ino]
        return [record._replace(state=State.DELETED), *self._remembered(stream)]

    def _drop(self, generation: int) -> None:
        self.members.pop(generation, None)
        self.announced.pop(generation, None)
        self.reasons.pop(generation, None)
        self.claimed.discard(generation)
        self.reaping.discard(generation)
        stream = self._of.pop(generation, None)
        if stream is not None:
            stream.predicted.pop(generation, None)

    def _ended(self, stream: Stream, record: layout.GenerationRecord) -> None:
        """Learn from a deletion how long the stream's generations are kept."""
        generation = record.generation
        if not record.order:
            stream.history.fail(generation)
            return
        predicted = stream.predicted.get(generation, record.retire)
        now = self.now_s()
        history = stream.history
        inode = self.namespace.inodes.get(record.stream)
        policy = lifetimes.Policy() if inode is None else self.policy_of(inode)
        ended = Ended(
            record.number,
            record.birth,
            predicted,
            now,
            history.saves(record.birth, now),
            history.saves(record.birth, predicted, ahead=True),
            generation in self.reaping,
            record.origin.decode(errors="replace"),
        )
        newest = self.counted(stream)[:1]
        is_newest = not newest or newest[0].order <= record.order
        teaches = not (
            ended.reaped or is_newest or math.isinf(record.retire) or policy.birth is not None
        )
        history.end(ended, policy.keep_last, teaches=teaches)

    # Names that no layout has

    def sighted(self, directory: int, name: bytes) -> None:
        """A name was made that is in no generation."""
        if self._of_directory(directory).policy.file_class is FileClass.CHECKPOINT:
            self._sightings.came(directory, name, self.now_s())

    def vanished(self, directory: int, name: bytes) -> list[layout.Record]:
        """A name is about to go; perhaps that shows that its series is a stream."""
        inode = self.namespace.child(directory, name)
        if inode.is_file:
            self._weigh(directory, inode.size)
        others = self.namespace.get(directory).entries or {}
        series = self._sightings.went(directory, name, others, inode.size)
        if series is None or self.context(directory, name).match is not None:
            return []
        return self._discovered(directory, name, series)

    def _weigh(self, directory: int, size: int) -> None:
        """Bytes go from a directory: one around it may be a generation of a kind of its own."""
        if size < layout.BLOCK:
            return
        for ino in self._ancestors(directory):
            inode = self.namespace.get(ino)
            self._sightings.emptied(inode.parent, inode.name, size)

    def _discovered(self, directory: int, name: bytes, series: Series) -> list[layout.Record]:
        self._sightings.forget(directory, name)
        known = lifetimes.series_of(name)
        assert known is not None, "a name that was sighted has a series"
        stream = Stream(directory, {known})
        for number, epoch in enumerate(series.births, start=1):
            stream.history.begin(-number, epoch)
        stream.history.lives = [(life, 0) for life in series.lives]
        self.streams.setdefault(directory, []).append(stream)
        self._know(stream)
        return self._remembered(stream)

    # Completion

    def complete(self, generation: int, state: State = State.COMPLETE) -> list[layout.Record]:
        """There is evidence that the generation is complete: it counts from now on.

        Not if one of its files speaks against that; and not yet if one is still being written, or
        if one is not there that the generation before had.
        """
        record = self.namespace.generations.get(generation)
        if record is None or record.state in (State.COMPLETE, state):
            return []
        stream = self._of[generation]
        members = self._members(generation)
        doubts = [inode.doubt for inode in members if inode.doubt]
        if doubts:
            return self.incomplete(generation, doubts[0])
        if any(i.is_being_written and not lifetimes.is_tracker(i.name) for i in members):
            self.claimed.add(generation)
            return []
        missing = self._missing(stream, record)
        if missing:
            self.claimed.add(generation)
            self.reasons[generation] = _lacks(missing)
            return []
        again = record.order > 0  # saved anew, or one more of its files: no new save
        known = record.state == State.PRESUMED
        record = record._replace(
            state=state,
            committed=record.committed if again else self.now_s(),
            order=record.order if known else self.namespace.next_order,
            size=sum(i.size for i in members),
        )
        stream.marked = stream.marked or state is State.COMPLETE
        if math.isfinite(record.birth) and record.birth <= self.now_s():
            stream.history.begin(generation, record.birth)
        self._unit = None
        self._measure(stream, record)
        self.reasons.pop(generation, None)
        self.claimed.discard(generation)
        return [record, *self.refreshed(stream, record), *self._remembered(stream)]

    def _missing(self, stream: Stream, record: layout.GenerationRecord) -> set[bytes]:
        """Return the stems of single files that the generation before had and this one lacks."""
        stems = self._stems(record)
        return stream.missing(set(stems)) if stems else set()

    def _stems(self, record: layout.GenerationRecord) -> dict[bytes, int]:
        """Return the stem of each single file of a generation, and its size."""
        stems: dict[bytes, int] = {}
        for inode in self._members(record.generation):
            if inode.parent == record.stream:
                match = self._match_of(record.stream, inode)
                if match is not None and not match.temporary:
                    stems[match.stem] = inode.size
        return stems

    def _measure(self, stream: Stream, record: layout.GenerationRecord) -> None:
        """Learn from a generation that counts what its successors will be."""
        stems = self._stems(record)
        stream.stems |= stems
        stream.companions = set(stems)
        for stem in stems:
            stream.missed.pop(stem, None)
        stream.size = record.size or stream.size

    def presumable(self, generation: int) -> Iterator[int]:
        """Yield older generations of a stream that are complete as far as this mount can see.

        The marker of a distributed checkpoint is on the mount of one node only. On the others a
        directory counts when a later save has begun and all its files are closed: for local space,
        and only where no marker was ever seen.
        """
        stream = self._of.get(generation)
        if stream is None or stream.marked:
            return
        for record in sorted(self.records(stream), key=lambda r: r.generation):
            older = record.generation < max(stream.numbers.values())
            if record.state == State.WRITING and older and self._seems_whole(stream, record):
                yield record.generation

    def _seems_whole(self, stream: Stream, record: layout.GenerationRecord) -> bool:
        members = self._members(record.generation)
        tops = self.tops(record)
        if not members or any(inode.doubt or inode.is_being_written for inode in members):
            return False
        matches = [self._match_of(record.stream, top) for top in tops if top.is_dir]
        if len(matches) != len(tops) or any(match is None or match.temporary for match in matches):
            return False
        return sum(inode.size for inode in members) >= SIZE_EVIDENCE * stream.size

    def deserted(self, generation: int) -> Iterator[layout.Record]:
        """A save has begun: older ones that still lack a file have failed."""
        stream = self._of[generation]
        for record in self.records(stream):
            older = record.generation
            if record.state != State.WRITING or older >= generation or older not in self.claimed:
                continue
            missing = self._missing(stream, record)
            if missing and not any(inode.handles for inode in self._members(older)):
                for stem in missing:
                    stream.missed[stem] = stream.missed.get(stem, 0) + 1
                yield from self.incomplete(older, _lacks(missing))

    def incomplete(self, generation: int, reason: str) -> list[layout.Record]:
        """Something speaks against the generation being complete: it does not count."""
        record = self.namespace.generations.get(generation)
        if record is None:
            return []
        self.claimed.discard(generation)
        self.reasons[generation] = reason
        if record.state == State.INCOMPLETE:
            return []
        self._of[generation].history.fail(generation)
        return [record._replace(state=State.INCOMPLETE)]

    def vouched(self, generation: int) -> None:
        """Somebody who must know says that the files are whole, whatever we have seen."""
        stream = self._of.get(generation)
        if stream is not None:
            stream.companions.clear()
        for inode in self._members(generation):
            inode.doubt, inode.missing = "", None
            inode.judged = inode.writes

    def _members(self, generation: int) -> list[Inode]:
        return [self.namespace.get(ino) for ino in self.members.get(generation, ())]

    def _writing(self, record: layout.GenerationRecord) -> layout.GenerationRecord:
        self.reasons.pop(record.generation, None)
        self.claimed.discard(record.generation)
        return record._replace(state=State.WRITING)

    def overtaken(self, generation: int) -> Iterator[layout.Record]:
        """The generation was completed; an older save that nobody works at any more has failed."""
        stream = self._of[generation]
        # Where one has its marker, the others should have had theirs.
        open_states = (State.WRITING, State.PRESUMED) if stream.marked else (State.WRITING,)
        for record in self.records(stream):
            older = record.generation
            if older >= generation or record.state not in open_states:
                continue
            if not any(inode.handles for inode in self._members(older)):
                reason = self.reasons.get(older, "a newer one was completed before it")
                yield from self.incomplete(older, reason)

    def reopened(self, inode: Inode) -> list[layout.Record]:
        """A file that had been closed is about to change: its generation is being written again."""
        if inode.judged != inode.writes:
            return []
        record = self.namespace.generations.get(inode.generation)
        if record is None or record.state == State.WRITING:
            return []
        return [self._writing(record)]

    def unmarked(self, directory: int, name: bytes) -> list[layout.Record]:
        """A name is being removed; without its marker a generation counts no longer."""
        if not self.marked(directory, name):
            return []
        record = self.namespace.generations.get(self.known(directory, name))
        if record is None or record.state != State.COMPLETE:
            return []
        self.reasons[record.generation] = "its completion marker was removed"
        return [record._replace(state=State.INCOMPLETE)]

    def judge(self, inode: Inode, stem: bytes, finding: lifetimes.Finding) -> str:
        """What speaks against a single file that was just closed being whole; "" if nothing."""
        if finding.verdict is lifetimes.Verdict.OK:
            return ""
        if finding.verdict is lifetimes.Verdict.BROKEN:
            return finding.reason
        learned = self._of[inode.generation].stems.get(stem, 0)
        if inode.size and inode.size >= SIZE_EVIDENCE * learned:
            return ""
        return f"{inode.size} bytes, the one before had {learned}"

    # Deletion

    def reapable(self, generation: int) -> list[int]:
        """Return the generations that the stream of a just completed one keeps no longer.

        The newest K in commit order and anchors are never among them, nor what holds another
        stream: that is an experiment with a number, and no checkpoint.
        """
        newest = self.namespace.generations.get(generation)
        inode = self.namespace.inodes.get(newest.stream) if newest is not None else None
        if newest is None or inode is None:
            return []
        policy = self.policy_of(inode)
        if not policy.reap or policy.keep_last is None:
            return []
        beyond = self.counted(self._of[generation])[policy.keep_last :]
        due = [r for r in beyond if not math.isinf(r.retire) and not self._holds_streams(r)]
        return [record.generation for record in due]

    def _holds_streams(self, record: layout.GenerationRecord) -> bool:
        tops = {top.ino for top in self.tops(record)}
        for ino in self.streams.keys() - {record.stream, *self.members[record.generation]}:
            inode = self.namespace.inodes.get(ino)
            while inode is not None and inode.ino != ROOT:
                if inode.ino in tops:
                    return True
                inode = self.namespace.inodes.get(inode.parent)
        return False


def _lacks(stems: set[bytes]) -> str:
    names = ", ".join(sorted(stem.decode(errors="replace") for stem in stems))
    return f"files are missing that the one before had: {names}"
