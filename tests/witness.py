"""Who remembers what a volume acknowledged, and holds a volume that comes back to it.

A `WatchedVolume` is a volume that tells its `Witness` of every call. The witness keeps its own
plain picture of the tree, as a history, so that it knows for every moment (the number of operations
that the device had done) what a crash then may and may not have taken away:

- The names are those after some prefix of the changes of names; no shorter than the last
  acknowledged one, no longer than what was asked for.
- A file's bytes are those of its last acknowledged version where nothing was written since, and
  where something was, each byte is of one of the versions since, or zero.
- A file that was renamed before any `fsync` has, under its new name, the bytes that it had then.
- A generation that was acknowledged as complete is complete.
"""

from __future__ import annotations

import stat
from bisect import bisect_right
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from operator import itemgetter
from typing import Any, NamedTuple, Self

from retainzfs import errors, lifetimes
from retainzfs.device.faults import FaultDevice
from retainzfs.layout import BLOCK, Record
from retainzfs.namespace import ROOT, Inode
from retainzfs.streams import State
from retainzfs.volume import Options, Volume

COMMIT = b"user.retainz.commit"
WHOLE = (State.COMPLETE, State.RETIRED)
Place = tuple[int, bytes]  # directory, name


class Violation(AssertionError):
    """A crash took what it may not take, or left what it may not leave."""


@dataclass
class Node:
    mode: int
    target: bytes = b""
    entries: dict[bytes, int] = field(default_factory=dict)
    xattrs: dict[bytes, bytes] = field(default_factory=dict)


Nodes = dict[int, Node]


def _copied(nodes: Nodes) -> Nodes:
    return {
        ino: replace(node, entries=dict(node.entries), xattrs=dict(node.xattrs))
        for ino, node in nodes.items()
    }


class Step(NamedTuple):
    """One change of names or attributes, that happens whole or not at all."""

    at: int  # operations of the device before it
    what: str
    change: Callable[[Nodes], None]
    touched: frozenset[int]  # inodes that it is about, directories included


class File:
    """The history of a file's bytes."""

    def __init__(self, content: bytes = b"") -> None:
        self.edits: list[tuple[int, int, bytes | None]] = []  # (at, offset or new size, data)
        self.begun: list[int] = []  # moments at which a change was asked for
        self.acknowledged: list[tuple[int, int]] = [(0, 0)]  # (at, version)
        self._first = content
        self.rewind()

    def rewind(self) -> None:
        """Let `contents` be asked for the first versions again."""
        self._version = 0
        self._content = bytearray(self._first)  # of that version

    @property
    def version(self) -> int:
        return len(self.edits)

    def issued(self, at: int) -> int:
        """Return the newest version that was asked for when the device had done so much."""
        return bisect_right(self.edits, at, key=itemgetter(0))

    def kept(self, at: int) -> int:
        """Return the newest version that must survive a crash then."""
        known = bisect_right(self.acknowledged, at, key=itemgetter(0))
        return max(version for _, version in self.acknowledged[:known])

    def acknowledge(self, at: int, version: int) -> None:
        if version > self.acknowledged[-1][1]:
            self.acknowledged.append((at, version))

    def contents(self, first: int, last: int) -> list[bytes]:
        """Return the contents of versions `first` to `last`; later calls ask for no older ones."""
        assert first >= self._version, "the moments are looked at in their order"
        while self._version < first:
            _edit(self._content, self.edits[self._version])
            self._version += 1
        out = [bytes(self._content)]
        content = bytearray(self._content)
        for edit in self.edits[first:last]:
            _edit(content, edit)
            out.append(bytes(content))
        return out


def _edit(content: bytearray, edit: tuple[int, int, bytes | None]) -> None:
    _, offset, data = edit
    if data is None:
        del content[offset:]
    if len(content) < offset:
        content += bytes(offset - len(content))
    if data is not None:
        content[offset : offset + len(data)] = data


