"""Whether a single file is whole, judged from its first and last bytes.

A trainer that is killed in the middle of a save leaves a file too, closed by the kernel. Two
formats tell: a zip archive (torch.save, numpy's .npz) ends in a directory of itself (PKWARE APPNOTE
section 4.3), and a safetensors file begins with a header that implies the size of the file.
"""

import enum
import json
import struct
from typing import Any, NamedTuple

from retainzfs.hints.layouts import without_temporary

HEAD_BYTES = 4096
"""The caller always passes so much of the start (or the whole, shorter file)."""

TAIL_BYTES = 69632
"""The caller always passes so much of the end, or the whole file: the zip end record with the
longest comment and the zip64 records before it (65,633 bytes), in whole blocks."""

HEADER_MAX = 4 << 20
"""Longest safetensors header that is worth parsing for a verdict, bytes; that of a 70B model is
about 0.1 MiB."""

_HEADER_LIMIT = 100_000_000
"""The safetensors library refuses to read a longer header, bytes."""

_END = struct.Struct("<4sHHHHIIH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_ZIP_STARTS = (b"PK\3\4", b"PK\5\6")
_ENTRY = b"PK\1\2"


class Verdict(enum.Enum):
    """What the bytes say: the file is whole, is not, or they cannot tell."""

    OK = "ok"
    BROKEN = "broken"
    UNKNOWN = "unknown"


class Finding(NamedTuple):
    """A verdict and the reason, for people."""

    verdict: Verdict
    reason: str


def _safetensors_header(head: bytes) -> int:
    return int.from_bytes(head[:8], "little")


def head_wanted(name: bytes, size: int, head: bytes) -> int:
    """How many bytes of the start `structure` needs for a verdict on this file.

    `head` holds what has been read so far, at least 8 bytes if the file has them. At most
    8 + HEADER_MAX, never more than `size`.
    """
    wanted = HEAD_BYTES
    if _is_safetensors(name) and len(head) >= 8 and _safetensors_header(head) <= HEADER_MAX:
        wanted = max(wanted, 8 + _safetensors_header(head))
    return min(size, wanted)


def structure(name: bytes, size: int, head: bytes, tail: bytes) -> Verdict:
    """The verdict of `examine` without its reason."""
    return examine(name, size, head, tail).verdict


def examine(name: bytes, size: int, head: bytes, tail: bytes) -> Finding:
    """Judge a file of `size` bytes by its first `head` and last `tail` bytes.

    Pass `head_wanted()` bytes of the start and TAIL_BYTES of the end, or the whole file when it is
    shorter; with less the verdict may be UNKNOWN, never a wrong one. Never raises.
    """
    if _is_safetensors(name):
        return _safetensors(size, head)
    if head.startswith(_ZIP_STARTS):
        return _zip(size, tail)
    lower = without_temporary(name)[0].lower()
    if size == 0 and lower.endswith((b".npz", b".pt", b".pth", b".ckpt")):
        return Finding(Verdict.BROKEN, "the file is empty")
    if lower.endswith(b".npz") and len(head) >= 4:
        return Finding(Verdict.BROKEN, "no zip archive begins here")
    return Finding(Verdict.UNKNOWN, "the format is not one that shows whether it is whole")


def _is_safetensors(name: bytes) -> bool:
    return without_temporary(name)[0].lower().endswith(b".safetensors")


def _safetensors(size: int, head: bytes) -> Finding:
    if size < 8:
        return Finding(Verdict.BROKEN, f"{size} bytes are too short for a safetensors header")
    if len(head) < 8:
        return Finding(Verdict.UNKNOWN, "the start of the file was not given")
    length = _safetensors_header(head)
    if not 2 <= length <= min(size - 8, _HEADER_LIMIT):
        return Finding(Verdict.BROKEN, f"a safetensors header of {length} bytes cannot be")
    if length > HEADER_MAX or len(head) < 8 + length:
        return Finding(Verdict.UNKNOWN, f"the safetensors header of {length} bytes was not read")
    try:
        end = _data_end(json.loads(head[8 : 8 + length]))
    except (ValueError, RecursionError) as error:
        return Finding(Verdict.BROKEN, f"the safetensors header is damaged: {error}")
    expected = 8 + length + end
    if expected != size:
        return Finding(
            Verdict.BROKEN, f"the safetensors header announces {expected} bytes, there are {size}"
        )
    return Finding(Verdict.OK, "the safetensors header agrees with the size")


def _data_end(header: Any) -> int:
    """Where the last tensor ends, bytes from the end of the header; ValueError if malformed."""
    if not isinstance(header, dict):
        raise ValueError("it is no object")
    end = 0
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        match entry:
            case {"data_offsets": [int(start), int(stop)]} if 0 <= start <= stop:
                end = max(end, stop)
            case _:
                raise ValueError("a tensor has no data_offsets")
    return end


class _End(NamedTuple):
    """The end record of a zip archive: where its directory is."""

    entries: int
    length: int
    offset: int


def _zip(size: int, tail: bytes) -> Finding:
    start = size - len(tail)
    if start < 0:
        return Finding(Verdict.UNKNOWN, "more bytes were given than the file has")
    found = None
    position = tail.rfind(b"PK\5\6")
    # The signature may also stand in the comment: the record is one whose comment fits.
    while position >= 0:
        if len(tail) - position >= _END.size:
            fields = _END.unpack_from(tail, position)
            if position + _END.size + fields[7] == len(tail):
                found = _zip_directory(start, tail, position, _End(*fields[4:7]))
                if found.verdict is not Verdict.BROKEN:
                    return found
        position = tail.rfind(b"PK\5\6", 0, position)
    if start > 0 and len(tail) < TAIL_BYTES:
        return Finding(Verdict.UNKNOWN, "the end of the file was not given")
    return found or Finding(Verdict.BROKEN, "the zip archive does not end in an end record")


def _zip_directory(start: int, tail: bytes, position: int, end: _End) -> Finding:
    """Check the directory that the record at `position` of the tail describes.

    torch.save always writes the zip64 records before it, and they hold where present.
    """
    stop = start + position
    locator = position - _LOCATOR.size
    if locator >= 0 and tail[locator : locator + 4] == b"PK\6\7":
        _, _, stop, _ = _LOCATOR.unpack_from(tail, locator)
        if stop + _END64.size > start + locator:
            return Finding(Verdict.BROKEN, "the zip64 locator points behind itself")
        if stop < start:
            return Finding(Verdict.UNKNOWN, "the zip64 end record is too far from the end")
        signature, *fields = _END64.unpack_from(tail, stop - start)
        if signature != b"PK\6\6":
            return Finding(Verdict.BROKEN, "the zip64 end record is not where it should be")
        end = _End(*fields[-3:])
    if end.offset + end.length != stop:
        return Finding(
            Verdict.BROKEN,
            f"the zip directory should end at byte {end.offset + end.length}, but ends at {stop}",
        )
    if end.entries and end.offset >= start and not tail.startswith(_ENTRY, end.offset - start):
        return Finding(Verdict.BROKEN, f"no zip directory at byte {end.offset}")
    return Finding(Verdict.OK, "the zip directory is whole")
