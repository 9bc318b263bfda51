"""The kernel's table of mounts, and the processes that use one. Reads /proc, asks no filesystem."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

FSTYPE = "fuse.retainzfs"
USERS_SHOWN = 10  # processes that a message about a busy mount names


class MountPoint(NamedTuple):
    """One line of /proc/self/mountinfo (proc(5))."""

    directory: str
    device: str  # major:minor
    fstype: str
    source: str


class User(NamedTuple):
    """A process that keeps a mount busy."""

    pid: int
    name: str
    path: str

    def __str__(self) -> str:
        return f"{self.name} (pid {self.pid}): {self.path}"


def all_mounts() -> Iterator[MountPoint]:
    """Yield the mounts that this process sees, oldest first."""
    for line in Path("/proc/self/mountinfo").read_bytes().splitlines():
        before, _, after = line.partition(b" - ")
        fields, types = before.split(b" "), after.split(b" ")
        yield MountPoint(
            _decoded(fields[4]), os.fsdecode(fields[2]), _decoded(types[0]), _decoded(types[1])
        )


def find_mount(real_path: str) -> MountPoint | None:
    """Return what is mounted on a directory, given without symbolic links; touches no filesystem.

    So it serves for a mount that no longer answers, and inside the process that has to answer.
    """
    found = [mount for mount in all_mounts() if mount.directory == real_path]
    return found[-1] if found else None


def ours() -> list[MountPoint]:
    return [mount for mount in all_mounts() if mount.fstype == FSTYPE]


def mount_of(path: str, among: Iterable[MountPoint] | None = None) -> MountPoint | None:
    """Return the mount that a path is on, by default one of ours."""
    real, among = os.path.realpath(path), ours() if among is None else among
    inside = [m for m in among if (real + "/").startswith(m.directory.rstrip("/") + "/")]
    return max(inside, key=lambda m: len(m.directory), default=None)


def users(real_path: str) -> list[User]:
    """Return the processes with files, maps or directories below a mount, as far as we may look."""
    found = []
    for process in sorted(Path("/proc").glob("[0-9]*"), key=lambda p: int(p.name)):
        path = next((p for p in _used(process) if (p + "/").startswith(real_path + "/")), None)
        if path is not None:
            found.append(User(int(process.name), _name(process), path))
    return found


def _used(process: Path) -> Iterator[str]:
    try:
        links = [process / "cwd", process / "root", *(process / "fd").iterdir()]
    except OSError:
        return  # it has ended, or is somebody else's
    for link in links:
        try:
            yield os.readlink(link)
        except OSError:
            continue
    try:
        maps = (process / "maps").read_bytes()
    except OSError:
        return
    for line in maps.splitlines():
        fields = line.split(None, 5)
        if len(fields) == 6:
            yield os.fsdecode(fields[5])


def _name(process: Path) -> str:
    try:
        return (process / "comm").read_text().strip()
    except OSError:
        return "?"


def _decoded(field: bytes) -> str:
    r"""The kernel writes blanks and backslashes as octal escapes: \040."""
    text = re.sub(rb"\\([0-7]{3})", lambda m: bytes([int(m[1], 8)]), field)
    return os.fsdecode(text)
