"""What a mounted filesystem tells of itself: its attributes, and the files in `.retainz/`."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TypeAlias

import xattr

from retainzfs import mounts
from retainzfs.errors import MountError, NotRetainzfs
from retainzfs.lifetimes import PREFIX

AnyPath: TypeAlias = str | os.PathLike[str]

READS_MAX = 10  # of a value that grows between the question for its length and the reading


def attribute(path: AnyPath, name: str) -> bytes | None:
    """Return the value of an attribute of ours; None when there is none. Raises OSError."""
    for left in range(READS_MAX)[::-1]:
        try:
            with naming(path):
                value: bytes = xattr.getxattr(path, PREFIX + name)
                return value
        except OSError as error:
            if error.errno in (errno.ENODATA, errno.ENOTSUP):
                return None
            if error.errno != errno.ERANGE or not left:
                raise
    raise AssertionError("the last reading returns or raises")


@contextlib.contextmanager
def naming(path: AnyPath) -> Iterator[None]:
    """The package xattr names the path in its errors as bytes, or not at all."""
    try:
        yield
    except OSError as error:
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def computed(path: AnyPath, name: str) -> Any:
    """Return the JSON of a computed attribute. Raises NotRetainzfs, OSError."""
    value = attribute(path, name)
    if value is None:
        raise NotRetainzfs(os.fspath(path))
    return json.loads(value)


def generations(path: AnyPath) -> list[dict[str, Any]]:
    """Return the table of the streams at and below a directory. Raises NotRetainzfs, OSError."""
    try:
        rows: list[dict[str, Any]] = computed(path, "generations")
    except OSError as error:
        if error.errno not in (errno.ERANGE, errno.E2BIG):
            raise
        # The table is longer than an attribute may be: take everybody's, and pick.
        below = computed(path, "explain")["path"].rstrip("/")
        rows = control_file(mount_of(path), "generations.json")
        rows = [r for r in rows if (r["path"] + "/").startswith(below + "/")]
    return rows


def told(path: AnyPath, name: str) -> Any:
    """Return the JSON of a file in `.retainz/` of the mount that a path is on."""
    return control_file(mount_of(path), name)


def mount_of(path: AnyPath) -> mounts.MountPoint:
    """Return the mount of ours that a path is on. Raises NotRetainzfs, OSError."""
    os.stat(path)
    mount = mounts.mount_of(os.fspath(path))
    if mount is None:
        raise NotRetainzfs(os.fspath(path))
    return mount


def control_file(mount: mounts.MountPoint, name: str) -> Any:
    """Return the JSON of a file in `.retainz/` of a mount. Raises MountError, OSError."""
    try:
        return json.loads(Path(mount.directory, ".retainz", name).read_bytes())
    except OSError as error:
        if error.errno not in (errno.ENOTCONN, errno.ECONNABORTED):
            raise
        what = f"dead, its daemon has ended; 'retainzfs umount {mount.directory}' takes it away"
        raise MountError(mount.directory, what) from error
