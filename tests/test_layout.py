"""Records on the medium: what is encoded comes back, and what is broken is noticed."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retainzfs import layout
from retainzfs.errors import NewerFormat
from retainzfs.layout import BLOCK, BatchHeader, BatchKind, Superblock

pytestmark = pytest.mark.pure

U8 = st.integers(0, 2**8 - 1)
U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)
I64 = st.integers(-(2**63), 2**63 - 1)
I8 = st.integers(-128, 127)
FLOAT = st.floats()
NAME = st.binary(min_size=1, max_size=layout.NAME_MAX)
SUMS = st.binary(max_size=4 * layout.INLINE_SUMS_MAX)

RECORDS: st.SearchStrategy[Any] = st.one_of(
    st.builds(layout.InodeRecord, U64, U32, U32, U32, U32, U64, I64, I64, I64, U64, U64),
    st.builds(layout.SizeRecord, U64, U64),
    st.builds(layout.ContentRecord, U64, st.binary(max_size=layout.SYMLINK_MAX)),
    st.builds(layout.MapRecord, U64, U64, U32, U32, U32, U32, U32, st.integers(0, 65535), SUMS),
    st.builds(layout.FreeRecord, U64),
    st.builds(layout.LinkRecord, U64, NAME, U64),
    st.builds(layout.UnlinkRecord, U64, NAME),
    st.builds(layout.XattrRecord, U64, NAME, st.binary(max_size=65536)),
    st.builds(layout.XattrRemovedRecord, U64, NAME),
    st.builds(layout.ZoneRecord, U32, U32),
    st.builds(
        layout.GenerationRecord, U64, U64, U64, FLOAT, FLOAT, FLOAT, U64, I8, U64,
        st.binary(max_size=255),
    ),
    st.builds(layout.CountersRecord, U64, U64, U64),
)  # fmt: skip


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


@given(U64, U64, U64)
def test_superblocks_come_back(position: int, first: int, snapshot: int) -> None:
    block = SUPERBLOCK._replace(
        position=position, first_sequence=first, snapshot_position=snapshot, compatible=6
    )
    assert Superblock.decode(block.encode(), "disk") == block


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
