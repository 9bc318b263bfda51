"""Hints: whole and broken files, told by their first and last bytes."""

import io
import json
import struct
import zipfile
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retainzfs.lifetimes import (
    Finding,
    Verdict,
    examination,
)

pytestmark = pytest.mark.pure


def examine(name: bytes, size: int, read: Callable[[int, int], bytes]) -> Finding:
    steps = examination(name, size)
    try:
        wanted = next(steps)
        while True:
            offset, length = wanted
            assert offset >= 0
            assert length >= 0
            assert offset + length <= size, "it asks for bytes that the file does not have"
            wanted = steps.send(read(offset, length))
    except StopIteration as stop:
        finding: Finding = stop.value
        return finding


def verdict(name: bytes, data: bytes) -> Verdict:
    return examine(name, len(data), lambda at, length: data[at : at + length]).verdict


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
    stored = directory + record + locator + end

    def read(at: int, length: int) -> bytes:
        return b"PK\3\4".ljust(length, b"\0") if at == 0 else stored.rjust(length, b"\0")

    assert examine(b"big.pt", size, read).verdict is Verdict.OK
    assert examine(b"big.pt", size + 4096, read).verdict is Verdict.BROKEN


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
    finding = examine(b"m.safetensors", len(data), lambda at, length: data[at : at + length])
    assert finding.verdict is Verdict.BROKEN
    assert "damaged" in finding.reason


def test_a_header_that_is_too_long_to_read_is_unknown() -> None:
    huge = struct.pack("<Q", 50 << 20) + b"{"
    read = lambda at, length: huge.ljust(length, b" ")  # noqa: E731
    assert examine(b"m.safetensors", 1 << 40, read).verdict is Verdict.UNKNOWN


@pytest.mark.torch
@pytest.mark.parametrize("protocol", [2, 4])
def test_an_archive_of_torch_has_all_tensors_that_it_names(protocol: int) -> None:
    torch = pytest.importorskip("torch")
    shared = torch.rand(300)
    state = {
        "step": 7,
        "names": [str(number) for number in range(50)],
        "model": {f"layer.{number}": torch.rand(70, 70) for number in range(300)},
        "views": [shared[:100], shared[100:]],
        "bool": torch.ones(3, dtype=torch.bool),
    }
    buffer = io.BytesIO()
    torch.save(state, buffer, pickle_protocol=protocol)
    whole = buffer.getvalue()
    assert verdict(b"m.pt", whole) is Verdict.OK
    for lost in ("data/0", "data/150", "data/301"):
        out = io.BytesIO()
        with zipfile.ZipFile(buffer) as old, zipfile.ZipFile(out, "w") as new:
            for entry in old.infolist():
                if not entry.filename.endswith(f"/{lost}"):
                    new.writestr(entry.filename, old.read(entry))
        assert verdict(b"m.pt", out.getvalue()) is Verdict.BROKEN, lost


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
def test_an_examination_never_raises(name: bytes, size: int, head: bytes, tail: bytes) -> None:
    def read(at: int, length: int) -> bytes:
        return head[:length] if at == 0 else tail[-length:] if length else b""

    for length in (size, len(tail), len(head)):
        assert examine(name, length, read).reason
