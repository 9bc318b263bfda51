"""Which generations are complete: evidence for it, and what speaks against it.

K counts what is complete here, so a mistake may cost an older generation: where nothing is sure,
nothing counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from retainzfs import layout, lifetimes
from retainzfs.chronicle import Chronicle
from retainzfs.forecast import Forecast
from retainzfs.namespace import Inode
from retainzfs.streams import MISSED_MOST, State, Stream

SIZE_EVIDENCE = 0.9  # of the learned size: what does not show its end counts with so much of it


class Completion(Forecast):
    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.reasons: dict[int, str] = {}  # generation → why it does not count as complete
        self.claimed: set[int] = set()  # generations that count once what they lack is there
        self.chronicle = Chronicle()

    def complete(self, generation: int, state: State = State.COMPLETE) -> list[layout.Record]:
        """There is evidence that the generation is complete: it counts from now on.

        Not if one of its files speaks against that; and not yet if one is still being written, or
        if one is not there that the generation before had.
        """
        record = self.namespace.generations.get(generation)
        if record is None or record.state in (State.COMPLETE, State.RETIRED, state):
            return []
        stream = self._of[generation]
        members = self._members(generation)
        doubts = [inode.doubt for inode in members if inode.doubt]
        if doubts:
            return self.incomplete(generation, doubts[0])
        written = any(i.is_being_written and not lifetimes.is_tracker(i.name) for i in members)
        if written or self._is_unfinished(record):
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
        self._measure(stream, record)
        self.chronicle.forget(generation)
        self.reasons.pop(generation, None)
        self.claimed.discard(generation)
        return [record, *self.refreshed(stream, record), *self.remembered(stream)]

    def _is_unfinished(self, record: layout.GenerationRecord) -> bool:
        """Whether NeMo says, by a file beside it, that a generation is being saved or deleted."""
        beside = self.namespace.get(record.stream).entries or {}
        names = self.names_of(record.generation)
        return any(lifetimes.unfinished_marker(name) in beside for _, name in names)

    def unfinished_by(self, directory: int, name: bytes) -> int:
        """Return the generation of which a file of this name says that; 0: of none."""
        stem = name.removesuffix(lifetimes.markers.UNFINISHED)
        if stem == name:
            return 0
        return self.known(directory, stem) or self.known(directory, stem + b".ckpt")

    def _missing(self, stream: Stream, record: layout.GenerationRecord) -> set[bytes]:
        """Return the stems of single files that the generation before had and this one lacks."""
        stems = self._stems(record)
        return stream.missing(set(stems)) if stems else set()

    def _stems(self, record: layout.GenerationRecord) -> dict[bytes, int]:
        """Return the stem of each single file of a generation, and its size."""
        stems: dict[bytes, int] = {}
        for directory, name in self.names_of(record.generation):
            inode = self.namespace.child(directory, name)
            match = self.context(directory, name).match
            if inode.is_file and match is not None and not match.temporary:
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
        stream.files = len(self.members.get(record.generation, ()))
        self.looked_again(stream)

    def presumable(self, generation: int) -> Iterator[int]:
        """Yield generations that are complete as far as this mount can see: of those before one
        that has just begun; else the one itself, of which a file was closed.

        The marker of a distributed checkpoint is on the mount of one node only. On the others a
        directory counts when a later save has begun and all its files are closed: for local space,
        and only where no marker was ever seen.
        """
        stream = self._of.get(generation)
        if stream is None or stream.marked:
            return
        newest = max(stream.numbers.values())
        known = self.namespace.generations
        asked = stream.numbers.values() if generation == newest else [generation]
        for older in sorted(asked):
            record = known.get(older)
            if record is None or record.state != State.WRITING or older == newest:
                continue
            if self._seems_whole(stream, record):
                yield older

    def _seems_whole(self, stream: Stream, record: layout.GenerationRecord) -> bool:
        members = self._members(record.generation)
        tops = self.tops(record)
        if not members or any(inode.doubt or inode.is_being_written for inode in members):
            return False
        matches = [self.match_of(record.stream, top) for top in tops if top.is_dir]
        if len(matches) != len(tops) or any(match is None or match.temporary for match in matches):
            return False
        if len(members) < self._files_wanted(stream, record):
            return False
        return sum(inode.size for inode in members) >= SIZE_EVIDENCE * stream.size

    def _files_wanted(self, stream: Stream, record: layout.GenerationRecord) -> int:
        """Return how many files a save must have to be presumed complete: as many as the one
        before, but for the first of some in a row that have fewer."""
        before = [len(self.members[r.generation]) for r in self.counted(stream)[:1]]
        wanted = max(before, default=0)
        fewer = [
            r
            for r in self.records(stream)
            if r.generation > record.generation
            and r.state == State.WRITING
            and len(self.members.get(r.generation, ())) < wanted
        ]
        return 0 if len(fewer) >= MISSED_MOST else wanted

    def is_newest(self, generation: int) -> bool:
        """Whether a generation is that which was born last in its stream."""
        stream = self._of.get(generation)
        return stream is not None and generation == max(stream.numbers.values())

    def closed(self, generation: int) -> bool:
        """Whether a generation that was being written when a mount ended cleanly may yet count."""
        record = self.namespace.generations[generation]
        stream = self._of[generation]
        return not stream.marked and self._seems_whole(stream, record)

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
        if record is None or record.state == State.RETIRED:
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
        if record is None or record.state in (State.WRITING, State.RETIRED):
            return []
        # A shell's `>` closes a new file once before anything is written to it; and to add to what
        # is empty, or to a log, takes nothing away.
        harmless = not inode.size or lifetimes.is_tracker(inode.name)
        if record.state == State.COMPLETE and harmless:
            return []
        return [self._writing(record)]

    def judge(self, inode: Inode, match: lifetimes.Match, finding: lifetimes.Finding) -> str:
        """What speaks against a single file that was just closed being whole; "" if nothing.

        Under a temporary name only what its own format says: its rename says the rest.
        """
        if finding.verdict is lifetimes.Verdict.OK:
            return ""
        if finding.verdict is lifetimes.Verdict.BROKEN:
            return finding.reason
        if match.temporary:
            return ""
        learned = self._of[inode.generation].stems.get(match.stem, 0)
        if inode.size and inode.size >= SIZE_EVIDENCE * learned:
            return ""
        return f"{inode.size} bytes, the one before had {learned}"


def _lacks(stems: set[bytes]) -> str:
    names = ", ".join(sorted(stem.decode(errors="replace") for stem in stems))
    return f"files are missing that the one before had: {names}"