class Promise(NamedTuple):
    """A generation was acknowledged as complete."""

    at: int
    step: int
    begun: dict[int, int]  # file → how many changes had been asked for
    touched: frozenset[int]  # its files and their directories


class Witness:
    """`device` is asked only for the number of its operations."""

    def __init__(self, device: FaultDevice, nodes: Nodes | None = None) -> None:
        self.device = device
        self.files: dict[int, File] = {}
        self.steps: list[Step] = []
        self.floors: list[tuple[int, int]] = [(0, 0)]  # (at, steps that must survive)
        self.orders: list[tuple[int, int, int]] = []  # (step, inode, version)
        self.promises: list[Promise] = []
        self.acknowledgements = 0
        self._first = nodes or {ROOT: Node(stat.S_IFDIR | 0o755)}
        self.rewind()

    def rewind(self) -> None:
        """Let the moments be looked at from the first one again."""
        self._applied = 0
        self._nodes = _copied(self._first)
        for file in self.files.values():
            file.rewind()

    @classmethod
    async def of(cls, device: FaultDevice, volume: Volume) -> Self:
        """Return one for whom everything that a volume holds now was always there."""
        nodes = await found(volume)
        witness = cls(device, nodes)
        for ino, node in nodes.items():
            if stat.S_ISREG(node.mode):
                size = volume.inode(ino).size
                witness.files[ino] = File(bytes(await volume.read(ino, 0, size)))
        return witness

    # Being told

    @property
    def now(self) -> int:
        return self.device.operations

    def step(self, what: str, change: Callable[[Nodes], None], *touched: int) -> None:
        self.steps.append(Step(self.now, what, change, frozenset(touched)))

    def edit(self, ino: int, offset: int, data: bytes | None) -> None:
        self.files[ino].edits.append((self.now, offset, data))

    def last_step(self, ino: int) -> int:
        """Return how many steps there were up to the last one about an inode."""
        about = (i for i in range(len(self.steps), 0, -1) if ino in self.steps[i - 1].touched)
        return next(about, 0)

    def acknowledge(self, steps: int, versions: dict[int, int]) -> None:
        self.acknowledgements += 1
        if steps > self.floors[-1][1]:
            self.floors.append((self.now, steps))
        for ino, version in versions.items():
            if ino in self.files:
                self.files[ino].acknowledge(self.now, version)

    def versions(self) -> dict[int, int]:
        return {ino: file.version for ino, file in self.files.items()}

    # Comparing

    def shortest(self, at: int) -> int:
        """Return how many steps must have survived a crash then."""
        return self.floors[bisect_right(self.floors, at, key=itemgetter(0)) - 1][1]

    def longest(self, at: int) -> int:
        return bisect_right(self.steps, at, key=lambda step: step.at)

    async def verify(self, volume: Volume, at: int) -> None:
        """Hold a volume to what was promised when the device had done `at` operations.

        Raises Violation. Later calls ask for no earlier moments.
        """
        nodes = await found(volume)
        shortest, longest = self.shortest(at), self.longest(at)
        complaint = ""
        for steps, candidate in self._candidates(shortest, longest):
            difference = _difference(candidate, nodes)
            if difference:
                complaint = complaint or f"compared to {steps} changes: {difference}"
                continue
            complaint = await self._check_files(volume, nodes, steps, at)
            if not complaint:
                self._check_promises(volume, at)
                return
        raise Violation(f"{complaint} (names: {shortest} of {longest} changes were acknowledged)")

    def _candidates(self, shortest: int, longest: int) -> Iterator[tuple[int, Nodes]]:
        assert shortest >= self._applied, "the moments are looked at in their order"
        for step in self.steps[self._applied : shortest]:
            step.change(self._nodes)
        self._applied = shortest
        nodes = self._nodes if shortest == longest else _copied(self._nodes)
        yield shortest, nodes
        for steps in range(shortest + 1, longest + 1):
            self.steps[steps - 1].change(nodes)
            yield steps, nodes

    async def _check_files(self, volume: Volume, nodes: Nodes, steps: int, at: int) -> str:
        floor: dict[int, int] = {}
        for step, ino, version in self.orders:
            if step <= steps:
                floor[ino] = max(floor.get(ino, 0), version)
        for ino, node in nodes.items():
            if not stat.S_ISREG(node.mode):
                continue
            history = self.files[ino]
            issued = history.issued(at)
            first = history.kept(at)
            versions = history.contents(first, issued)
            versions = versions[max(0, min(floor.get(ino, 0), issued) - first) :]
            size = volume.inode(ino).size
            try:
                content = bytes(await volume.read(ino, 0, size)) if size else b""
            except errors.RetainzError as error:
                return f"{volume.path(ino)}: {error}"
            problem = _unexplained(content, versions)
            if problem:
                return f"{volume.path(ino)}: {problem}, versions {first} to {issued}"
        return ""

    def _check_promises(self, volume: Volume, at: int) -> None:
        issued = self.longest(at)
        for promise in self.promises:
            if promise.at > at:
                return
            later = self.steps[promise.step : issued]
            if any(step.touched & promise.touched for step in later):
                continue
            asked = {ino: bisect_right(self.files[ino].begun, at) for ino in promise.begun}
            if asked != promise.begun:
                continue  # it is being written again
            for ino in promise.begun:
                generation = volume.inode(ino).generation
                record = volume.namespace.generations.get(generation)
                if record is None or record.state not in WHOLE:
                    raise Violation(f"{volume.path(ino)}: its generation is not complete any more")


