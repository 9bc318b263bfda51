"""Streams and generations: which file belongs to which, and what their deletion teaches.

What is learned is stored with the stream's directory, so a remount knows what the volume knew.
Nothing here touches bytes; a mistake costs placement, not data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from retainzfs import layout, lifetimes, streams
from retainzfs.history import Ended
from retainzfs.lifetimes import FileClass
from retainzfs.namespace import Inode
from retainzfs.reaping import Reaping
from retainzfs.sightings import Series, Sightings
from retainzfs.streams import State, Stream

IDLE_MOST = 64  # streams of a directory that are remembered when they have no generation


class Retention(Reaping):
    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.reaping: set[int] = set()  # generations that we delete, not their programs
        self.torn: list[int] = []  # generations that a crash met while their files were moved
        self._sightings = Sightings()

    def restore(self) -> None:
        """Derive streams and members from the namespace, after a replay."""
        for inode in self.namespace.inodes.values():
            if inode.generation and inode.is_file and inode.ino not in self.namespace.links:
                self.members.setdefault(inode.generation, set()).add(inode.ino)
            stored = (inode.xattrs or {}).get(streams.STORED)
            if stored is not None:
                self.streams[inode.ino] = streams.loads(inode.ino, stored)
                for stream in self.streams[inode.ino]:
                    self._know(stream)
        waiting: list[layout.GenerationRecord] = []  # those of which all files have other names
        for record in sorted(self.namespace.generations.values(), key=lambda r: r.generation):
            if record.generation not in self.members:
                waiting.append(record)
            elif record.state != State.RETIRED:
                self._restored(record, self.names_of(record.generation))
        for ino in self.namespace.links:
            self._restore_link(self.namespace.get(ino), waiting)
        for stream in self.all_streams():
            gone = stream.predicted.keys() - stream.numbers.values()
            for generation in gone:
                del stream.predicted[generation]
            for record in reversed(self.counted(stream)):
                self._measure(stream, record)

    def _restore_link(self, inode: Inode, waiting: list[layout.GenerationRecord]) -> None:
        """Let a file with several names be in the generations of all of them."""
        found: set[int] = set()
        for place in () if self.owns(inode) or not inode.is_file else self.visible(inode):
            context = self.context(*place)
            if context.match is None or context.policy.file_class is not FileClass.CHECKPOINT:
                continue
            named = context.stream, context.match.number
            here = [r for r in waiting if (r.stream, r.number) == named]
            if not self.known(*place) and here:
                record = max(here, key=lambda r: r.generation == inode.generation)
                waiting.remove(record)
                self._restored(record, [place])
            found.add(self.known(*place))
        found.discard(0)
        if not found and inode.generation in self.namespace.generations:
            found = {inode.generation}
            record = self.namespace.generations[inode.generation]
            if record.state != State.RETIRED and inode.generation not in self._of:
                self._restored(record, [])
        self.joins(inode, found)

    def _restored(
        self, record: layout.GenerationRecord, names: Iterable[tuple[int, bytes]]
    ) -> None:
        """A generation has these names: they tell its stream."""
        matches = [self.context(*place).match for place in names]
        series = {match.series for match in matches if match is not None}
        numbers = {match.number for match in matches if match is not None}
        if numbers and record.number not in numbers:
            self.torn.append(record.generation)
        here = self.streams.setdefault(record.stream, [])
        for stream in here:
            if stream.series & series or not (stream.series or series):
                break
        else:
            stream = Stream(record.stream)
            here.append(stream)
        stream.series |= series
        stream.numbers[record.number] = record.generation
        self._of[record.generation] = stream
        stream.marked = stream.marked or record.state == State.COMPLETE
        if record.state == State.INCOMPLETE:
            self.reasons[record.generation] = "it was not complete at the last unmount"
            stream.history.fail(record.generation)
        elif record.birth <= self.now_s():
            stream.history.begin(record.generation, record.birth)

    def _stream(self, directory: int, match: lifetimes.Match) -> Stream:
        stream = self._find(directory, match)
        if stream is None:
            stream = Stream(directory)
            here = self.streams.setdefault(directory, [])
            idle = [old for old in here if not old.numbers]
            for old in idle[: max(0, len(idle) - IDLE_MOST)]:
                here.remove(old)
                self.series[directory] -= old.series
            here.append(stream)
        stream.series.add(match.series)
        self._know(stream)
        return stream

    def _know(self, stream: Stream) -> None:
        for series in stream.series:
            self.know(stream.ino, series)

    def forget(self, inode: Inode) -> None:
        """A directory was removed."""
        self.streams.pop(inode.ino, None)
        self.best.pop(inode.ino, None)
        self.series.pop(inode.ino, None)
        self._contexts.pop(inode.ino, None)

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
        self.looked_again(stream)
        return generation, [record]

    def joined(self, inode: Inode) -> None:
        if inode.generation and inode.is_file:
            self.members.setdefault(inode.generation, set()).add(inode.ino)

    def latest(self, generations: set[int], born: Iterable[layout.Record]) -> int:
        """Return the generation that retires last, 0 for none: a shared file's bytes go with it.

        Of one stream that is the one that was born last, whatever is foretold while it is young.
        """
        known = {g: self.namespace.generations.get(g) for g in generations}
        known |= {r.generation: r for r in born if isinstance(r, layout.GenerationRecord)}
        records = [record for g in generations if (record := known[g]) is not None]
        apart = len({record.stream for record in records}) > 1

        def retires(record: layout.GenerationRecord) -> tuple[bool, float, int]:
            epoch = -math.inf if math.isnan(record.retire) else record.retire
            return math.isinf(record.retire), epoch if apart else 0.0, record.generation

        return max(records, key=retires).generation if records else 0

    def visible(self, inode: Inode) -> Iterator[tuple[int, bytes]]:
        """Yield the names of a file that somebody can find."""
        for place in self.namespace.links.get(inode.ino) or self.namespace.names(inode):
            if not self.namespace.removed(self.namespace.get(place[0])):
                yield place

    def left(self, generation: int, ino: int) -> list[layout.Record]:
        """An inode is no longer in a generation; the last one takes it along."""
        members = self.members.get(generation)
        if members is None:
            return []
        record = self.namespace.generations.get(generation)
        if ino in members and record is not None and record.state != State.RETIRED:
            self.chronicle.left(generation, self.namespace.get(ino).size)
        members.discard(ino)
        if members:
            return []
        stream = self._of.get(generation)
        if record is None or stream is None or record.state == State.RETIRED:
            self._drop(generation)
            return [] if record is None else [record._replace(state=State.DELETED)]
        self._ended(stream, record)
        self._drop(generation)
        if stream.numbers.get(record.number) == generation:
            del stream.numbers[record.number]
        if record.stream == ino:
            del self.streams[ino]
        return [record._replace(state=State.DELETED), *self.remembered(stream)]

    def retire(self, generation: int) -> list[layout.Record]:
        """All names of a generation go now; its bytes, and its record, follow piece by piece."""
        record = self.namespace.generations[generation]
        stream = self._of[generation]
        self.reaping.add(generation)
        self._ended(stream, record)
        del stream.numbers[record.number]
        self.reasons.pop(generation, None)
        self.claimed.discard(generation)
        return [record._replace(state=State.RETIRED), *self.remembered(stream)]

    def sizes(self, generation: int) -> list[int]:
        """Return the bytes of each file that a generation has."""
        return [self.namespace.get(ino).size for ino in self.members.get(generation, ())]

    def _drop(self, generation: int) -> None:
        self.members.pop(generation, None)
        self.announced.pop(generation, None)
        self.reasons.pop(generation, None)
        self.claimed.discard(generation)
        self.chronicle.forget(generation)
        self.reaping.discard(generation)
        stream = self._of.pop(generation, None)
        if stream is not None:
            stream.predicted.pop(generation, None)

    def _ended(self, stream: Stream, record: layout.GenerationRecord) -> None:
        """Learn from a deletion how long the stream's generations are kept."""
        generation = record.generation
        self.chronicle.end(
            record,
            stream,
            self.namespace.path(record.stream) if record.stream in self.namespace.inodes else "",
            self.sizes(generation),
            self.now_s(),
            reaped=generation in self.reaping,
        )
        self.looked_again(stream)
        if not record.order:
            stream.history.fail(generation)
            return
        predicted, origin = stream.predicted.get(generation, (math.nan, "nothing was placed"))
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
            origin,
        )
        finite = not math.isinf(record.retire) and policy.birth is None
        teaches = finite and not ended.reaped and self._has_newer(stream, record)
        history.end(ended, policy.keep_last, teaches=teaches)

    def _has_newer(self, stream: Stream, record: layout.GenerationRecord) -> bool:
        """Whether a save that counts came after this one, or one without a marker that will count
        when the next begins: accelerate deletes just before that."""
        if any(newer.order > record.order for newer in self.counted(stream)):
            return True
        younger = [r for r in self.records(stream) if r.generation > record.generation]
        return any(r.state == State.WRITING and self.closed(r.generation) for r in younger)

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
        stream = Stream(directory, {known}, sighted=True)
        for number, epoch in enumerate(series.births, start=1):
            stream.history.begin(-number, epoch)
        stream.history.lives = [(life, 0) for life in series.lives]
        self.streams.setdefault(directory, []).append(stream)
        self._know(stream)
        return self.remembered(stream)

    def unmarked(self, directory: int, name: bytes) -> list[layout.Record]:
        """A name is being removed; without its marker a generation counts no longer."""
        if not self.marked(directory, name):
            return []
        record = self.namespace.generations.get(self.known(directory, name))
        if record is None or record.state != State.COMPLETE:
            return []
        self.reasons[record.generation] = "its completion marker was removed"
        return [record._replace(state=State.INCOMPLETE)]
