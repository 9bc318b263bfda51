"""What holds for a path: its policy, and the generation that its name belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from retainzfs import lifetimes
from retainzfs.lifetimes import FileClass
from retainzfs.namespace import ROOT, Inode, Namespace
from retainzfs.zones import Kind

CLASS_KIND = {
    FileClass.CHECKPOINT: Kind.UNHINTED,
    FileClass.CACHE: Kind.CACHE,
    FileClass.SCRATCH: Kind.SCRATCH,
    FileClass.OUTPUT: Kind.OUTPUT,
}
KEEP_LAST = b"user.retainz.keep_last"


@dataclass(frozen=True, slots=True)
class Context:
    """What holds for one path."""

    policy: lifetimes.Policy
    chain: tuple[int, ...]  # inodes whose attributes were looked at, nearest first
    match: lifetimes.Match | None
    stream: int  # inode of the stream's directory, 0 without a match
    names: tuple[bytes, ...]  # of the directories from the root


class Contexts:
    def __init__(self, namespace: Namespace) -> None:
        self.namespace = namespace
        self.series: dict[int, set[bytes]] = {}  # directory → series that are known to be streams
        self._contexts: dict[int, tuple[int, Context]] = {}

    def context(self, directory: int, name: bytes = b"") -> Context:
        """Return the context of a name in a directory, or of the directory itself."""
        base = self._of_directory(directory)
        if not name or base.match is not None:
            return base
        match = self._recognise(base.chain, [*base.names, name])
        if match is None:
            return base
        stream = self._stream_of(base.chain, match)
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
        match = self._recognise(chain, components) if components else None
        if match is not None and not match.is_directory and match.depth == len(components) - 1:
            match = None  # a directory with the name of a file
        stream = self._stream_of(chain, match) if match is not None else 0
        context = Context(policy, chain, match, stream, tuple(components))
        self._contexts[ino] = (version, context)
        return context

    def _recognise(self, chain: tuple[int, ...], components: list[bytes]) -> lifetimes.Match | None:
        directories = chain[::-1]  # root first; each holds the component of its index

        def knows(depth: int, series: bytes) -> bool:
            ino = directories[min(depth, len(directories) - 1)]
            return series in self.series.get(ino, ()) or (
                self.declared(ino) and lifetimes.usual_series(series)
            )

        return lifetimes.recognise(components, knows)

    def declared(self, ino: int) -> bool:
        """Whether somebody says of this very directory that it holds generations."""
        return KEEP_LAST in (self.namespace.get(ino).xattrs or {})

    def know(self, ino: int, series: bytes) -> None:
        """Names of a series in a directory are generations from now on."""
        known = self.series.setdefault(ino, set())
        if series not in known:
            known.add(series)
            self._contexts.clear()

    def _ancestors(self, ino: int) -> Iterator[int]:
        while ino != ROOT:
            inode = self.namespace.inodes.get(ino)
            if inode is None:
                break  # the directory of a file's first name may be gone before the file
            yield ino
            ino = inode.parent
        yield ROOT

    @staticmethod
    def _stream_of(chain: tuple[int, ...], match: lifetimes.Match) -> int:
        return chain[::-1][min(match.depth, len(chain) - 1)]

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

    def marked(self, directory: int, name: bytes) -> bool:
        """Whether a file of this name completes the generation that it is directly inside."""
        base = self._of_directory(directory)
        if base.match is None or base.match.temporary:
            return False
        at_top = base.match.depth == len(base.names) - 1
        return at_top and lifetimes.marker(base.match.layout, name)
