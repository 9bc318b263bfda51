"""Records on the medium: what is encoded comes back, and what is broken is noticed."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retainzfs import layout
from retainzfs.errors import Damaged, NewerFormat
from retainzfs.layout import BLOCK, BatchHeader, BatchKind, Superblock

pytestmark = pytest.mark.pure

U8 = st.integers(0, 2**8 - 1)
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
NAME = st.binary(min_size=1, max_size=layout.NAME_MAX)
SUMS = st.binary(max_size=4 * layout.INLINE_SUMS_MAX)

TABLE = bytes.maketrans(b"\0/.", b"abc")
COUNT = st.integers(1, layout.COUNT_MAX)
MODE = st.builds(lambda kind, bits: kind | bits, st.sampled_from(sorted(layout.FILE_TYPES)),
                 st.integers(0, 0o7777))  # fmt: skip
SIZE = st.integers(0, layout.FILE_SIZE_MAX)
BLOCKS = st.integers(0, layout.FILE_SIZE_MAX // BLOCK - 2**32)
WORD = st.binary(min_size=1, max_size=layout.NAME_MAX).map(lambda name: name.translate(TABLE))

RECORDS: st.SearchStrategy[Any] = st.one_of(
    st.builds(layout.InodeRecord, COUNT, MODE, U32, U32, U32, U64, I64, I64, I64, U64, U64),
    st.builds(layout.SizeRecord, U64, SIZE),
    st.builds(layout.ContentRecord, U64, st.binary(max_size=layout.SYMLINK_MAX)),
    st.builds(layout.MapRecord, U64, BLOCKS, U32, U32, U32, U32, U32, st.integers(0, 65535), SUMS),
    st.builds(layout.FreeRecord, U64),
    st.builds(layout.LinkRecord, U64, WORD, U64),
    st.builds(layout.UnlinkRecord, U64, NAME),
    st.builds(layout.XattrRecord, U64, WORD, st.binary(max_size=layout.XATTR_VALUE_MAX)),
    st.builds(layout.XattrRemovedRecord, U64, NAME),
    st.builds(layout.ZoneRecord, U32, st.integers(0, layout.RESETS_MAX)),
    st.builds(
        layout.GenerationRecord, COUNT, U64, U64, FINITE, st.just(math.inf) | FINITE,
        st.just(math.nan) | FINITE, st.integers(0, layout.COUNT_MAX),
        st.sampled_from(layout.GENERATION_STATES), U64, st.binary(max_size=255),
    ),
    st.builds(layout.CountersRecord, COUNT, COUNT, COUNT),
)  # fmt: skip
INODE = layout.InodeRecord(2, 0o100644, 0, 0, 1, 0, 0, 0, 0, 0, 1)
GENERATION = layout.GenerationRecord(1, 1, 1, 0.0, math.inf, math.nan, 0, 0, 0, b"")
MAP = layout.MapRecord(2, 0, 1, 0, 5, 1, 0, 4, bytes(16))
FAR = layout.COUNT_MAX + 1


@pytest.mark.parametrize(
    "record",
    [
        INODE._replace(ino=0),
        INODE._replace(ino=FAR),
        INODE._replace(mode=0o644),
        INODE._replace(mode=1 << 31 | 0o100644),
        layout.SizeRecord(2, layout.FILE_SIZE_MAX + 1),
        MAP._replace(block=layout.FILE_SIZE_MAX // BLOCK),
        *(layout.LinkRecord(1, name, 2) for name in (b"", b".", b"..", b"a/b", b"a\0")),
        layout.XattrRecord(2, b"", b""),
        layout.XattrRecord(2, b"a\0b", b""),
        layout.XattrRecord(2, b"a", bytes(layout.XATTR_VALUE_MAX + 1)),
        layout.ZoneRecord(5, layout.RESETS_MAX + 1),
        GENERATION._replace(generation=0),
        GENERATION._replace(order=FAR),
        GENERATION._replace(state=5),
        GENERATION._replace(state=-2),
        GENERATION._replace(birth=math.nan),
        GENERATION._replace(retire=-math.inf),
        GENERATION._replace(committed=math.inf),
        layout.CountersRecord(FAR, 1, 1),
        layout.CountersRecord(1, 0, 1),
    ],
)
def test_a_field_out_of_its_bounds_is_no_record(record: layout.Record) -> None:
    encoded = layout.encode(record)
    with pytest.raises(ValueError, match=r"inode|zone|generation|order|next"):
        list(layout.decode(encoded))


def same(a: object, b: object) -> bool:
    """Equal, with nan equal to itself."""
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    return a == b


@given(st.lists(RECORDS, max_size=5))
def test_records_come_back(records: list[Any]) -> None:
    found = list(layout.decode(layout.encode_all(records)))
    assert [type(r) for r in found] == [type(r) for r in records]
    for one, other in zip(records, found, strict=True):
        assert all(map(same, one, other)), f"{one} came back as {other}"


@given(RECORDS, st.data())
def test_a_cut_record_is_no_record(record: Any, data: st.DataObject) -> None:
    whole = layout.encode(record)
    cut = data.draw(st.integers(1, len(whole) - 1))
    with pytest.raises(ValueError, match="past the end"):
        list(layout.decode(whole[:cut]))


def test_an_unknown_record_is_no_record() -> None:
    with pytest.raises(ValueError, match="unknown record type 200"):
        list(layout.decode(b"\xc8" + bytes(100)))


def batch(payload: bytes, kind: BatchKind = BatchKind.LOG) -> bytes:
    return layout.encode_batch(
        BatchHeader(kind, len(payload), bytes(range(16)), 3, 7, 5, 0, 4, 12.5), payload
    )


@given(st.sampled_from(BatchKind), st.binary(max_size=3 * BLOCK))
def test_batches_come_back(kind: BatchKind, payload: bytes) -> None:
    data = batch(payload, kind)
    assert len(data) == BLOCK * layout.batch_blocks(data[:BLOCK])
    decoded = layout.decode_batch(data)
    assert decoded is not None
    header, found = decoded
    assert header == BatchHeader(kind, len(payload), bytes(range(16)), 3, 7, 5, 0, 4, 12.5)
    assert bytes(found) == payload


@pytest.mark.parametrize(
    "change",
    [{"epoch": FAR}, {"sequence": 0}, {"clock_s": math.nan}, {"clock_s": math.inf},
     {"clock_s": -1.0}, {"kind": 9}],
)  # fmt: skip
def test_a_batch_that_nobody_can_have_written_is_damage(change: dict[str, Any]) -> None:
    header = BatchHeader(BatchKind.LOG, 0, bytes(16), 3, 7, 5, 0, 6, 12.5)._replace(**change)
    with pytest.raises(ValueError, match=r"epoch|sequence|clock|9"):
        layout.decode_batch(layout.encode_batch(header, b""))


def test_a_batch_claims_no_more_than_a_writer_writes() -> None:
    assert layout.batch_blocks(batch(bytes(layout.BATCH_MAX))[:BLOCK]) == 257
    assert layout.batch_blocks(batch(bytes(layout.BATCH_MAX + 1))[:BLOCK]) == 0


PAYLOAD = bytes(range(256)) * 20


@given(st.integers(0, (layout.BATCH_HEADER + len(PAYLOAD)) * 8 - 1))
def test_a_flipped_bit_breaks_a_batch(bit: int) -> None:
    data = bytearray(batch(PAYLOAD))
    data[bit // 8] ^= 1 << bit % 8
    assert layout.decode_batch(bytes(data)) is None


@given(st.integers(0, layout.BATCH_HEADER + len(PAYLOAD) - 1))
def test_a_cut_batch_is_no_batch(length: int) -> None:
    assert layout.decode_batch(batch(PAYLOAD)[:length]) is None


SUPERBLOCK = Superblock(bytes(range(16)), 1 << 28, 1 << 27, 1000, 10, 5, 99, 3, 97)


@given(COUNT, COUNT, U64)
def test_superblocks_come_back(position: int, first: int, snapshot: int) -> None:
    block = SUPERBLOCK._replace(
        position=position, first_sequence=first, snapshot_position=snapshot, compatible=6
    )
    assert Superblock.decode(block.encode(), "disk") == block


@pytest.mark.parametrize("field", ["position", "first_sequence"])
@pytest.mark.parametrize("number", [0, FAR])
def test_a_superblock_that_counts_too_far_is_damage(field: str, number: int) -> None:
    changes: dict[str, Any] = {field: number}
    block = SUPERBLOCK._replace(**changes)
    with pytest.raises(Damaged, match="disk"):
        Superblock.decode(block.encode(), "disk")


@given(st.integers(0, BLOCK * 8 - 1))
def test_a_flipped_bit_breaks_a_superblock(bit: int) -> None:
    data = bytearray(SUPERBLOCK.encode())
    data[bit // 8] ^= 1 << bit % 8
    assert Superblock.decode(bytes(data), "disk") is None


@pytest.mark.parametrize(
    "block",
    [SUPERBLOCK._replace(version=layout.FORMAT_VERSION + 1), SUPERBLOCK._replace(incompatible=4)],
)
def test_what_only_a_newer_version_reads_is_refused_by_name(block: Superblock) -> None:
    with pytest.raises(NewerFormat, match="disk"):
        Superblock.decode(block.encode(), "disk")


def test_a_trailer_holds_the_checksums_of_the_longest_run() -> None:
    header = layout.trailer_header(layout.RUN_BLOCKS_MAX, 2**64 - 1, 2**64 - 1, bytes(16))
    assert len(header) + 4 * layout.RUN_BLOCKS_MAX == BLOCK
