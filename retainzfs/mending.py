"""What contradicts itself in a namespace, and the records that put it right.

Only names, counts and references are touched: no file loses a byte, and what has no name any more
is found again below `/lost+found`. A mender changes the namespace in memory as it goes, so that
each step sees what the one before it has put right; whoever wants it to last logs its records.
"""

from __future__ import annotations

import os
import stat
from collections import Counter
from typing import NamedTuple

from retainzfs import layout
from retainzfs.namespace import ROOT, Inode, Namespace

LOST = b"lost+found"


class Problem(NamedTuple):
    """What is wrong, and how it is put right."""

    text: str
    repair: str


class Mender:
    """Mends a namespace that was just replayed. `now_ns` is the time of what it has to make."""

    def __init__(self, namespace: Namespace, now_ns: int) -> None:
        self.namespace = namespace
        self.now_ns = now_ns
        self.problems: list[Problem] = []
        self.records: list[layout.Record] = []
        self._root()
        self._names()
        self._counts()
        self._lost()
        self._references()
        self._recount()

    def _do(self, *records: layout.Record) -> None:
        for record in records:
            self.namespace.apply(record)
            self.records.append(record)

    def _found(self, text: str, repair: str) -> None:
        self.problems.append(Problem(text, repair))

    def _set(self, inode: Inode, **fields: int) -> None:
        self._do(self.namespace.describe(inode)._replace(**fields))

    def _root(self) -> None:
        if not self.namespace.inodes:
            return  # nothing is left that a root could hold
        if ROOT not in self.namespace.inodes:
            self._found("there is no root directory", "make an empty one")
            self._make_directory(ROOT, ROOT, 0o755)
        root = self.namespace.inodes[ROOT]
        if root.is_dir and (root.parent != ROOT or not root.nlink):
            self._found("the root directory is marked as removed or moved", "unmark it")
            self._set(root, parent=ROOT, nlink=2)

    def _make_directory(self, ino: int, parent: int, mode: int) -> None:
        now = self.now_ns
        self._do(
            layout.InodeRecord(
                ino, stat.S_IFDIR | mode, 0, 0, 2, 0, now, now, now, 0, parent
            ),
            layout.SizeRecord(ino, 0),
        )  # fmt: skip

    def _names(self) -> None:
        """Take away names that lead nowhere, and all but one of a directory."""
        inodes = self.namespace.inodes
        homes: dict[int, set[int]] = {}  # directory → those that have a name for it
        for inode in inodes.values():
            for ino in (inode.entries or {}).values():
                homes.setdefault(ino, set()).add(inode.ino)
        held: set[int] = set()
        for inode in list(inodes.values()):
            for name, ino in list((inode.entries or {}).items()):
                child = inodes.get(ino)
                where = f"{self._path(inode)}: name {os.fsdecode(name)!r}"
                if child is None:
                    self._remove(inode, name, f"{where} leads to no inode")
                elif ino == ROOT or (child.is_dir and ino in held):
                    self._remove(inode, name, f"{where} is a second one of a directory")
                elif child.is_dir and child.parent != inode.ino:
                    if child.parent in homes[ino]:
                        self._remove(inode, name, f"{where} is a second one of a directory")
                        continue
                    self._found(f"{where} leads to a directory elsewhere", "let it lead there")
                    self._set(child, parent=inode.ino)
                    held.add(ino)
                elif child.is_dir:
                    held.add(ino)

    def _remove(self, directory: Inode, name: bytes, text: str) -> None:
        self._found(text, "remove the name")
        self._do(layout.UnlinkRecord(directory.ino, name))

    def _counts(self) -> None:
        """Name wrong counts; `_recount` sets them when all names are where they belong."""
        names = self._named()
        for inode in list(self.namespace.inodes.values()):
            wanted = self._links(inode, names)
            lost = inode.ino not in names and not inode.is_dir  # gets a name, or is an orphan
            if inode.nlink != wanted and not lost:
                text = f"{self._path(inode)}: counts {inode.nlink} links and has {wanted}"
                self._found(text, "count anew")
                self._set(inode, nlink=wanted)

    def _named(self) -> Counter[int]:
        """Return how many names each inode has."""
        entries = (inode.entries or {} for inode in self.namespace.inodes.values())
        return Counter(ino for names in entries for ino in names.values())

    def _links(self, inode: Inode, names: Counter[int]) -> int:
        """Return what an inode should count; 0 for an orphan."""
        if not inode.is_dir:
            return names[inode.ino]
        if not (inode.nlink or inode.entries or names[inode.ino]):
            return 0
        below = (self.namespace.inodes.get(ino) for ino in (inode.entries or {}).values())
        return 2 + sum(child is not None and child.is_dir for child in below)

    def _lost(self) -> None:
        """Give a name to what the root does not lead to."""
        inodes = self.namespace.inodes
        if ROOT not in inodes or not inodes[ROOT].is_dir:
            return
        while True:
            reached = self._reached()
            lost = [i for i in inodes.values() if i.nlink and i.ino not in reached]
            if not lost:
                return
            named = self._named()
            # What still has a name comes along with its directory; in a circle one has to begin.
            nameless = [i for i in lost if i.ino not in named]
            for inode in nameless:
                self._attach(inode)
            if not nameless:
                first = min(lost, key=lambda inode: (not inode.is_dir, inode.ino))
                self._unname(first)
                self._attach(first)

    def _reached(self) -> set[int]:
        reached, ahead = {ROOT}, [ROOT]
        while ahead:
            for ino in (self.namespace.inodes[ahead.pop()].entries or {}).values():
                if ino not in reached:
                    reached.add(ino)
                    ahead.append(ino)
        return reached

    def _unname(self, inode: Inode) -> None:
        for other in self.namespace.inodes.values():
            for name, ino in list((other.entries or {}).items()):
                if ino == inode.ino:
                    self._do(layout.UnlinkRecord(other.ino, name))

    def _attach(self, inode: Inode) -> None:
        directory = self._lost_directory()
        name = b"#%d" % inode.ino
        while name in (directory.entries or {}):
            name += b"+"
        self._found(
            f"inode {inode.ino}: nothing leads to it",
            f"name it {os.path.join(self._path(directory), os.fsdecode(name))}",
        )
        self._do(layout.LinkRecord(directory.ino, name, inode.ino))
        self._set(inode, parent=directory.ino)

    def _lost_directory(self) -> Inode:
        inodes = self.namespace.inodes
        entries = self.namespace.directory(ROOT)
        name = LOST
        while name in entries and not inodes[entries[name]].is_dir:
            name += b"+"
        if name not in entries:
            ino = self.namespace.next_ino
            self._make_directory(ino, ROOT, 0o700)
            self._do(layout.LinkRecord(ROOT, name, ino))
        return inodes[entries[name]]

    def _references(self) -> None:
        namespace = self.namespace
        homes: dict[int, int] = {}
        for inode in namespace.inodes.values():
            homes |= dict.fromkeys((inode.entries or {}).values(), inode.ino)
        for inode in list(namespace.inodes.values()):
            lost = inode.generation and inode.generation not in namespace.generations
            if lost and inode.nlink:  # an orphan may outlive its generation
                text = f"{self._path(inode)}: belongs to generation {inode.generation}"
                self._found(f"{text}, which does not exist", "let it belong to none")
                self._set(inode, generation=0)
            if self._astray(inode, named=inode.ino in homes):
                text = f"{self._path(inode)}: its parent, inode {inode.parent}, is none"
                self._found(text, "set it to the directory that has its name, or the root")
                self._set(inode, parent=homes.get(inode.ino, ROOT))

    def _astray(self, inode: Inode, *, named: bool) -> bool:
        """Whether the parents of an inode lead to what is no directory, or in a circle.

        What has no name was removed, and may have outlived its directory.
        """
        met: set[int] = set()
        at = inode
        while at.ino != ROOT:
            met.add(at.ino)
            parent = self.namespace.inodes.get(at.parent)
            if parent is None:
                return named and at is inode
            if parent.ino in met or not parent.is_dir:
                return True
            at = parent
        return False

    def _recount(self) -> None:
        names = self._named()
        for inode in list(self.namespace.inodes.values()):
            wanted = self._links(inode, names)
            if inode.nlink != wanted:
                self._set(inode, nlink=wanted)

    def _path(self, inode: Inode) -> str:
        """Return a path, or the number of an inode that the root does not lead to."""
        names: list[str] = []
        at, seen = inode, set[int]()
        while at.ino != ROOT:
            parent = self.namespace.inodes.get(at.parent)
            entries = (parent.entries if parent else None) or {}
            name = next((name for name, ino in entries.items() if ino == at.ino), None)
            if parent is None or name is None or at.ino in seen:
                return f"inode {inode.ino}"
            seen.add(at.ino)
            names.append(os.fsdecode(name))
            at = parent
        return "/" + "/".join(reversed(names))
