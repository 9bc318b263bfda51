"""Whether a single file is whole, judged from a few pieces of it.

A trainer that is killed in the middle of a save leaves a file too, closed by the kernel. Two
formats tell: a zip archive (torch.save, numpy's .npz) ends in a directory of itself (PKWARE APPNOTE
section 4.3), and a safetensors file begins with a header that implies the size of the file.

A directory says only that somebody closed the archive, and Python's `with` does that on the way out
of an exception too. torch.save writes first what it will write: its pickle names all tensors.
"""

import enum
import json
import re
import struct
from collections.abc import Generator
from typing import Any, NamedTuple

from retainzfs.lifetimes.layouts import without_temporary

HEAD_BYTES = 4096
"""So much of the start shows the format."""

TAIL_BYTES = 69632
"""The zip end record with the longest comment and the zip64 records before it (65,633 bytes), in
whole blocks."""

PART_MAX = 4 << 20
"""No longer header, directory or pickle is read for a verdict, bytes; the header of a 70B model is
about 0.1 MiB."""

_HEADER_LIMIT = 100_000_000
"""The safetensors library refuses to read a longer header, bytes."""

_LOCAL = struct.Struct("<4s22xHH")  # lengths of the name and of the extra field
_ENTRY = struct.Struct("<4s16xI4xHHH12x")  # length of the content; of name, extra field, comment
_END = struct.Struct("<4sHHHHIIH")
_LOCATOR = struct.Struct("<4sIQI")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_ZIP_STARTS = (b"PK\3\4", b"PK\5\6")
_ENTRY_START = b"PK\1\2"

_PICKLE = b"data.pkl"
_TEXT = rb"(?:X....|\x8c.)"
_MEMO = rb"(?:q.|r....|\x94)?"
_STORAGE = re.compile(
    # A persistent id as torch.save writes it: (..., key, device, length), key a number as text.
    _TEXT + rb"([0-9]+)" + _MEMO
    + rb"(?:" + _TEXT + rb"[a-z0-9:]+" + _MEMO + rb"|h.|j....)"
    + rb"(?:K.|M..|J....|\x8a[\1-\x08].{1,8})t" + _MEMO + rb"Q",
    re.DOTALL,
)  # fmt: skip


class Verdict(enum.Enum):
    """What the bytes say: the file is whole, is not, or they cannot tell."""

    OK = "ok"
    BROKEN = "broken"
    UNKNOWN = "unknown"


class Finding(NamedTuple):
    """A verdict and the reason, for people."""

    verdict: Verdict
    reason: str


Examination = Generator[tuple[int, int], bytes, Finding]


def examination(name: bytes, size: int) -> Examination:
    """Judge a file of `size` bytes, without reading it.

    Yields the (offset, length) of a piece, within the size, and wants to be sent its bytes; in the
    end it returns the finding. A few pieces of at most PART_MAX bytes. Never raises.
    """
    head = yield 0, min(size, HEAD_BYTES)
    if _is_safetensors(name):
        return (yield from _safetensors(size, head))
    if head.startswith(_ZIP_STARTS):
        return (yield from _zip(size, head))
    lower = without_temporary(name)[0].lower()
    if size == 0 and lower.endswith((b".npz", b".pt", b".pth", b".ckpt")):
        return Finding(Verdict.BROKEN, "the file is empty")
    if lower.endswith(b".npz") and len(head) >= 4:
        return Finding(Verdict.BROKEN, "no zip archive begins here")
    return Finding(Verdict.UNKNOWN, "the format is not one that shows whether it is whole")


def _is_safetensors(name: bytes) -> bool:
    return without_temporary(name)[0].lower().endswith(b".safetensors")


def _safetensors(size: int, head: bytes) -> Examination:
    if size < 8:
        return Finding(Verdict.BROKEN, f"{size} bytes are too short for a safetensors header")
    length = int.from_bytes(head[:8], "little")
    if not 2 <= length <= min(size - 8, _HEADER_LIMIT):
        return Finding(Verdict.BROKEN, f"a safetensors header of {length} bytes cannot be")
    if length > PART_MAX:
        return Finding(Verdict.UNKNOWN, f"the safetensors header of {length} bytes was not read")
    header = yield 8, length
    try:
        end = _data_end(json.loads(header))
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


def _zip(size: int, head: bytes) -> Examination:
    start = max(0, size - TAIL_BYTES)
    tail = yield start, size - start
    found: Finding | None = None
    position = tail.rfind(b"PK\5\6")
    # The signature may also stand in the comment: the record is one whose comment fits.
    while position >= 0:
        if len(tail) - position >= _END.size:
            fields = _END.unpack_from(tail, position)
            if position + _END.size + fields[7] == len(tail):
                end = _zip_end(start, tail, position, _End(*fields[4:7]))
                if isinstance(end, _End):
                    return (yield from _tensors(head, end))
                found = end
                if found.verdict is not Verdict.BROKEN:
                    return found
        position = tail.rfind(b"PK\5\6", 0, position)
    return found or Finding(Verdict.BROKEN, "the zip archive does not end in an end record")


def _zip_end(start: int, tail: bytes, position: int, end: _End) -> _End | Finding:
    """Return where the directory is that the record at `position` of the tail describes.

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
    if (
        end.entries
        and end.offset >= start
        and not tail.startswith(_ENTRY_START, end.offset - start)
    ):
        return Finding(Verdict.BROKEN, f"no zip directory at byte {end.offset}")
    return end


def _tensors(head: bytes, end: _End) -> Examination:
    """Look in the directory for every tensor that the pickle of torch.save refers to."""
    whole = Finding(Verdict.OK, "the zip directory is whole")
    if len(head) < _LOCAL.size or end.length > PART_MAX:
        return whole
    _, named, extra = _LOCAL.unpack_from(head)
    first = head[_LOCAL.size : _LOCAL.size + named]
    if not first.endswith(b"/" + _PICKLE):
        return whole
    stored = _entries((yield end.offset, end.length))
    length = stored.get(first, 0)
    if length > min(PART_MAX, end.offset):
        return whole
    pickle = yield _LOCAL.size + named + extra, length
    wanted = set(_STORAGE.findall(pickle))
    base = first.removesuffix(_PICKLE) + b"data/"
    missing = sum(base + key not in stored for key in wanted)
    if missing:
        return Finding(Verdict.BROKEN, f"{missing} of {len(wanted)} tensors are missing")
    return Finding(Verdict.OK, "the zip directory is whole, and no tensor is missing")


def _entries(directory: bytes) -> dict[bytes, int]:
    """Return the name of every file in the archive, and the length of its content as stored."""
    stored: dict[bytes, int] = {}
    at = 0
    while directory.startswith(_ENTRY_START, at) and at + _ENTRY.size <= len(directory):
        _, length, named, extra, comment = _ENTRY.unpack_from(directory, at)
        at += _ENTRY.size
        stored[directory[at : at + named]] = length
        at += named + extra + comment
    return stored
