"""What must hold between the inodes of a volume that was just replayed: one tree, counted right."""

from __future__ import annotations

from collections.abc import Iterator

from retainzfs.namespace import ROOT, Inode, Namespace


def check(namespace: Namespace) -> Iterator[str]:
    """Yield what contradicts itself, in a volume just replayed.

    Behind the first contradiction nothing may be asked of the namespace: a directory may be
    its own ancestor, and have no path.
    """
    root = namespace.inodes.get(ROOT)
    if root is None or not root.is_dir or not root.nlink or root.parent != ROOT:
        yield "there is no root directory"
    yield from _parents(namespace)
    names: dict[int, int] = {}
    for inode in namespace.inodes.values():
        for name, ino in (inode.entries or {}).items():
            names[ino] = names.get(ino, 0) + 1
            child = namespace.inodes.get(ino)
            if child is None:
                yield f"{namespace.path(inode.ino)}: name {name!r} leads to no inode"
            elif child.is_dir and child.parent != inode.ino:
                yield f"{namespace.path(inode.ino)}: name {name!r} leads to a directory elsewhere"
    for inode in namespace.inodes.values():
        yield from _links(namespace, inode, names.get(inode.ino, 0))


def _parents(namespace: Namespace) -> Iterator[str]:
    """Parents lead from everything to the root, or to what is gone."""
    sound = {ROOT}
    for inode in namespace.inodes.values():
        parent = namespace.inodes.get(inode.parent)
        if parent is not None and not parent.is_dir:
            yield f"the parent of inode {inode.ino} is inode {parent.ino}, no directory"
        met: set[int] = set()
        at: Inode | None = inode
        while at is not None and at.ino not in sound:
            if at.ino in met:
                yield f"inode {at.ino} is its own ancestor"
                return
            met.add(at.ino)
            at = namespace.inodes.get(at.parent)
        sound |= met


def _links(namespace: Namespace, inode: Inode, names: int) -> Iterator[str]:
    """An inode has as many names as it counts. An orphan has none, and no names in it."""
    links = names
    if inode.is_dir:
        wanted = int(inode.nlink > 0 and inode.ino != ROOT)
        if names != wanted:
            yield f"directory inode {inode.ino} has {names} names and should have {wanted}"
        if not inode.nlink and inode.entries:
            yield f"directory inode {inode.ino} was removed, and there are names in it"
        links = 2 + _subdirectories(namespace, inode) if inode.nlink else 0
    if inode.nlink != links:
        yield f"inode {inode.ino} counts {inode.nlink} links and has {links}"


def _subdirectories(namespace: Namespace, inode: Inode) -> int:
    children = (namespace.inodes.get(ino) for ino in (inode.entries or {}).values())
    return sum(child is not None and child.is_dir for child in children)
