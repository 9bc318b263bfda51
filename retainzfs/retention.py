"""Streams and generations: which file belongs to which, what is complete, when it retires.

What is learned here (cadence, size) is derived from the generation records of the journal, so a
remount knows what the volume knew. Nothing here touches bytes; a mistake costs placement, not data.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from statistics import median

from retainzfs import layout, lifetimes
from retainzfs.lanes import Hint
from retainzfs.lifetimes import FileClass
from retainzfs.namespace import ROOT, Inode, Namespace
from retainzfs.zones import Kind

CADENCE_GUESS_S = 60.0  # of the very first stream, until its second save
E_PER_CADENCE = 4.0  # placement's constants are in quarters of a cadence
SIZE_EVIDENCE = 0.9  # of the learned size: a file of unknown format this long counts as complete

CLASS_KIND = {
    FileClass.CHECKPOINT: Kind.UNHINTED,
    FileClass.CACHE: Kind.CACHE,
    FileClass.SCRATCH: Kind.SCRATCH,
    FileClass.OUTPUT: Kind.OUTPUT,
}


class State(enum.IntEnum):
    DELETED = -1  # the record that ends a generation
    WRITING = 0
    COMPLETE = 1
    INCOMPLETE = 2
    RETIRED = 3  # policy keeps it no longer, and it is still there


@dataclass(slots=True)
class Stream:
    """Generations of one directory, by number."""

    ino: int
    numbers: dict[int, int] = field(default_factory=dict)  # number → generation id
    intervals: list[float] = field(default_factory=list)  # seconds between commits, oldest first
    last_commit_s: float = math.nan
    size: int = 0  # of the newest complete generation
    stems: dict[bytes, int] = field(default_factory=dict)  # stem of a file's name → its last size


@dataclass(frozen=True, slots=True)
class Context:
    """What holds for one path."""

    policy: lifetimes.Policy
    chain: tuple[int, ...]  # inodes whose attributes were looked at, nearest first
    match: lifetimes.Match | None
    stream: int  # inode of the stream's directory, 0 without a match
    names: tuple[bytes, ...]  # of the directories from the root


class Retention:
    def __init__(self, namespace: Namespace, now_s: Callable[[], float]) -> None:
        self.namespace = namespace
        self.now_s = now_s
        self.streams: dict[int, Stream] = {}
        self.members: dict[int, set[int]] = {}  # generation id → inodes
        self.announced: dict[int, dict[int, int]] = {}  # generation id → inode → promised size
        self.reasons: dict[int, str] = {}  # generation id → why it does not count as complete
        self.claimed: set[int] = set()  # generations that count once the last writer has closed
        self._contexts: dict[int, tuple[int, Context]] = {}
        self._unit: float | None = None

    def restore(self) -> None:
        """Derive streams and members from the namespace, after a replay."""
        for inode in self.namespace.inodes.values():
            if inode.generation and inode.is_file:
                self.members.setdefault(inode.generation, set()).add(inode.ino)
        records = sorted(self.namespace.generations.values(), key=lambda r: r.order)
        for record in records:
            stream = self.stream(record.stream)
            stream.numbers[record.number] = record.generation
            if record.state == State.INCOMPLETE:
                self.reasons[record.generation] = "it was not complete at the last unmount"
            if record.order:
                self._learn(stream, record)
            if record.state == State.COMPLETE:
                self._measure(stream, self._members(record.generation))

    def stream(self, ino: int) -> Stream:
        return self.streams.setdefault(ino, Stream(ino))

    # What holds for a path

    def context(self, directory: int, name: bytes = b"") -> Context:
        """Return the context of a name in a directory, or of the directory itself."""
        base = self._of_directory(directory)
        if not name or base.match is not None:
            return base
        match = lifetimes.recognise([*base.names, name])
        if match is None:
            return base
        stream = self._stream_of(directory, match)
        return Context(base.policy, base.chain, match, stream, base.names)

    def _of_directory(self, ino: int) -> Context:
        if ino not in self.namespace.inodes:
            ino = ROOT  # the directory of a file's newest name may be gone before the file
        cached = self._contexts.get(ino)
        version = self.namespace.version
        if cached is not None and cached[0] == version:
            return cached[1]
        chain = tuple(self._ancestors(ino))
        policy = lifetimes.resolve([self.namespace.get(i).xattrs or {} for i in chain])
        components = self.namespace.components(ino)
        match = lifetimes.recognise(components) if components else None
        if match is not None and not match.is_directory and match.depth == len(components) - 1:
            match = None  # a directory with the name of a file
        stream = self._stream_of(ino, match) if match is not None else 0
        context = Context(policy, chain, match, stream, tuple(components))
        self._contexts[ino] = (version, context)
        return context

    def _ancestors(self, ino: int) -> Iterator[int]:
        while ino != ROOT:
            inode = self.namespace.inodes.get(ino)
            if inode is None:
                break  # the directory of a file's first name may be gone before the file
            yield ino
            ino = inode.parent
        yield ROOT

    def _stream_of(self, directory: int, match: lifetimes.Match) -> int:
        chain = list(self._ancestors(directory))[::-1]  # root first; chain[i] is named by [i - 1]
        return chain[min(match.depth, len(chain) - 1)]

    def policy_of(self, inode: Inode) -> lifetimes.Policy:
        """Return the policy of an inode, its own attributes included."""
        base = self._of_directory(inode.ino if inode.is_dir else inode.parent)
        if inode.is_dir or not inode.xattrs:
            return base.policy
        chain = [inode.xattrs, *(self.namespace.get(i).xattrs or {} for i in base.chain)]
        return lifetimes.resolve(chain)

    def kind_of(self, inode: Inode) -> Kind:
        """Return the kind of zone for an inode's bytes when it is in no generation."""
        return CLASS_KIND[self.policy_of(inode).file_class]

    def class_of(self, inode: Inode) -> FileClass:
        return self.policy_of(inode).file_class

    def cadence_of(self, stream: Stream) -> float | None:
        """Return the seconds between saves, declared or learned."""
        inode = self.namespace.inodes.get(stream.ino)
        declared = self.policy_of(inode).cadence_s if inode is not None else None
        return declared or lifetimes.learned_cadence(stream.intervals)

    def forget(self, inode: Inode) -> None:
        """A directory was removed."""
        self.streams.pop(inode.ino, None)
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
        stream = self.stream(context.stream)
        known = stream.numbers.get(context.match.number)
        if known is not None:
            record = self.namespace.generations[known]
            whole = record.state == State.COMPLETE and context.match.is_directory
            if again and record.state != State.WRITING and not whole:
                return known, [self._writing(record)]
            return known, []
        record = self._born(context.stream, context.match.number, context.policy)
        stream.numbers[record.number] = record.generation
        return record.generation, [record]

    def known(self, directory: int, name: bytes) -> int:
        """Return the generation that a name belongs to, 0 when nothing was written of it."""
        context = self.context(directory, name)
        if context.match is None or context.stream not in self.streams:
            return 0
        return self.streams[context.stream].numbers.get(context.match.number, 0)

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
        record = self._born(inode.ino, 0, policy)
        self.stream(inode.ino).numbers[0] = record.generation
        return record.generation, [record]

    def _born(self, stream: int, number: int, policy: lifetimes.Policy) -> layout.GenerationRecord:
        now = self.now_s()
        birth = now if policy.birth is None else policy.birth
        generation = self.namespace.next_generation
        retire, origin = self._retirement(self.streams.get(stream), birth, policy, number)
        return layout.GenerationRecord(
            generation, stream, number, birth, retire, math.nan, 0, State.WRITING, 0,
            origin.encode()[:255],
        )  # fmt: skip

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
        del self.members[generation]
        self.announced.pop(generation, None)
        self.reasons.pop(generation, None)
        self.claimed.discard(generation)
        record = self.namespace.generations.get(generation)
        if record is None:
            return []
        stream = self.streams.get(record.stream)
        if stream is not None and stream.numbers.get(record.number) == generation:
            del stream.numbers[record.number]
            if record.stream == ino:
                del self.streams[ino]
        return [record._replace(state=State.DELETED)]

    # Completion

    def complete(self, generation: int) -> list[layout.Record]:
        """There is strong evidence that the generation is complete: it counts from now on.

        Not if one of its files speaks against that; and not yet if one is still being written.
        """
        record = self.namespace.generations.get(generation)
        if record is None or record.state == State.COMPLETE:
            return []
        stream = self.stream(record.stream)
        members = self._members(generation)
        doubts = [inode.doubt for inode in members if inode.doubt]
        if doubts:
            return self.incomplete(generation, doubts[0])
        if any(i.is_being_written and not lifetimes.is_tracker(i.name) for i in members):
            self.claimed.add(generation)
            return []
        again = record.order > 0  # saved anew, or one more of its files: no new interval
        record = record._replace(
            state=State.COMPLETE,
            committed=record.committed if again else self.now_s(),
            order=self.namespace.next_order,
            size=sum(i.size for i in members),
        )
        if again:
            stream.size = record.size
        else:
            self._learn(stream, record)
        self._measure(stream, members)
        self.reasons.pop(generation, None)
        self.claimed.discard(generation)
        return [record, *self._refreshed(stream, record)]

    def incomplete(self, generation: int, reason: str) -> list[layout.Record]:
        """Something speaks against the generation being complete: it does not count."""
        record = self.namespace.generations.get(generation)
        if record is None:
            return []
        self.claimed.discard(generation)
        self.reasons[generation] = reason
        known = record.state == State.INCOMPLETE
        return [] if known else [record._replace(state=State.INCOMPLETE)]

    def vouched(self, generation: int) -> None:
        """Somebody who must know says that the files are whole, whatever we have seen."""
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
        stream = self.stream(self.namespace.generations[generation].stream)
        for older in stream.numbers.values():
            record = self.namespace.generations[older]
            if older >= generation or record.state != State.WRITING:
                continue
            if not any(inode.handles for inode in self._members(older)):
                yield from self.incomplete(older, "a newer one was completed before it")

    def _measure(self, stream: Stream, members: list[Inode]) -> None:
        """Learn the sizes of single files, to judge those of the next generation by."""
        for inode in members:
            if inode.parent == stream.ino:
                name = self.namespace.components(inode.ino)[-1]
                match = self.context(inode.parent, name).match
                if match is not None:
                    stream.stems[match.stem] = inode.size

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

    def _learn(self, stream: Stream, record: layout.GenerationRecord) -> None:
        if record.committed > stream.last_commit_s:
            stream.intervals.append(record.committed - stream.last_commit_s)
            del stream.intervals[: -lifetimes.prediction.CADENCE_HISTORY]
        stream.last_commit_s = record.committed
        stream.size = record.size or stream.size
        self._unit = None

    def refresh(self, inode: Inode) -> list[layout.Record]:
        """A policy changed at an inode: retirements of the streams at, below and around follow."""
        record = self.namespace.generations.get(inode.generation)
        around = {record.stream} if record is not None else set()
        if inode.is_dir:
            around.add(self._of_directory(inode.ino).stream)
        records: list[layout.Record] = []
        for stream in self.streams.values():
            top = self.namespace.inodes.get(stream.ino)
            if top is None:
                continue
            if stream.ino in around or self.namespace.below(top, inode.ino):
                records += self._refreshed(stream)
        return records

    def _refreshed(
        self, stream: Stream, newest: layout.GenerationRecord | None = None
    ) -> Iterator[layout.Record]:
        if stream.ino not in self.namespace.inodes:
            return
        for generation in stream.numbers.values():
            record = self.namespace.generations.get(generation)
            if newest is not None and generation == newest.generation:
                record = newest
            if record is None:
                continue
            policy = self._policy_for(record)
            retire, origin = self._retirement(stream, record.birth, policy, record.number)
            origin_bytes = origin.encode()[:255]
            if not _same(retire, record.retire) or origin_bytes != record.origin:
                yield record._replace(retire=retire, origin=origin_bytes)

    def _policy_for(self, record: layout.GenerationRecord) -> lifetimes.Policy:
        """Return the policy of a generation: an anchor or a retirement that is stated at one of
        its files goes before what its stream says."""
        policies = [self.policy_of(inode) for inode in self.tops(record)]
        policies.append(self.policy_of(self.namespace.get(record.stream)))
        stated = [p for p in policies if p.anchor] or [p for p in policies if p.retire is not None]
        return (stated or policies)[0]

    def judge(self, inode: Inode, stem: bytes, finding: lifetimes.Finding) -> str:
        """What speaks against a single file that was just closed being whole; "" if nothing."""
        if finding.verdict is lifetimes.Verdict.OK:
            return ""
        if finding.verdict is lifetimes.Verdict.BROKEN:
            return finding.reason
        record = self.namespace.generations[inode.generation]
        learned = self.stream(record.stream).stems.get(stem, 0)
        if inode.size and inode.size >= SIZE_EVIDENCE * learned:
            return ""
        return f"{inode.size} bytes, the one before had {learned}"

    def marked(self, directory: int, name: bytes) -> bool:
        """Whether a file of this name completes the generation that it is directly inside."""
        match = self._of_directory(directory).match
        if match is None or match.temporary:
            return False
        at_top = match.depth == len(self._of_directory(directory).names) - 1
        return at_top and lifetimes.marker(match.layout, name)

    # Retirement

    def _retirement(
        self, stream: Stream | None, birth: float, policy: lifetimes.Policy, number: int
    ) -> tuple[float, str]:
        cadence = lifetimes.learned_cadence(stream.intervals) if stream is not None else None
        retire, origin = lifetimes.retirement(birth, cadence, policy, number)
        if retire is None and policy.keep_last is not None:
            # The first save of a stream: rank it with the latest known retirement.
            known = [
                g.retire for g in self.namespace.generations.values() if math.isfinite(g.retire)
            ]
            guess = birth + policy.keep_last * CADENCE_GUESS_S
            return max([guess, *known]), f"{origin}; ranked with the latest known retirement"
        return (math.nan if retire is None else retire), origin

    def retire_of(self, generation: int) -> float:
        """Return the retirement epoch of a generation; inf for an anchor and for what has none."""
        record = self.namespace.generations.get(generation)
        if record is None or math.isnan(record.retire):
            return math.inf
        return record.retire

    def hint_of(self, generation: int) -> Hint:
        record = self.namespace.generations.get(generation)
        if record is None or math.isnan(record.retire):
            return Hint(Kind.UNHINTED, math.inf, 0)
        stream = self.streams.get(record.stream)
        # It may be stated for this generation alone, at its directory.
        first = next(iter(self.members.get(generation, ())), record.stream)
        inode = self.namespace.inodes.get(first)
        stated = self.policy_of(inode).size if inode is not None else None
        learned = stream.size if stream is not None else 0
        announced = sum(self.announced.get(generation, {}).values())
        size = stated or max(announced, learned)
        kind = Kind.ANCHOR if math.isinf(record.retire) else Kind.FINITE
        return Hint(kind, record.retire, size)

    def announce(self, inode: Inode, size: int) -> None:
        """A file grew to its size before its bytes came (ftruncate)."""
        if inode.generation:
            self.announced.setdefault(inode.generation, {})[inode.ino] = size

    def unit_s(self) -> float:
        """Return placement's unit E in seconds: a quarter of the streams' median cadence."""
        if self._unit is None:
            live = [s for s in self.streams.values() if s.numbers]
            cadences = [self.cadence_of(s) for s in live]
            known = [c for c in cadences if c]
            self._unit = (median(known) if known else CADENCE_GUESS_S) / E_PER_CADENCE
        return self._unit

    def reapable(self, generation: int) -> list[int]:
        """Return the generations that the stream of a just completed one keeps no longer.

        The newest K in commit order and anchors are never among them.
        """
        newest = self.namespace.generations.get(generation)
        inode = self.namespace.inodes.get(newest.stream) if newest is not None else None
        if newest is None or inode is None:
            return []
        policy = self.policy_of(inode)
        if not policy.reap or policy.keep_last is None:
            return []
        stream = self.stream(newest.stream)
        records = [self.namespace.generations[g] for g in stream.numbers.values()]
        complete = [r for r in records if r.state in (State.COMPLETE, State.RETIRED)]
        complete.sort(key=lambda r: -r.order)
        beyond = complete[policy.keep_last :]
        return [r.generation for r in beyond if not math.isinf(r.retire)]

    def tops(self, record: layout.GenerationRecord) -> list[Inode]:
        """Return what a generation consists of directly below its stream: a directory, or files."""
        tops: dict[int, Inode] = {}
        for ino in sorted(self.members.get(record.generation, ())):
            inode = self.namespace.inodes.get(ino)
            while inode is not None and inode.parent != record.stream and inode.ino != ROOT:
                if record.stream == inode.ino:
                    break
                inode = self.namespace.inodes.get(inode.parent)
            if inode is not None and inode.ino != ROOT:
                tops[inode.ino] = inode
        return list(tops.values())

    def names_of(self, generation: int) -> list[tuple[int, bytes]]:
        """Return (directory, name) of everything that a generation consists of."""
        record = self.namespace.generations[generation]
        numbers = {inode.ino for inode in self.tops(record)}
        stream = self.namespace.inodes.get(record.stream)
        entries = (stream.entries if stream is not None else None) or {}
        return [(record.stream, name) for name, ino in entries.items() if ino in numbers]


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))
