"""`.retainz/`: a read-only directory at the root of a mount that tells about the mount.

It is found by its name and listed by nobody, so that tools which copy or delete a tree do not meet
it. A file's content is made when it is opened. Numbers of its inodes and handles begin at FIRST,
far above those of the volume.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Callable

import pyfuse3

from retainzfs import observe
from retainzfs.generations import chronicle
from retainzfs.volume import ROOT, Volume

NAME = b".retainz"
FIRST = 1 << 48


def owns(number: int) -> bool:
    """Whether an inode or a handle of this number is of this directory."""
    return number >= FIRST


class Control:
    """`settings` is the content of config.toml: what is in effect."""

    def __init__(self, volume: Volume, settings: str) -> None:
        self._volume = volume
        self._files: dict[bytes, Callable[[], str]] = {
            b"stats.json": self._statistics,
            b"zones.json": lambda: _json(volume.zone_map()),
            # An extended attribute holds 64 KiB; the table of a long history may be longer.
            b"generations.json": lambda: _json(volume.generations(ROOT)),
            b"trace.json": self._trace,
            b"scrub.json": lambda: _json(volume.scrub.report()),
            b"metrics": lambda: observe.metrics(volume),
            b"config.toml": lambda: settings,
        }
        self._names = list(self._files)
        self._open: dict[int, bytes] = {}
        self._next = FIRST
        self._made_ns = volume.options.wall_ns()

    # Names

    def lookup(self, parent: int, name: bytes) -> pyfuse3.EntryAttributes:
        if parent == ROOT or name == b".":
            return self.attributes(FIRST)
        if name in self._files:
            return self.attributes(FIRST + 1 + self._names.index(name))
        raise pyfuse3.FUSEError(errno.ENOENT)

    def attributes(self, ino: int) -> pyfuse3.EntryAttributes:
        entry = pyfuse3.EntryAttributes()
        is_dir = ino == FIRST
        entry.st_ino = ino
        entry.st_mode = stat.S_IFDIR | 0o555 if is_dir else stat.S_IFREG | 0o444
        entry.st_nlink = 2 if is_dir else 1
        entry.st_uid, entry.st_gid = os.geteuid(), os.getegid()
        entry.st_atime_ns = entry.st_mtime_ns = entry.st_ctime_ns = self._made_ns
        return entry

    def entries(self) -> list[tuple[bytes, int]]:
        return [(name, FIRST + 1 + i) for i, name in enumerate(self._names)]

    # Handles

    def open(self, ino: int, flags: int) -> pyfuse3.FileInfo:
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            raise pyfuse3.FUSEError(errno.EACCES)
        self._next += 1
        self._open[self._next] = self._files[self._names[ino - FIRST - 1]]().encode()
        # The length is not known before the content is made: st_size is 0, as in /proc.
        return pyfuse3.FileInfo(fh=self._next, direct_io=True, keep_cache=False)

    def read(self, fh: int, offset: int, size: int) -> bytes:
        return self._open[fh][offset : offset + size]

    def release(self, fh: int) -> None:
        del self._open[fh]

    # Contents

    def _statistics(self) -> str:
        return _json({"pid": os.getpid(), **self._volume.statistics()})

    def _trace(self) -> str:
        """What the recorder of traces asks for."""
        table = self._volume.table
        zones = {
            "zone_capacity": table.capacity,
            "zones": table.count,
            "active": table.data_active_limit,
        }
        told = chronicle(self._volume.retention)
        return _json({"pid": os.getpid(), **zones, **told})


def _json(value: object) -> str:
    return json.dumps(value, indent=1) + "\n"
