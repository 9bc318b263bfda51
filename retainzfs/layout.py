"""Records on the medium: encode, decode, checksum. The bits are stated in docs/on-disk-format.md.

A metadata zone is a superblock followed by batches. A batch is a header and a run of records,
zero-padded to a whole block. Every record is an after-image: it states what a key holds, never a
difference. Applying a record twice, or on top of a later state of the same key followed by the
rest of the log, ends in the same state; that is what lets a snapshot be taken while the log grows.
"""

from __future__ import annotations

import enum
import math
import stat
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from retainzfs import errors
from retainzfs._zio import crc32c

BLOCK = 4096
FORMAT_VERSION = 1
INCOMPATIBLE_KNOWN = 0  # feature flags that this code can mount
MAGIC = b"RETAINZ\0"
BATCH_MAGIC = b"RZB1"

TRAILER_HEADER = struct.Struct("<4sIQQ8s")  # magic, blocks, inode, 0, start of the UUID
TRAILER_MAGIC = b"RZT1"
# One trailer block holds the header and four bytes for each block of its run.
RUN_BLOCKS_MAX = (BLOCK - TRAILER_HEADER.size) // 4
# Up to this length the checksums stand in the record: 64 bytes there against a block on the device.
INLINE_SUMS_MAX = 16
BATCH_MAX = 1 << 20  # records of one batch, bytes; bounds the memory and the time of one append
INLINE_DATA_MAX = 256  # bytes of a file kept in its inode record
NAME_MAX = 255
SYMLINK_MAX = 4095
XATTR_VALUE_MAX = 64 << 10  # bytes, as Linux allows at most
FILE_SIZE_MAX = 1 << 60  # bytes; block numbers stay far from 64 bits

# What is counted one by one never gets there. A reader refuses more, so that counting on fits into
# the fields of the format.
COUNT_MAX = 1 << 47  # inodes, generations, batches, mounts: 64 bits
RESETS_MAX = 1 << 31  # of a zone: 32 bits
CLOCK_MAX_S = float(1 << 53)  # from here on a float does not count seconds
GENERATION_STATES = range(-1, 5)  # as `streams.State` names them
ORIGIN_MAX = 255  # bytes of the reason for a retirement
FILE_TYPES = frozenset(
    {
        stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFSOCK, stat.S_IFCHR,
        stat.S_IFBLK,
    }
)  # fmt: skip


