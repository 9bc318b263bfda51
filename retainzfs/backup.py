"""A copy of a target's metadata: what a repair is about to replace, in a tar archive.

report.json   what was found, and the sizes that say where the rest was
head          everything before zone 0 of an emulated device
zone-N        metadata zone N up to its write pointer; zeros for what could not be read
"""

from __future__ import annotations

import errno
import io
import json
import os
import tarfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from retainzfs import errors
from retainzfs.device import Device
from retainzfs.device.heads import read_head
from retainzfs.layout import BLOCK

TAR_ROOM = 1 << 20  # bytes for the archive's own structure


def default_name(uuid: bytes) -> str:
    """Return the name of an archive that is made now, of the volume with this UUID."""
    now = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return f"retainzfs-metadata-{uuid.hex()[:8]}-{now}.tar"


def save(
    device: Device, zones: Iterable[tuple[int, int]], report: dict[str, Any], name: str
) -> None:
    """Write a new archive, durably. `zones` are pairs of a zone and its write pointer, bytes.

    Raises OSError, FileExistsError among them, and NoSpace; then there is no new archive.
    """
    members = list(zones)
    head = read_head(device)
    told = json.dumps({"head_bytes": len(head), **report}, indent=1).encode()
    size = len(head) + len(told) + sum(end for _, end in members) + TAR_ROOM
    where = os.statvfs(Path(name).absolute().parent)
    if where.f_bavail * where.f_frsize < size:
        raise errors.NoSpace(
            f"{name}: the copy of the metadata takes {size} bytes; nothing was changed."
            " Name another place with --backup"
        )
    # The archive tells names and small files, whoever may read those in the volume.
    with open(name, "xb", opener=_private) as file:
        try:
            with tarfile.open(fileobj=file, mode="w") as tar:
                _add(tar, "report.json", len(told), io.BytesIO(told))
                _add(tar, "head", len(head), io.BytesIO(head))
                with open(device.name, "rb", buffering=0) as source:
                    for zone, end in members:
                        source.seek(device.address(zone))
                        _add(tar, f"zone-{zone}", end, _Readable(source))
            file.flush()
            os.fsync(file.fileno())
        except BaseException:
            os.unlink(name)
            raise


def _private(name: str, flags: int) -> int:
    return os.open(name, flags, 0o600)


def _add(tar: tarfile.TarFile, name: str, size: int, data: io.RawIOBase | io.BytesIO) -> None:
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = size, 0o600, int(time.time())
    tar.addfile(info, data)


class _Readable(io.RawIOBase):
    """A file whose unreadable blocks read as zeros."""

    def __init__(self, file: io.FileIO) -> None:
        self._file = file

    def read(self, size: int = -1) -> bytes:
        out = bytearray()
        while len(out) < size:
            at = self._file.tell()
            try:
                piece = self._file.read(size - len(out))
            except OSError as error:
                if error.errno != errno.EIO:
                    raise
                piece = self._block(at)
            if not piece:
                break
            out += piece
        return bytes(out)

    def _block(self, at: int) -> bytes:
        """Return the rest of one block, and go on behind it."""
        length = BLOCK - at % BLOCK
        try:
            piece = os.pread(self._file.fileno(), length, at)
        except OSError:
            piece = bytes(length)
        self._file.seek(at + len(piece))
        return piece
