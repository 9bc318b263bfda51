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
from typing import Any

from retainzfs import hints, layout
from retainzfs.hints import FileClass, Layout
from retainzfs.lanes import Hint
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


@dataclass(frozen=True, slots=True)
class Context:
    """What holds for one path."""

    policy: hints.Policy
    chain: tuple[int, ...]  # inodes whose attributes were looked at, nearest first
    match: hints.Match | None
    stream: int  # inode of the stream's directory, 0 without a match
    names: tuple[bytes, ...]  # of the directories from the root


class Retention:
    def __init__(self, namespace: Namespace, now_s: Callable[[], float]) -> None:
        self.namespace = namespace
        self.now_s = now_s
        self.streams: dict[int, Stream] = {}
        self.members: dict[int, set[int]] = {}  # generation id → inodes
        self.announced: dict[int, int] = {}  # generation id → bytes that ftruncate promised
        self.reasons: dict[int, str] = {}  # generation id → why it does not count as complete
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
            if record.order:
                self._learn(stream, record)

    def stream(self, ino: int) -> Stream:
        return self.streams.setdefault(ino, Stream(ino))

    # What holds for a path

    def context(self, directory: int, name: bytes = b"") -> Context:
        """Return the context of a name in a directory, or of the directory itself."""
        base = self._of_directory(directory)
        if not name or base.match is not None:
            return base
        match = hints.recognise([*base.names, name])
        if match is None:
            return base
        stream = self._stream_of(directory, match)
        return Context(base.policy, base.chain, match, stream, base.names)

    def _of_directory(self, ino: int) -> Context:
        cached = self._contexts.get(ino)
        version = self.namespace.version
        if cached is not None and cached[0] == version:
            return cached[1]
        chain = tuple(self._ancestors(ino))
        policy = hints.resolve([self.namespace.get(i).xattrs or {} for i in chain])
        components = self.namespace.components(ino)
        match = hints.recognise(components) if components else None
        if match is not None and not match.is_directory and match.depth == len(components) - 1:
            match = None  # a directory with the name of a file
        stream = self._stream_of(ino, match) if match is not None else 0
        context = Context(policy, chain, match, stream, tuple(components))
        self._contexts[ino] = (version, context)
        return context

    def _ancestors(self, ino: int) -> Iterator[int]:
        while ino != ROOT:
            yield ino
            ino = self.namespace.get(ino).parent
        yield ROOT

    def _stream_of(self, directory: int, match: hints.Match) -> int:
        chain = list(self._ancestors(directory))[::-1]  # root first; chain[i] is named by [i - 1]
        return chain[min(match.depth, len(chain) - 1)]

    def policy_of(self, inode: Inode) -> hints.Policy:
        """Return the policy of an inode, its own attributes included."""
        base = self._of_directory(inode.ino if inode.is_dir else inode.parent)
        if inode.is_dir or not inode.xattrs:
            return base.policy
        chain = [inode.xattrs, *(self.namespace.get(i).xattrs or {} for i in base.chain)]
        return hints.resolve(chain)

    def kind_of(self, inode: Inode) -> Kind:
        """Return the kind of zone for an inode's bytes when it is in no generation."""
        return CLASS_KIND[self.policy_of(inode).file_class]

    def class_of(self, inode: Inode) -> FileClass:
        return self.policy_of(inode).file_class

    def cadence_of(self, stream: Stream) -> float | None:
        """Return the seconds between saves, declared or learned."""
        inode = self.namespace.inodes.get(stream.ino)
        declared = self.policy_of(inode).cadence_s if inode is not None else None
        return declared or hints.learned_cadence(stream.intervals)

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
            if again and record.state in (State.COMPLETE, State.INCOMPLETE):
                return known, [record._replace(state=State.WRITING)]
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

    def _born(self, stream: int, number: int, policy: hints.Policy) -> layout.GenerationRecord:
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
        """There is strong evidence that the generation is complete: it counts from now on."""
        record = self.namespace.generations.get(generation)
        if record is None or record.state == State.COMPLETE:
            return []
        now = self.now_s()
        size = sum(self.namespace.get(i).size for i in self.members.get(generation, ()))
        order = self.namespace.next_order
        record = record._replace(state=State.COMPLETE, committed=now, order=order, size=size)
        stream = self.stream(record.stream)
        self._learn(stream, record)
        self.reasons.pop(generation, None)
        return [record, *self._refreshed(stream, record)]

    def incomplete(self, generation: int, reason: str) -> list[layout.Record]:
        """Something speaks against the generation being complete: it does not count."""
        record = self.namespace.generations.get(generation)
        if record is None or record.state != State.WRITING:
            return []
        self.reasons[generation] = reason
        return [record._replace(state=State.INCOMPLETE)]

    def _learn(self, stream: Stream, record: layout.GenerationRecord) -> None:
        if record.committed > stream.last_commit_s:
            stream.intervals.append(record.committed - stream.last_commit_s)
            del stream.intervals[: -hints.lifetimes.CADENCE_HISTORY]
        stream.last_commit_s = record.committed
        stream.size = record.size or stream.size
        self._unit = None

    def refresh(self, ino: int) -> list[layout.Record]:
        """A policy changed at or above the streams below `ino`: retirements follow."""
        records: list[layout.Record] = []
        for stream in self.streams.values():
            inode = self.namespace.inodes.get(stream.ino)
            if inode is not None and self.namespace.below(inode, ino):
                records += self._refreshed(stream)
        return records

    def _refreshed(
        self, stream: Stream, newest: layout.GenerationRecord | None = None
    ) -> Iterator[layout.Record]:
        inode = self.namespace.inodes.get(stream.ino)
        if inode is None:
            return
        policy = self.policy_of(inode)
        for generation in stream.numbers.values():
            record = self.namespace.generations.get(generation)
            if newest is not None and generation == newest.generation:
                record = newest
            if record is None:
                continue
            retire, origin = self._retirement(stream, record.birth, policy, record.number)
            origin_bytes = origin.encode()[:255]
            if not _same(retire, record.retire) or origin_bytes != record.origin:
                yield record._replace(retire=retire, origin=origin_bytes)

    def judge(
        self, generation: int, inode: Inode, finding: hints.Finding, *, failed: bool
    ) -> tuple[bool, str]:
        """Whether a single-file generation that was just closed is complete, and why."""
        if failed:
            return False, "a write to it failed"
        if finding.verdict is hints.Verdict.OK:
            return True, finding.reason
        if finding.verdict is hints.Verdict.BROKEN:
            return False, finding.reason
        record = self.namespace.generations[generation]
        learned = self.stream(record.stream).size
        if inode.size and inode.size >= SIZE_EVIDENCE * learned:
            return True, "closed, and as long as the one before"
        return False, f"{inode.size} bytes, the one before had {learned}"

    def marked(self, directory: int, name: bytes) -> bool:
        """Whether a file of this name completes the generation that it is directly inside."""
        match = self._of_directory(directory).match
        if match is None or match.temporary:
            return False
        at_top = match.depth == len(self._of_directory(directory).names) - 1
        return at_top and hints.marker(match.layout, name)

    # Retirement

    def _retirement(
        self, stream: Stream | None, birth: float, policy: hints.Policy, number: int
    ) -> tuple[float, str]:
        cadence = hints.learned_cadence(stream.intervals) if stream is not None else None
        retire, origin = hints.retirement(birth, cadence, policy, number)
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
        inode = self.namespace.inodes.get(record.stream)
        stated = self.policy_of(inode).size if inode is not None else None
        learned = stream.size if stream is not None else 0
        size = stated or max(self.announced.get(generation, 0), learned)
        kind = Kind.ANCHOR if math.isinf(record.retire) else Kind.FINITE
        return Hint(kind, record.retire, size)

    def announce(self, generation: int, nbytes: int) -> None:
        """A file of the generation grew to its size before its bytes came (ftruncate)."""
        if generation:
            self.announced[generation] = self.announced.get(generation, 0) + nbytes

    def unit_s(self) -> float:
        """Return placement's unit E in seconds: a quarter of the streams' median cadence."""
        if self._unit is None:
            cadences = [hints.learned_cadence(s.intervals) for s in self.streams.values()]
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

    def names_of(self, generation: int) -> list[tuple[int, bytes]]:
        """Return (directory, name) of everything that a generation consists of."""
        record = self.namespace.generations[generation]
        base = self.namespace.components(record.stream)
        names = []
        for name in self.namespace.directory(record.stream):
            match = hints.recognise([*base, name])
            if match is not None and match.depth == len(base) and match.number == record.number:
                names.append((record.stream, name))
        return names

    # For people

    def table(self, ino: int) -> list[dict[str, Any]]:
        """Return the rows of `generations --json` for the streams at and below a directory."""
        rows: list[dict[str, Any]] = []
        for stream in sorted(self.streams.values(), key=lambda s: s.ino):
            inode = self.namespace.inodes.get(stream.ino)
            if inode is None or not self.namespace.below(inode, ino):
                continue
            names = self._names(stream.ino) if inode.is_dir else {}
            base = self.namespace.path(stream.ino).rstrip("/")
            for number, generation in sorted(stream.numbers.items()):
                record = self.namespace.generations[generation]
                name = names.get(number)
                path = f"{base}/{name.decode(errors='surrogateescape')}" if name else base
                rows.append(self._row(record, path))
        return rows

    def _row(self, record: layout.GenerationRecord, path: str) -> dict[str, Any]:
        inodes = [self.namespace.get(i) for i in self.members.get(record.generation, ())]
        zones = {e.run.zone for i in inodes for e in i.extents if e.run.zone >= 0}
        state = State(record.state)
        if state is State.COMPLETE and record.retire <= self.now_s():
            state = State.RETIRED
        return {
            "number": record.number,
            "path": path,
            "state": state.name.lower(),
            "size": sum(i.size for i in inodes),
            "birth_epoch": record.birth,
            "retire_epoch": record.retire if math.isfinite(record.retire) else None,
            "anchor": math.isinf(record.retire),
            "origin": record.origin.decode(errors="replace"),
            "reason": self.reasons.get(record.generation),
            "zones": sorted(zones),
            "published": None,
        }

    def _names(self, directory: int) -> dict[int, bytes]:
        base = self.namespace.components(directory)
        names: dict[int, bytes] = {}
        for name in self.namespace.directory(directory):
            match = hints.recognise([*base, name])
            if match is not None and match.depth == len(base):
                names.setdefault(match.number, name)
        return names

    def explain(self, inode: Inode) -> dict[str, Any]:
        """Return what `hint PATH` shows: what applies, and where it was found."""
        name = b"" if inode.is_dir else (self.namespace.components(inode.ino) or [b""])[-1]
        context = self.context(inode.ino if inode.is_dir else inode.parent, name)
        policy = self.policy_of(inode)
        own = not inode.is_dir and bool(inode.xattrs)
        chain = (inode.ino, *context.chain) if own else context.chain
        fields = {
            field: {
                "value": _plain(getattr(policy, field)),
                "from": self.namespace.path(chain[index]),
            }
            for field, index in policy.origins.items()
        }
        record = self.namespace.generations.get(inode.generation)
        if record is None and context.match is not None:
            stream = self.streams.get(context.stream)
            known = stream.numbers.get(context.match.number) if stream is not None else None
            record = self.namespace.generations.get(known or 0)
        return {
            "path": self.namespace.path(inode.ino),
            "class": policy.file_class.value,
            "attributes": fields,
            "layout": None if context.match is None else Layout(context.match.layout).value,
            "stream": None if context.match is None else self.namespace.path(context.stream),
            "generation": None if record is None else record.number,
            "state": None if record is None else State(record.state).name.lower(),
            "birth_epoch": None if record is None else record.birth,
            "retire_epoch": None
            if record is None or not math.isfinite(record.retire)
            else record.retire,
            "anchor": record is not None and math.isinf(record.retire),
            "origin": self._origin(record, context, policy),
        }

    def _origin(
        self,
        record: layout.GenerationRecord | None,
        context: Context,
        policy: hints.Policy,
    ) -> str:
        if record is not None:
            return record.origin.decode(errors="replace")
        if context.match is not None:
            return f"generation {context.match.number} by its name; nothing written yet"
        if policy.origins:
            return "attributes, but no generation: the name has no number"
        return f"class {policy.file_class.value} by default"


def _same(a: float, b: float) -> bool:
    return a == b or (math.isnan(a) and math.isnan(b))


def _plain(value: Any) -> Any:
    return value.value if isinstance(value, FileClass) else value
