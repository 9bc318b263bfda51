"""Which files are in which generation, and the names that say so."""

from __future__ import annotations

from collections.abc import Iterator

from retainzfs import layout, lifetimes
from retainzfs.config import Configured
from retainzfs.contexts import Contexts
from retainzfs.namespace import ROOT, Inode, Namespace
from retainzfs.streams import Stream

YOUNG = 2  # births until which a stream may find that its generations have several files


class Membership(Contexts):
    def __init__(self, namespace: Namespace, configured: Configured | None = None) -> None:
        super().__init__(namespace, configured)
        self.streams: dict[int, list[Stream]] = {}  # of a directory
        self.members: dict[int, set[int]] = {}  # generation → inodes
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
        for stream in here:
            # The second file of a save, like the optimizer's: no other job begins just now.
            young = len(stream.history.births) <= YOUNG
            if young and match.number == stream.newest:
                return stream
        return None

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
            inode = self.namespace.inodes.get(ino)
            while inode is not None and inode.parent != record.stream and inode.ino != ROOT:
                if record.stream == inode.ino:
                    break
                inode = self.namespace.inodes.get(inode.parent)
            if inode is not None and inode.ino != ROOT:
                tops[inode.ino] = inode
        return list(tops.values())

    def match_of(self, directory: int, top: Inode) -> lifetimes.Match | None:
        name = self.namespace.components(top.ino)[-1]
        return self.context(directory, name).match

    def names_of(self, generation: int) -> list[tuple[int, bytes]]:
        """Return (directory, name) of everything that a generation consists of."""
        record = self.namespace.generations[generation]
        numbers = {inode.ino for inode in self.tops(record)}
        stream = self.namespace.inodes.get(record.stream)
        entries = (stream.entries if stream is not None else None) or {}
        return [(record.stream, name) for name, ino in entries.items() if ino in numbers]