def _unexplained(content: bytes, versions: list[bytes]) -> str:
    """Return what in a content is of none of the versions."""
    if content in versions:
        return ""
    if len(versions) == 1:
        wanted = versions[0]
        if len(content) != len(wanted):
            return f"{len(content)} bytes instead of {len(wanted)}"
        pairs = zip(content, wanted, strict=True)
        return f"byte {next(i for i, (a, b) in enumerate(pairs) if a != b)} differs"
    if len(content) not in map(len, versions):
        return f"{len(content)} bytes; its versions have {sorted(set(map(len, versions)))}"
    for start in range(0, len(content), BLOCK):
        block = content[start : start + BLOCK]
        pieces = [version[start : start + BLOCK].ljust(BLOCK, b"\0") for version in versions]
        if any(piece.startswith(block) for piece in pieces) or not any(block):
            continue
        for i, byte in enumerate(block):
            if byte and all(piece[i] != byte for piece in pieces):
                return f"byte {start + i} is of no version"
    return ""


async def found(volume: Volume) -> Nodes:
    """Return the tree of a volume."""
    nodes: Nodes = {}
    todo = [ROOT]
    while todo:
        ino = todo.pop()
        if ino in nodes:
            continue
        inode = volume.inode(ino)
        stored = inode.xattrs or {}
        xattrs = {name: stored[name] for name in volume.listxattr(ino)}
        node = nodes[ino] = Node(inode.mode, xattrs=xattrs)
        if inode.is_dir:
            node.entries = dict(volume.entries(ino))
            todo += node.entries.values()
        elif stat.S_ISLNK(inode.mode):
            node.target = bytes(await volume.read(ino, 0, inode.size))
    return nodes


def _difference(wanted: Nodes, nodes: Nodes) -> str:
    todo = [(ROOT, b"")]
    while todo:
        ino, path = todo.pop()
        there, here = wanted[ino], nodes[ino]
        if there != here:
            return f"{path.decode() or '/'} is {here} and not {there}"
        todo += [(child, path + b"/" + name) for name, child in here.entries.items()]
    return ""


class WatchedDevice(FaultDevice):
    """A device whose volumes are watched."""

    witness: Witness | None = None
    formatted = 0  # how many operations that took


