"""Which files are in which generation, and the names that say so."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from retainzfs import layout, lifetimes
from retainzfs.contexts import Contexts
from retainzfs.namespace import ROOT, Inode
from retainzfs.streams import Stream

YOUNG = 2  # births until which a stream may find that its generations have several files


class Membership(Contexts):
    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.streams: dict[int, list[Stream]] = {}  # of a directory
        self.members: dict[int, set[int]] = {}  # generation → inodes
        self.shared: dict[int, set[int]] = {}  # inode → generations, where it is in several
        self._of: dict[int, Stream] = {}  # generation → its stream

    def all_streams(self) -> Iterator[Stream]:
        for here in self.streams.values():
            yield from here

    def records(self, stream: Stream) -> list[layout.GenerationRecord]:
        """Return the generations of a stream; one that is just being born has no record yet."""
        known = self.namespace.generations
        return [known[g] for g in stream.numbers.values() if g in known]

    def _find(self, directory: int, match: lifetimes.Match) -> Stream | None:
        """Return the stream that a name belongs to, if there is one."""
        here = self.streams.get(directory, [])
        for stream in here:
            if match.series in stream.series:
                return stream
        for stream in here if not match.is_directory else ():
            # The second file of a save, like the optimizer's: no other job begins just now. Not so
            # a directory, which has all of a save: its marker says nothing of another one.
            young = len(stream.history.births) <= YOUNG
            if young and match.number == stream.newest and self._of_files(stream, match.number):
                return stream
        return None

    def _of_files(self, stream: Stream, number: int) -> bool:
        """Whether a generation has files directly in its stream's directory."""
        members = self.members.get(stream.numbers[number], ())
        return any(self.namespace.get(ino).parent == stream.ino for ino in members)

    def known(self, directory: int, name: bytes) -> int:
        """Return the generation that a name belongs to, 0 when nothing was written of it."""
        context = self.context(directory, name)
        if context.match is None:
            return 0
        stream = self._find(context.stream, context.match)
        return 0 if stream is None else stream.numbers.get(context.match.number, 0)

    def generation_of(self, inode: Inode) -> int:
        """Return the generation of a file, or that which a directory belongs to; 0: none."""
        if not inode.is_dir:
            return inode.generation
        names = self.namespace.components(inode.ino)
        return self.known(inode.parent, names[-1]) if names else 0

    def record_of(self, inode: Inode) -> layout.GenerationRecord | None:
        """Return the generation that a file or a directory belongs to."""
        return self.namespace.generations.get(self.generation_of(inode))

    def tops(self, record: layout.GenerationRecord) -> list[Inode]:
        """Return what a generation consists of directly below its stream: a directory, or files."""
        tops: dict[int, Inode] = {}
        for ino in sorted(self.members.get(record.generation, ())):
            inode = self.namespace.inodes[ino]
            parents = [inode.parent]
            if ino in self.namespace.links and ino != record.stream:
                places = self.namespace.names(inode)
                parents = [place[0] for place in places if self._names(record, *place)]
            for parent in parents:
                top = self._top(inode, parent, record.stream)
                if top is not None:
                    tops[top.ino] = top
        return list(tops.values())

    def _top(self, inode: Inode, parent: int, stream: int) -> Inode | None:
        while stream not in (parent, inode.ino):
            above = self.namespace.inodes.get(parent)
            if above is None or above.ino == ROOT:
                return None
            inode, parent = above, above.parent
        return inode

    def _names(self, record: layout.GenerationRecord, directory: int, name: bytes) -> bool:
        """Whether a name is of a generation; while a mount restores its streams, whether it may."""
        context = self.context(directory, name)
        if context.match is None or context.stream != record.stream:
            return False
        number = context.match.number
        stream = self._find(context.stream, context.match)
        known = None if stream is None else stream.numbers.get(number)
        return number == record.number and known in (None, record.generation)

    def match_of(self, directory: int, top: Inode) -> lifetimes.Match | None:
        name = self.namespace.components(top.ino)[-1]
        return self.context(directory, name).match

    def names_of(self, generation: int) -> list[tuple[int, bytes]]:
        """Return (directory, name) of everything that a generation consists of."""
        record = self.namespace.generations[generation]
        tops = self.tops(record)
        numbers = {inode.ino for inode in tops}
        stream = self.namespace.inodes.get(record.stream)
        entries = (stream.entries if stream is not None else None) or {}
        links = self.namespace.links
        if all(top.ino not in links and entries.get(top.name) == top.ino for top in tops):
            return [(record.stream, top.name) for top in tops]
        return [
            (record.stream, name)
            for name, ino in entries.items()
            if ino in numbers
            and (ino not in self.namespace.links or self._names(record, record.stream, name))
        ]

    # A file with several names is in the generations of all of them

    def generations_of(self, inode: Inode) -> set[int]:
        return self.shared.get(inode.ino) or {inode.generation} - {0}

    def joins(self, inode: Inode, generations: set[int]) -> set[int]:
        """An inode is in these generations from now on; return those that it has left."""
        left = self.generations_of(inode) - generations
        for generation in generations:
            self.members.setdefault(generation, set()).add(inode.ino)
        self.shared.pop(inode.ino, None)
        if len(generations) > 1:
            self.shared[inode.ino] = generations
        return left