def stored(nbytes: int) -> int:
    """Return the bytes that so many data bytes take on the device at most, trailers included."""
    blocks = -(-nbytes // BLOCK)
    return (blocks + -(-blocks // RUN_BLOCKS_MAX) + 1) * BLOCK


class Superblock(NamedTuple):
    """First block of every metadata zone in use."""

    uuid: bytes
    zone_size: int
    zone_capacity: int
    zone_count: int
    metadata_zones: int
    position: int  # of this zone in the chain of metadata zones, from 1
    first_sequence: int  # of the first batch in this zone
    snapshot_position: int  # chain position where the newest complete snapshot begins
    log_before: int = 0  # sequence of the newest LOG batch before this zone
    incompatible: int = 0
    compatible: int = 0
    version: int = FORMAT_VERSION

    def encode(self) -> bytes:
        body = _SUPERBLOCK.pack(
            MAGIC, self.version, self.incompatible, self.compatible, self.uuid, self.zone_size,
            self.zone_capacity, self.zone_count, self.metadata_zones, self.position,
            self.first_sequence, self.snapshot_position, self.log_before,
        )  # fmt: skip
        body = body.ljust(BLOCK - 4, b"\0")
        return body + crc32c(body).to_bytes(4, "little")

    @classmethod
    def decode(cls, block: bytes, name: str) -> Superblock | None:
        """Return None for a block that is no complete superblock.

        Raises NewerFormat for one that only a newer version can read, Damaged for numbers that
        nobody can have written.
        """
        if len(block) < BLOCK or block[: len(MAGIC)] != MAGIC:
            return None
        if crc32c(block[: BLOCK - 4]) != int.from_bytes(block[BLOCK - 4 : BLOCK], "little"):
            return None
        _, version, incompatible, compatible, *rest = _SUPERBLOCK.unpack_from(block)
        if version > FORMAT_VERSION:
            raise errors.NewerFormat(name, f"format version {version}")
        if incompatible & ~INCOMPATIBLE_KNOWN:
            raise errors.NewerFormat(name, f"feature flags {incompatible:#x}")
        superblock = cls._make((*rest, incompatible, compatible, version))
        try:
            _counted("position", superblock.position)
            _counted("first sequence", superblock.first_sequence)
        except ValueError as error:
            raise errors.Damaged(name, f"a superblock with the {error}") from error
        return superblock


_SUPERBLOCK = struct.Struct("<8sIII16sQQIIQQQQ")


class BatchKind(enum.IntEnum):
    LOG = 1
    SNAPSHOT_BEGIN = 2
    SNAPSHOT = 3
    SNAPSHOT_END = 4
    CLEAN = 5  # last batch of a clean unmount
    SNAPSHOT_LOG = 6  # log that counts only if the SNAPSHOT_END of its snapshot is there


class BatchHeader(NamedTuple):
    kind: BatchKind
    length: int  # bytes of records behind the header
    uuid: bytes
    epoch: int  # mounts of this volume so far
    sequence: int  # of this batch, from 1, without gaps
    durable: int  # highest sequence known flushed when this batch was built
    snapshot: int  # sequence of the SNAPSHOT_BEGIN that a snapshot batch belongs to, else 0
    log_before: int  # sequence of the newest LOG batch before this one, 0 for none
    clock_s: float  # the mount's timeline


_BATCH = struct.Struct("<4sBxxxI16sQQQQQd4x")
BATCH_HEADER = _BATCH.size + 4


def encode_batch(header: BatchHeader, payload: bytes) -> bytes:
    """Return the batch, padded to whole blocks."""
    assert header.length == len(payload), "a batch states the length of its records"
    head = _BATCH.pack(BATCH_MAGIC, *header)
    crc = crc32c(payload, crc32c(head))
    body = head + crc.to_bytes(4, "little") + payload
    return body + b"\0" * (-len(body) % BLOCK)


def decode_batch(data: bytes | memoryview) -> tuple[BatchHeader, memoryview] | None:
    """Return header and records of the batch at the start of `data`, None when there is none.

    Raises ValueError for a sound batch of an unknown kind or with numbers that nobody can have
    written.
    """
    view = memoryview(data)
    if len(view) < BLOCK or view[:4] != BATCH_MAGIC:
        return None
    _, kind, *rest = _BATCH.unpack_from(view)
    length = rest[0]
    if length > len(view) - BATCH_HEADER:
        return None
    payload = view[BATCH_HEADER : BATCH_HEADER + length]
    crc = int.from_bytes(view[_BATCH.size : BATCH_HEADER], "little")
    if crc32c(payload, crc32c(view[: _BATCH.size])) != crc:
        return None
    header = BatchHeader(BatchKind(kind), *rest)
    _counted("epoch", header.epoch)
    _counted("sequence", header.sequence)
    if not 0 <= header.clock_s < CLOCK_MAX_S:
        raise ValueError(f"a clock that shows {header.clock_s} s")
    return header, payload


def batch_blocks(data: bytes | memoryview) -> int:
    """Return how many blocks the batch claims whose first block is `data`, 0 when it is none."""
    if len(data) < BLOCK or data[:4] != BATCH_MAGIC:
        return 0
    length: int = _BATCH.unpack_from(data)[2]
    if length > BATCH_MAX:
        return 0
    return -(-(length + BATCH_HEADER) // BLOCK)


class InodeRecord(NamedTuple):
    """Attributes of an inode but its size; links 0 is an orphan that some process holds open."""

    ino: int
    mode: int
    uid: int
    gid: int
    nlink: int
    rdev: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int
    generation: int
    parent: int


class SizeRecord(NamedTuple):
    """Size in bytes; extents and inline bytes beyond it are gone."""

    ino: int
    size: int


class ContentRecord(NamedTuple):
    """Inline bytes of a small file, or the target of a symbolic link; replaces block 0."""

    ino: int
    data: bytes


class MapRecord(NamedTuple):
    """Blocks [block, block + count) of a file are blocks [first, first + count) of a run."""

    ino: int
    block: int
    blocks: int
    first: int
    zone: int
    epoch: int  # resets of the zone so far; another count means that the run is gone
    start: int  # block of the zone where the run begins
    length: int  # data blocks of the run
    sums: bytes  # crc32c of each block of the run, or of its trailer block


class FreeRecord(NamedTuple):
    """The inode and its bytes are gone."""

    ino: int


class LinkRecord(NamedTuple):
    parent: int
    name: bytes
    ino: int


class UnlinkRecord(NamedTuple):
    parent: int
    name: bytes


class XattrRecord(NamedTuple):
    ino: int
    name: bytes
    value: bytes


class XattrRemovedRecord(NamedTuple):
    ino: int
    name: bytes


class ZoneRecord(NamedTuple):
    """The zone was reset; `epoch` counts its resets."""

    zone: int
    epoch: int


class GenerationRecord(NamedTuple):
    """One generation of a stream (see retention)."""

    generation: int
    stream: int  # inode of the stream's directory
    number: int
    birth: float
    retire: float  # as computed last; inf for an anchor, nan for none
    committed: float  # epoch of its completion, nan before
    order: int  # position among the commits of the volume, 0 before completion
    state: int
    size: int
    origin: bytes


class CountersRecord(NamedTuple):
    """Numbers never given out again."""

    next_ino: int
    next_generation: int
    next_order: int


Record = (
    InodeRecord | SizeRecord | ContentRecord | MapRecord | FreeRecord | LinkRecord | UnlinkRecord
    | XattrRecord | XattrRemovedRecord | ZoneRecord | GenerationRecord | CountersRecord
)  # fmt: skip

_INODE = struct.Struct("<BQIIIIQqqqQQ")
_SIZE = struct.Struct("<BQQ")
_CONTENT = struct.Struct("<BQH")
_MAP = struct.Struct("<BQQIIIIIHB")
MAP_MAX = _MAP.size + 4 * INLINE_SUMS_MAX  # bytes of the longest MapRecord
_FREE = struct.Struct("<BQ")
_LINK = struct.Struct("<BQQB")
_UNLINK = struct.Struct("<BQB")
_XATTR = struct.Struct("<BQBI")
_XATTR_REMOVED = struct.Struct("<BQB")
_ZONE = struct.Struct("<BII")
_GENERATION = struct.Struct("<BQQQdddQbQB")
_COUNTERS = struct.Struct("<BQQQ")


def encode(record: Record) -> bytes:
    match record:
        case InodeRecord():
            return _INODE.pack(1, *record)
        case SizeRecord():
            return _SIZE.pack(2, *record)
        case ContentRecord(ino, data):
            return _CONTENT.pack(3, ino, len(data)) + data
        case MapRecord():
            return _MAP.pack(4, *record[:8], len(record.sums)) + record.sums
        case FreeRecord():
            return _FREE.pack(5, *record)
        case LinkRecord(parent, name, ino):
            return _LINK.pack(6, parent, ino, len(name)) + name
        case UnlinkRecord(parent, name):
            return _UNLINK.pack(7, parent, len(name)) + name
        case XattrRecord(ino, name, value):
            return _XATTR.pack(8, ino, len(name), len(value)) + name + value
        case XattrRemovedRecord(ino, name):
            return _XATTR_REMOVED.pack(9, ino, len(name)) + name
        case ZoneRecord():
            return _ZONE.pack(10, *record)
        case GenerationRecord():
            return _GENERATION.pack(11, *record[:9], len(record.origin)) + record.origin
        case CountersRecord():
            return _COUNTERS.pack(12, *record)


def _counted(what: str, number: int, least: int = 1) -> None:
    if not least <= number <= COUNT_MAX:
        raise ValueError(f"{what} {number}")


class _Reader:
    """Cursor over a payload; running past its end is damage."""

    def __init__(self, payload: bytes | memoryview) -> None:
        self.data = bytes(payload)
        self.at = 0

    def fields(self, form: struct.Struct) -> tuple[int, ...]:
        if self.at + form.size > len(self.data):
            raise ValueError("a record runs past the end of its batch")
        values = form.unpack_from(self.data, self.at)
        self.at += form.size
        return values[1:]

    def bytes(self, n: int) -> bytes:
        if self.at + n > len(self.data):
            raise ValueError("a record runs past the end of its batch")
        self.at += n
        return self.data[self.at - n : self.at]


def _inode(r: _Reader) -> Record:
    record = InodeRecord(*r.fields(_INODE))
    _counted("inode", record.ino)
    if record.mode >> 16 or stat.S_IFMT(record.mode) not in FILE_TYPES:
        raise ValueError(f"inode {record.ino} has the mode {record.mode:o}")
    return record


def _size(r: _Reader) -> Record:
    record = SizeRecord(*r.fields(_SIZE))
    if record.size > FILE_SIZE_MAX:
        raise ValueError(f"inode {record.ino} has {record.size} bytes")
    return record


def _content(r: _Reader) -> Record:
    ino, n = r.fields(_CONTENT)
    return ContentRecord(ino, r.bytes(n))


def _map(r: _Reader) -> Record:
    *head, n = r.fields(_MAP)
    record = MapRecord._make((*head, r.bytes(n)))
    if record.block + record.blocks > FILE_SIZE_MAX // BLOCK:
        raise ValueError(f"inode {record.ino} has a block {record.block}")
    return record


def _link(r: _Reader) -> Record:
    parent, ino, n = r.fields(_LINK)
    name = r.bytes(n)
    if name in (b"", b".", b"..") or b"/" in name or b"\0" in name:
        raise ValueError(f"inode {ino} has the name {name!r}")
    return LinkRecord(parent, name, ino)


def _unlink(r: _Reader) -> Record:
    parent, n = r.fields(_UNLINK)
    return UnlinkRecord(parent, r.bytes(n))


def _xattr(r: _Reader) -> Record:
    ino, n, m = r.fields(_XATTR)
    record = XattrRecord(ino, r.bytes(n), r.bytes(m))
    if not record.name or b"\0" in record.name or m > XATTR_VALUE_MAX:
        raise ValueError(f"inode {ino} has an attribute {record.name!r} of {m} bytes")
    return record


def _xattr_removed(r: _Reader) -> Record:
    ino, n = r.fields(_XATTR_REMOVED)
    return XattrRemovedRecord(ino, r.bytes(n))


def _generation(r: _Reader) -> Record:
    *head, n = r.fields(_GENERATION)
    record = GenerationRecord._make((*head, r.bytes(n)))
    _counted("generation", record.generation)
    _counted("order", record.order, least=0)
    if record.state not in GENERATION_STATES:
        raise ValueError(f"generation {record.generation} has the state {record.state}")
    told = math.isfinite(record.birth) and record.retire != -math.inf
    if not told or math.isinf(record.committed):
        raise ValueError(f"generation {record.generation} has impossible times")
    return record


def _zone(r: _Reader) -> Record:
    record = ZoneRecord(*r.fields(_ZONE))
    if record.epoch > RESETS_MAX:
        raise ValueError(f"zone {record.zone} was reset {record.epoch} times")
    return record


def _counters(r: _Reader) -> Record:
    record = CountersRecord(*r.fields(_COUNTERS))
    for what, number in record._asdict().items():
        _counted(what, number)
    return record


_DECODERS: dict[int, Callable[[_Reader], Record]] = {
    1: _inode,
    2: _size,
    3: _content,
    4: _map,
    5: lambda r: FreeRecord(*r.fields(_FREE)),
    6: _link,
    7: _unlink,
    8: _xattr,
    9: _xattr_removed,
    10: _zone,
    11: _generation,
    12: _counters,
}


def decode(payload: bytes | memoryview) -> Iterator[Record]:
    """Yield the records of a batch. Raises ValueError for bytes that are none.

    Every field is in its bounds then; what records say of each other is for `Namespace`.
    """
    reader = _Reader(payload)
    while reader.at < len(reader.data):
        decoder = _DECODERS.get(reader.data[reader.at])
        if decoder is None:
            raise ValueError(f"unknown record type {reader.data[reader.at]}")
        yield decoder(reader)


def encode_all(records: Iterable[Record]) -> bytes:
    return b"".join(map(encode, records))


def trailer_header(blocks: int, ino: int, block: int, uuid: bytes) -> bytes:
    """Return the 32 bytes that open a trailer block; fsck finds the owner of a run by them."""
    return TRAILER_HEADER.pack(TRAILER_MAGIC, blocks, ino, block, uuid[:8])
