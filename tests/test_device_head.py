"""The head of an image: its codec, and images that are damaged, foreign or of another version."""

import os
from pathlib import Path

import pytest

from retainzfs.device import BLOCK, Condition, Geometry, open_target
from retainzfs.device.head import (
    ALIGNMENT,
    STATES,
    Header,
    HeadError,
    NewerHeadError,
    StatePage,
    base_of,
    decode_header,
    decode_page,
    encode_header,
)
from retainzfs.device.rules import ZoneState
from retainzfs.errors import Damaged, ForeignTarget, NewerFormat
from tests.device_backends import GEOMETRY, MIB, bytes_of, flip, formatted, patch, pointers

pytestmark = pytest.mark.volume

ZONE = GEOMETRY.zone_size


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A formatted image that is not open."""
    path = tmp_path / "image"
    formatted(path).close()
    return path


@pytest.mark.parametrize("content", [b"", b"hello\n" * 10, b"\0" * 3 * BLOCK, b"x" * MIB])
def test_foreign(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(ForeignTarget, match="not a retainzfs target"):
        open_target(str(path))
    assert path.read_bytes() == content


def test_truncated(image: Path) -> None:
    os.truncate(image, 3 * MIB)
    with pytest.raises(Damaged, match=f"it has {3 * MIB} bytes, but was formatted with {5 * MIB}"):
        open_target(str(image))
    assert image.stat().st_size == 3 * MIB


@pytest.mark.parametrize("size", [100, BLOCK, BLOCK + 100, 2 * BLOCK, 3 * BLOCK])
def test_truncated_in_the_head(image: Path, size: int) -> None:
    os.truncate(image, size)
    with pytest.raises((Damaged, ForeignTarget)):
        open_target(str(image))


def test_one_bad_header_is_survived_and_two_are_not(image: Path) -> None:
    flip(image, 20)
    assert pointers(image) == [0] * 16
    flip(image, BLOCK + 20)
    with pytest.raises(Damaged, match="both copies of the header: checksum mismatch"):
        open_target(str(image))


def header_of(image: Path) -> Header:
    return decode_header(image.read_bytes()[:BLOCK])


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"version": 2}, "format version 2, this one knows 1"),
        ({"incompatible": 4}, "unknown format flags 0x4"),
    ],
)
def test_newer_format(image: Path, change: dict[str, int], text: str) -> None:
    old = header_of(image)
    fields = {name: getattr(old, name) for name in Header.__slots__} | change
    patch(image, 0, encode_header(Header(**fields)) * 2)
    before = bytes_of(image)
    with pytest.raises(NewerFormat, match=text):
        open_target(str(image))
    assert bytes_of(image) == before


def test_unknown_compatible_flags_are_ignored(image: Path) -> None:
    old = header_of(image)
    newer = Header(old.uuid, old.base, old.geometry, compatible=0x80)
    patch(image, 0, encode_header(newer) * 2)
    assert pointers(image) == [0] * 16


class TestHead:
    """The codec alone."""

    geometry = Geometry(ZONE, ZONE, STATES + 1, 4, 6)
    header = Header(b"u" * 16, base_of(STATES + 1), geometry)

    def test_header_round_trip(self) -> None:
        assert decode_header(encode_header(self.header)) == self.header
        assert self.header.pages == 2

    @pytest.mark.parametrize(
        "geometry",
        [
            Geometry(ZONE, ZONE, 0, 4, 6),
            Geometry(ZONE, ZONE + BLOCK, 16, 4, 6),
            Geometry(ZONE, 0, 16, 4, 6),
            Geometry(ZONE + 1, ZONE, 16, 4, 6),
            Geometry(ZONE, ZONE - 1, 16, 4, 6),
            Geometry(BLOCK, BLOCK, 16, 4, 6),
            Geometry(ZONE, ZONE, 15, 4, 6),
            Geometry(ZONE, ZONE, 16, 1, 6),
            Geometry(ZONE, ZONE, 16, 4, 5),
            Geometry(ZONE, ZONE, 1 << 20, 4, 6),  # more pages than fit before the base
        ],
    )
    def test_impossible_geometry(self, geometry: Geometry) -> None:
        with pytest.raises(HeadError):
            decode_header(encode_header(Header(b"u" * 16, ALIGNMENT, geometry)))

    def test_newer_is_told_before_its_geometry_is_judged(self) -> None:
        header = Header(b"u" * 16, 0, self.geometry, version=9)
        with pytest.raises(NewerHeadError):
            decode_header(encode_header(header))

    def test_page_round_trip(self) -> None:
        page = StatePage(self.header, 1, sequence=7, copy=0)
        page.put(STATES, ZoneState(Condition.CLOSED, 3 * BLOCK, 11))
        assert page.next_offset == (2 + 2 + 1) * BLOCK
        block = bytes(memoryview(page.seal()))
        assert decode_page(self.header, 1, block) == (
            8,
            [ZoneState(Condition.CLOSED, 3 * BLOCK, 11)],
        )
        page.written()
        assert (page.sequence, page.next_offset) == (8, (2 + 1) * BLOCK)

    @pytest.mark.parametrize(
        ("state", "text"),
        [
            (ZoneState(Condition.FULL, 100), "write pointer at 100"),
            (ZoneState(Condition.EMPTY, BLOCK), f"write pointer at {BLOCK}"),
            (ZoneState(Condition.FULL, 0, (1 << 32) - 1), "reset 4294967295 times"),
            (ZoneState(Condition.FULL, ZONE + BLOCK), f"write pointer at {ZONE + BLOCK}"),
            (ZoneState(Condition.NOT_WP), "condition 0"),
        ],
    )
    def test_impossible_states(self, state: ZoneState, text: str) -> None:
        page = StatePage(self.header, 1)
        page.put(STATES, state)
        with pytest.raises(HeadError, match=text):
            decode_page(self.header, 1, bytes(memoryview(page.seal())))

    def test_a_page_of_another_device_or_place(self) -> None:
        page = StatePage(self.header, 1)
        page.put(STATES, ZoneState())
        block = bytes(memoryview(page.seal()))
        other = Header(b"v" * 16, self.header.base, self.geometry)
        for header, index in ((self.header, 0), (other, 1)):
            with pytest.raises(HeadError, match="belongs elsewhere"):
                decode_page(header, index, block)
