"""Hints: whole and broken files, told by their first and last bytes."""

import io
import json
import struct
import zipfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retainzfs.hints import (
    HEAD_BYTES,
    TAIL_BYTES,
    Verdict,
    examine,
    head_wanted,
    structure,
)

pytestmark = pytest.mark.pure


def verdict(name: bytes, data: bytes) -> Verdict:
    """As the caller reads: a first read, then what head_wanted asks for, and the tail."""
    head = data[:HEAD_BYTES]
    head = data[: head_wanted(name, len(data), head)]
    return structure(name, len(data), head, data[-TAIL_BYTES:])


def archive(*, files: int = 3, size: int = 50_000, comment: bytes = b"") -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for number in range(files):
            file.writestr(f"archive/data/{number}", bytes(size))
        file.comment = comment
    return buffer.getvalue()


def with_zip64(data: bytes) -> bytes:
    """`data`, a zip archive without comment, with zip64 records before its end record."""
    end = data[-22:]
    entries, length, offset = struct.unpack_from("<HII", end, 10)
    record = struct.pack(
        "<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, entries, entries, length, offset
    )
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, len(data) - 22, 1)
    none = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 65535, 65535, 2**32 - 1, 2**32 - 1, 0)
    return data[:-22] + record + locator + none


def tensors(*lengths: int, padding: int = 0) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for index, length in enumerate(lengths):
        offsets = [start, start + length]
        header[f"t{index}"] = {"dtype": "U8", "shape": [length], "data_offsets": offsets}
        start += length
    text = json.dumps(header).encode() + b" " * padding
    return struct.pack("<Q", len(text)) + text + bytes(start)


COMMENT = b"PK\5\6" + b"c" * 65531
WHOLE = [
    (b"model.pt", archive()),
    (b"model.pt", archive(files=1, size=10)),
    (b"model.pt", archive(files=0)),
    (b"model.bin", archive(comment=b"PK\5\6 looks like an end record but is none")),
    (b"model.pt", archive(size=200_000, comment=COMMENT)),
    (b"anything", with_zip64(archive())),
    (b"a.npz", archive()),
    (b"model.safetensors", tensors(1000, 0, 24)),
    (b"model.safetensors", tensors()),
    (b"model.safetensors", tensors(5000, padding=100_000)),
    (b".model.safetensors.tmp", tensors(100)),
]


@pytest.mark.parametrize(("name", "data"), WHOLE)
def test_whole_files_are_ok_and_cut_ones_are_not(name: bytes, data: bytes) -> None:
    assert verdict(name, data) is Verdict.OK
    for cut in (1, 5, 22, 100, len(data) // 2):
        short = data[: max(4, len(data) - cut)]
        assert verdict(name, short) is Verdict.BROKEN, cut
    assert verdict(name, data + b"\0") is Verdict.BROKEN


def test_zip64_of_a_huge_archive_is_read() -> None:
    size = 10 << 30
    length = 1000
    offset = size - 98 - length
    end = struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, 9, 9, length, 2**32 - 1, 0)
    locator = struct.pack("<4sIQI", b"PK\6\7", 0, size - 98, 1)
    record = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, 9, 9, length, offset)
    directory = b"PK\1\2" + bytes(length - 4)
    tail = (bytes(TAIL_BYTES) + directory + record + locator + end)[-TAIL_BYTES:]
    head = b"PK\3\4" + bytes(HEAD_BYTES - 4)
    assert structure(b"big.pt", size, head, tail) is Verdict.OK
    assert structure(b"big.pt", size + 4096, head, tail) is Verdict.BROKEN


def test_a_file_that_was_allocated_but_not_written_is_broken() -> None:
    assert verdict(b"model.safetensors", bytes(100_000)) is Verdict.BROKEN
    assert verdict(b"model.npz", bytes(100_000)) is Verdict.BROKEN
    assert verdict(b"model.pt", b"") is Verdict.BROKEN
    assert verdict(b"model.pt", archive()[:-22] + bytes(22)) is Verdict.BROKEN


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b"{}x",
        b"[" * 100_000,
        b'{"t": 5}',
        b'{"t": {"data_offsets": [5, 1]}}',
        b'{"t": {"data_offsets": [0, 1.0]}}',
        b'{"t": {"data_offsets": [0]}}',
        b'{"\xff": 1}',
        b'{"t": {"data_offsets": [0, ' + b"9" * 5000 + b"]}}",
    ],
)
def test_damaged_safetensors_header(header: bytes) -> None:
    data = struct.pack("<Q", len(header)) + header
    finding = examine(b"m.safetensors", len(data), data, data)
    assert finding.verdict is Verdict.BROKEN
    assert "damaged" in finding.reason


def test_what_was_not_read_is_unknown() -> None:
    data = tensors(5000, padding=100_000)
    assert head_wanted(b"m.safetensors", len(data), data[:8]) > HEAD_BYTES
    assert structure(b"m.safetensors", len(data), data[:HEAD_BYTES], b"") is Verdict.UNKNOWN
    assert structure(b"m.safetensors", len(data), b"", b"") is Verdict.UNKNOWN
    zipped = archive()
    assert structure(b"m.pt", len(zipped), zipped[:8], zipped[-21:]) is Verdict.UNKNOWN
    assert structure(b"m.pt", len(zipped), zipped[:8], b"") is Verdict.UNKNOWN
    huge = struct.pack("<Q", 50 << 20) + b"{"
    assert structure(b"m.safetensors", 1 << 40, huge, b"") is Verdict.UNKNOWN
    assert head_wanted(b"m.safetensors", 1 << 40, huge) == HEAD_BYTES


@pytest.mark.parametrize(
    ("name", "data"),
    [(b"m.pt", b"\x80\x02}"), (b"x.json", b"{}"), (b"w.h5", b"\x89HDF"), (b"e", b"")],
)
def test_other_formats_are_unknown(name: bytes, data: bytes) -> None:
    assert verdict(name, data) is Verdict.UNKNOWN


@given(
    st.sampled_from([b"m.safetensors", b"m.npz", b"m.pt", b"m"]),
    st.integers(0, 2**63),
    st.one_of(
        st.binary(max_size=64),
        st.binary(max_size=64).map(lambda b: b"PK\3\4" + b),
        st.binary(max_size=64).map(lambda b: struct.pack("<Q", len(b)) + b),
    ),
    st.lists(
        st.sampled_from([b"PK\5\6", b"PK\6\7", b"PK\6\6", b"PK\1\2", bytes(4), bytes(18), b"\x01"])
    ).map(b"".join),
)
def test_examine_never_raises(name: bytes, size: int, head: bytes, tail: bytes) -> None:
    for length in (size, len(tail), len(head)):
        assert examine(name, length, head, tail).reason
        assert 0 <= head_wanted(name, length, head) <= length