class WatchedVolume(Volume):
    """A volume whose calls are told to the witness of its device, if that has one."""

    @property
    def witness(self) -> Witness:
        assert isinstance(self.device, WatchedDevice), "only a watched device has a witness"
        if self.device.witness is None:
            self.device.witness = Witness(self.device)
        return self.device.witness

    @classmethod
    @asynccontextmanager
    async def mounted(cls, device: Any, options: Options) -> AsyncIterator[Self]:
        async with super().mounted(device, options) as volume:
            yield volume
        witness = volume.witness
        if volume.failed is None:
            witness.acknowledge(len(witness.steps), witness.versions())

    # Names

    async def make(
        self,
        parent: int,
        name: bytes,
        mode: int,
        uid: int,
        gid: int,
        rdev: int = 0,
        target: bytes = b"",
    ) -> Inode:
        inode = await super().make(parent, name, mode, uid, gid, rdev, target)
        ino, made = inode.ino, inode.mode

        def change(nodes: Nodes) -> None:
            nodes[ino] = Node(made, target)
            nodes[parent].entries[name] = ino

        self.witness.step(f"make {name!r}", change, ino, parent)
        if inode.is_file:
            self.witness.files[ino] = File()
        return inode

    async def link(self, ino: int, parent: int, name: bytes) -> Inode:
        inode = await super().link(ino, parent, name)

        def change(nodes: Nodes) -> None:
            nodes[parent].entries[name] = ino

        self.witness.step(f"link {name!r}", change, ino, parent)
        return inode

    async def unlink(self, parent: int, name: bytes) -> None:
        ino = self.namespace.child(parent, name).ino
        await super().unlink(parent, name)
        self._gone(parent, name, ino)

    async def rmdir(self, parent: int, name: bytes) -> None:
        ino = self.namespace.child(parent, name).ino
        await super().rmdir(parent, name)
        self._gone(parent, name, ino)

    def _move_away(self, limbo: Inode, names: Sequence[Place], also: Sequence[Record]) -> None:
        tops = [self.namespace.child(*place) for place in names]
        touched = [top.ino for top in tops]
        touched += [inode.ino for top in tops for inode, *_ in self._below(top)]
        super()._move_away(limbo, names, also)

        def change(nodes: Nodes) -> None:
            for parent, name in names:
                del nodes[parent].entries[name]

        self.witness.step(f"remove {names}", change, *touched, *(parent for parent, _ in names))

    def _gone(self, parent: int, name: bytes, ino: int) -> None:
        def change(nodes: Nodes) -> None:
            del nodes[parent].entries[name]

        self.witness.step(f"remove {name!r}", change, parent, ino)

    async def rename(
        self, parent: int, name: bytes, new_parent: int, new_name: bytes, flags: int = 0
    ) -> None:
        source = self.namespace.child(parent, name)
        durable = self.syncs(source) or self._syncs_at(new_parent, new_name)
        before = len(self.witness.steps)
        await super().rename(parent, name, new_parent, new_name, flags)
        if durable:
            mine = [
                i
                for i, step in enumerate(self.witness.steps[before:], before + 1)
                if step.what == f"rename {name!r} to {new_name!r}" and source.ino in step.touched
            ]
            if mine:
                self._acknowledge(mine[0], {}, source)

    def _move(self, source: Inode, target: Inode | None, old: Place, new: Place) -> None:
        super()._move(source, target, old, new)

        def change(nodes: Nodes) -> None:
            del nodes[old[0]].entries[old[1]]
            nodes[new[0]].entries[new[1]] = source.ino

        gone = {target.ino} if target is not None else set()
        self._renamed(old, new, change, {source.ino, *gone}, [source])

    def _exchange(self, one: Inode, other: Inode, at: Place, there: Place) -> None:
        super()._exchange(one, other, at, there)

        def change(nodes: Nodes) -> None:
            nodes[at[0]].entries[at[1]] = other.ino
            nodes[there[0]].entries[there[1]] = one.ino

        self._renamed(at, there, change, {one.ino, other.ino}, [one, other])

    def _renamed(
        self,
        old: Place,
        new: Place,
        change: Callable[[Nodes], None],
        touched: Iterable[int],
        moved: list[Inode],
    ) -> None:
        what = f"rename {old[1]!r} to {new[1]!r}"
        self.witness.step(what, change, old[0], new[0], *touched)
        for inode in moved:
            for ino in [inode.ino, *self._below(inode)]:
                if ino in self.witness.files:
                    version = self.witness.files[ino].version
                    self.witness.orders.append((len(self.witness.steps), ino, version))

    # Bytes

    async def write(self, ino: int, offset: int, data: bytes | bytearray | memoryview) -> int:
        self._begin(ino)
        written = await super().write(ino, offset, data)
        if data:
            self.witness.edit(ino, offset, bytes(data))
        return written

    async def setattr(self, ino: int, **changes: Any) -> Inode:
        before = self.inode(ino).size
        if changes.get("size") is not None:
            self._begin(ino)
        inode = await super().setattr(ino, **changes)
        size = changes.get("size")
        if size is not None and size != before:
            self.witness.edit(ino, size, None)
        if changes.get("mode") is not None:
            mode = inode.mode

            def change(nodes: Nodes) -> None:
                nodes[ino].mode = mode

            self.witness.step(f"mode of {ino}", change, ino)
        return inode

    def _begin(self, ino: int) -> None:
        if ino in self.witness.files:
            self.witness.files[ino].begun.append(self.witness.now)

    async def fsync(self, ino: int, datasync: bool = False) -> None:
        steps, versions = self._asked(ino)
        await super().fsync(ino, datasync)
        self._acknowledge(steps, versions, self.namespace.inodes.get(ino))

    async def flush(self, ino: int, **how: Any) -> None:
        steps, versions = self._asked(ino)
        await super().flush(ino, **how)
        inode = self.namespace.inodes.get(ino)
        if inode is not None and inode.nlink and how.get("wrote", True) and self.syncs(inode):
            self._acknowledge(steps, versions, inode)

    async def syncfs(self) -> None:
        steps, versions = len(self.witness.steps), self.witness.versions()
        await super().syncfs()
        self.witness.acknowledge(steps, versions)

    def _asked(self, ino: int) -> tuple[int, dict[int, int]]:
        versions = self.witness.versions()
        return self.witness.last_step(ino), {i: v for i, v in versions.items() if i == ino}

    def _acknowledge(self, steps: int, versions: dict[int, int], inode: Inode | None) -> None:
        witness = self.witness
        witness.acknowledge(steps, versions)
        record = self.namespace.generations.get(inode.generation) if inode is not None else None
        if record is None or record.state not in WHOLE:
            return
        members = {ino for ino in self.retention.members.get(record.generation, ())}
        if inode is not None and inode.judged == inode.writes and inode.error is None:
            above = {self.inode(ino).parent for ino in members}
            promised = {ino: len(witness.files[ino].begun) for ino in members}
            step = len(witness.steps)
            touched = frozenset(members | above)
            witness.promises.append(Promise(witness.now, step, promised, touched))

    # Attributes

    async def setxattr(self, ino: int, name: bytes, value: bytes, flags: int = 0) -> None:
        steps, versions = len(self.witness.steps), self.witness.versions()
        await super().setxattr(ino, name, value, flags)
        if name == COMMIT:
            members = self.retention.members.get(self.inode(ino).generation, set())
            told = {i: v for i, v in versions.items() if i in members}
            self._acknowledge(steps, told, self.inode(ino))
        elif not (lifetimes.is_ours(name) and name not in (self.inode(ino).xattrs or {})):
            self._attribute(ino, name, bytes(value))

    async def removexattr(self, ino: int, name: bytes) -> None:
        await super().removexattr(ino, name)
        self._attribute(ino, name, None)

    def _attribute(self, ino: int, name: bytes, value: bytes | None) -> None:
        def change(nodes: Nodes) -> None:
            if value is None:
                del nodes[ino].xattrs[name]
            else:
                nodes[ino].xattrs[name] = value

        self.witness.step(f"attribute {name!r} of {ino}", change, ino)
