"""What holds for a path: its policy, and the generation that its name belongs to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from retainzfs import lifetimes
from retainzfs.config import Configured, StreamTable
from retainzfs.lifetimes import FileClass
from retainzfs.namespace import ROOT, Inode, Namespace
from retainzfs.zone import Kind

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
    configured: tuple[StreamTable, ...] = ()  # what the mount's configuration says, nearest first


class Contexts:
    def __init__(
        self,
        namespace: Namespace,
        now_s: Callable[[], float],
        configured: Configured | None = None,
    ) -> None:
        self.namespace = namespace
        self.now_s = now_s  # the mount's timeline
        self.configured = configured or Configured()
        self.series: dict[int, set[bytes]] = {}  # directory → series that are known to be streams
        self._contexts: dict[int, tuple[int, Context]] = {}

    def context(self, directory: int, name: bytes = b"") -> Context:
        """Return the context of a name in a directory, or of the directory itself."""
        base = self._of_directory(directory)
        if not name or (base.match is not None and base.match.usual):
            return base
        match = self._recognise(base.chain, [*base.names, name])
        if match is None or (base.match is not None and not match.is_directory):
            return base
        stream = self._stream_of(base.chain, match)
        return replace(base, match=match, stream=stream)

    def _of_directory(self, ino: int) -> Context:
        if ino not in self.namespace.inodes:
            ino = ROOT  # the directory of a file's newest name may be gone before the file
        cached = self._contexts.get(ino)
        version = self.namespace.version
        if cached is not None and cached[0] == version:
            return cached[1]
        chain = tuple(self._ancestors(ino))
        components = self.namespace.components(ino)
        configured = self.configured.of(components)
        policy = lifetimes.resolve(self._attributes(chain, configured))
        match = self._recognise(chain, components) if components else None
        if match is not None and not match.is_directory and match.depth == len(components) - 1:
            match = None  # a directory with the name of a file
        stream = self._stream_of(chain, match) if match is not None else 0
        context = Context(policy, chain, match, stream, tuple(components), configured)
        self._contexts[ino] = (version, context)
        return context

    def _attributes(
        self, chain: tuple[int, ...], configured: tuple[StreamTable, ...]
    ) -> list[Mapping[bytes, bytes]]:
        stored = [self.namespace.get(i).xattrs or {} for i in chain]
        return [*stored, *(table.attributes for table in configured)]

    def _recognise(self, chain: tuple[int, ...], components: list[bytes]) -> lifetimes.Match | None:
        directories = chain[::-1]  # root first; each holds the component of its index

        def knows(depth: int, series: bytes) -> bool:
            ino = directories[min(depth, len(directories) - 1)]
            if series in self.series.get(ino, ()):
                return True
            return lifetimes.usual_series(series) and self._declared(ino, components[:depth])

        return lifetimes.recognise(components, knows)

    def _declared(self, ino: int, names: list[bytes]) -> bool:
        """Whether somebody says of this very directory that it holds generations."""
        stated = KEEP_LAST in (self.namespace.get(ino).xattrs or {})
        return stated or self.configured.declares(names)

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
        return lifetimes.resolve([inode.xattrs, *self._attributes(base.chain, base.configured)])

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
