"""The head of an emulated zoned device: what lies before its first zone (pure, no I/O).

    block 0, 1          header, two equal copies, written once by mkfs
    2 .. 2+P            copy 0 of the P state pages
    2+P .. 2+2P         copy 1 of them
    base                zone 0; zone i lies at base + i * zone_size

A state page holds the write pointer, condition and reset count of 253 zones. A flush writes it
into the copy that is not the newest, so a torn write costs only the flush that was not
acknowledged. Integers are little-endian. Header and page end in the crc32c of all that precedes.

Magic, version, flags and checksum of the header keep their place in every version. An unknown
incompatible flag or a newer version refuses the target, an unknown compatible flag is ignored.
"""

import struct
from dataclasses import dataclass

from retainzfs._zio import Slot, crc32c
from retainzfs.device.protocol import BLOCK, Condition, Geometry
from retainzfs.device.rules import ZoneState

MAGIC = b"RETAINZ\0"
VERSION = 1
KNOWN_INCOMPATIBLE = 0
PREALLOCATED = 1  # compatible: the image's blocks were allocated by mkfs; a reset keeps them

# What the head takes is rounded up to this, so that zones are aligned for any flash page or RAID
# stripe, and formatting wipes the magics that other filesystems keep below 64 KiB + 4 KiB.
ALIGNMENT = 1 << 20

_HEADER = struct.Struct("<8sIII4x16sQQQIII")  # the fields of Header, in order
_PAGE = struct.Struct("<QI4x16s")  # sequence, index, uuid
_STATE = struct.Struct("<QIB3x")  # write pointer, resets, condition
_SUM = struct.Struct("<I")
_SUMMED = BLOCK - _SUM.size
STATES = (_SUMMED - _PAGE.size) // _STATE.size  # zones a page

HEADER_BLOCKS = 2

# Nobody counts so far; a reader refuses more, so that counting on fits into the fields.
SEQUENCE_MAX = 1 << 63
RESETS_MAX = 1 << 31

_CONDITIONS = frozenset(Condition) - {Condition.NOT_WP}


class HeadError(Exception):
    """A header or page that cannot be used; the text says why."""


class NewerHeadError(Exception):
    """A header of a later format; the text says what is unknown."""


@dataclass(frozen=True, slots=True)
class Header:
    """`base` is the byte offset of zone 0."""

    uuid: bytes
    base: int
    geometry: Geometry
    compatible: int = 0
    incompatible: int = 0
    version: int = VERSION

    @property
    def pages(self) -> int:
        return -(-self.geometry.zone_count // STATES)

    @property
    def end(self) -> int:
        """Bytes that a target must have."""
        return self.base + self.geometry.zone_count * self.geometry.zone_size

    def page_offset(self, page: int, copy: int) -> int:
        return (HEADER_BLOCKS + copy * self.pages + page) * BLOCK

    def page_zones(self, page: int) -> range:
        return range(page * STATES, min((page + 1) * STATES, self.geometry.zone_count))


def base_of(zone_count: int) -> int:
    """Bytes the head of a device with so many zones takes."""
    blocks = HEADER_BLOCKS + 2 * -(-zone_count // STATES)
    return -(-blocks * BLOCK // ALIGNMENT) * ALIGNMENT


def encode_header(header: Header) -> bytes:
    geometry = header.geometry
    return _sealed(
        _HEADER.pack(
            MAGIC,
            header.version,
            header.incompatible,
            header.compatible,
            header.uuid,
            header.base,
            geometry.zone_size,
            geometry.zone_capacity,
            geometry.zone_count,
            geometry.max_open,
            geometry.max_active,
        )
    )


def decode_header(block: bytes) -> Header:
    """Raises HeadError for what is no intact header, NewerHeadError for one of a later format."""
    if not has_magic(block):
        raise HeadError("no retainzfs header")
    if not _intact(block):
        raise HeadError("checksum mismatch")
    _, version, incompatible, compatible, uuid, base, *numbers = _HEADER.unpack_from(block)
    if version > VERSION:
        raise NewerHeadError(f"format version {version}, this one knows {VERSION}")
    if unknown := incompatible & ~KNOWN_INCOMPATIBLE:
        raise NewerHeadError(f"unknown format flags {unknown:#x}")
    header = Header(uuid, base, Geometry(*numbers), compatible, incompatible, version)
    zones = header.geometry
    if (flaw := zones.flaw()) is not None:
        raise HeadError(flaw)
    if base % BLOCK or base < base_of(zones.zone_count):
        raise HeadError(f"{zones.zone_count} zones cannot begin at byte {base}")
    return header


def has_magic(block: bytes) -> bool:
    return block[: len(MAGIC)] == MAGIC


class StatePage:
    """One state page: its newest copy on the target, and in `buffer` what the next flush writes.

    `zones` are those it covers, `copy` (0 or 1) is the newest one.
    """

    def __init__(self, header: Header, index: int, sequence: int = 0, copy: int = 1) -> None:
        self.zones = header.page_zones(index)
        self.buffer = Slot(BLOCK)
        self.sequence = sequence
        self.copy = copy
        self._header = header
        self._index = index

    @property
    def next_offset(self) -> int:
        """Byte offset of the copy that may be overwritten."""
        return self._header.page_offset(self._index, self.copy ^ 1)

    def put(self, zone: int, state: ZoneState) -> None:
        place = _PAGE.size + (zone - self.zones.start) * _STATE.size
        _STATE.pack_into(
            memoryview(self.buffer), place, state.pointer, state.resets, state.condition
        )

    def seal(self) -> Slot:
        """The buffer, ready to be written to `next_offset`."""
        view = memoryview(self.buffer)
        _PAGE.pack_into(view, 0, self.sequence + 1, self._index, self._header.uuid)
        _SUM.pack_into(view, _SUMMED, crc32c(view[:_SUMMED]))
        return self.buffer

    def written(self) -> None:
        """What was sealed is durable."""
        self.sequence += 1
        self.copy ^= 1


def decode_page(header: Header, index: int, block: bytes) -> tuple[int, list[ZoneState]]:
    """Sequence and states of a page's copy; raises HeadError."""
    if not _intact(block):
        raise HeadError("checksum mismatch")
    sequence, found, uuid = _PAGE.unpack_from(block)
    if (found, uuid) != (index, header.uuid):
        raise HeadError("it belongs elsewhere")
    if sequence > SEQUENCE_MAX:
        raise HeadError(f"it was written {sequence} times")
    states = []
    for place, zone in enumerate(header.page_zones(index)):
        pointer, resets, condition = _STATE.unpack_from(block, _PAGE.size + place * _STATE.size)
        highest = 0 if condition == Condition.EMPTY else header.geometry.zone_capacity
        if pointer % BLOCK or pointer > highest:
            raise HeadError(f"zone {zone} has its write pointer at {pointer}")
        if condition not in _CONDITIONS:
            raise HeadError(f"zone {zone} has the condition {condition}")
        if resets > RESETS_MAX:
            raise HeadError(f"zone {zone} was reset {resets} times")
        states.append(ZoneState(Condition(condition), pointer, resets))
    return sequence, states


def _sealed(content: bytes) -> bytes:
    content = content.ljust(_SUMMED, b"\0")
    return content + _SUM.pack(crc32c(content))


def _intact(block: bytes) -> bool:
    return len(block) == BLOCK and _SUM.pack(crc32c(block[:_SUMMED])) == block[_SUMMED:]
