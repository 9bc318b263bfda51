"""Names that no layout has: when is it retention, and when is it something else?"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retainzfs import lifetimes
from retainzfs.sightings import NAMES_MAX, PROOFS, SERIES_MAX, SIZE_LEAST, Series, Sightings

pytestmark = pytest.mark.pure

LARGE = SIZE_LEAST


class Directory:
    """A directory with numbered names, watched."""

    def __init__(self) -> None:
        self.sightings = Sightings()
        self.names: list[bytes] = []
        self.now = 0.0

    def make(self, name: bytes) -> None:
        self.now += 10
        self.names.append(name)
        self.sightings.came(7, name, self.now)

    def remove(self, name: bytes, size: int = LARGE) -> Series | None:
        proved = self.sightings.went(7, name, self.names, size)
        self.names.remove(name)
        return proved


def rotation(size: int = LARGE, keep: int = 3) -> list[Series | None]:
    directory = Directory()
    found = []
    for number in range(1, 10):
        directory.make(b"zork_%d.dat" % number)
        if number > keep:
            found.append(directory.remove(b"zork_%d.dat" % (number - keep), size))
    return found


def test_rotation_is_seen_after_two_deletions() -> None:
    first, second, *_ = rotation()
    assert first is None
    assert second is not None
    assert set(second.lives) == {3}
    assert second.births == [10.0 * number for number in range(1, 10)]


def test_small_files_are_nobodys_checkpoints() -> None:
    assert rotation(size=LARGE - 1) == [None] * 6


def test_removing_a_data_set_is_no_rotation() -> None:
    directory = Directory()
    for number in range(100):
        directory.make(b"part-%05d.bin" % number)
    assert [directory.remove(b"part-%05d.bin" % n) for n in range(100)] == [None] * 100


def test_replacing_the_newest_is_no_rotation() -> None:
    directory = Directory()
    for number in range(100):
        directory.make(b"log.%d" % number)
        assert directory.remove(b"log.%d" % number) is None


def test_directories_weigh_what_was_in_them() -> None:
    directory = Directory()
    proofs = []
    for number in range(1, 5):
        directory.make(b"zork_%d" % number)
        if number > 1:
            old = b"zork_%d" % (number - 1)
            directory.sightings.emptied(7, old, LARGE // 2)
            directory.sightings.emptied(7, old, LARGE // 2)
            proofs.append(directory.remove(old, size=0) is not None)
    assert proofs == [False, True, True]


def test_a_huge_directory_is_left_alone() -> None:
    directory = Directory()
    directory.names = [b"f-%d" % n for n in range(1000, 1000 + NAMES_MAX)]
    for number in range(1, 9):
        directory.make(b"zork_%d" % number)
        if number > 1:
            assert directory.remove(b"zork_%d" % (number - 1)) is None


def test_memory_is_bounded() -> None:
    sightings = Sightings()
    for number in range(2 * SERIES_MAX):
        sightings.came(number, b"zork_1", 1.0)
        sightings.emptied(number, b"zork_1", 5)
    assert len(sightings._series) == SERIES_MAX
    assert len(sightings._weights) <= SERIES_MAX


@given(st.lists(st.binary(min_size=1, max_size=12), max_size=30), st.randoms())
def test_no_name_upsets_it(names: list[bytes], rng: object) -> None:
    directory = Directory()
    for name in names:
        directory.make(name)
    for name in list(directory.names):
        directory.remove(name)


# Series


@pytest.mark.parametrize(
    ("name", "series", "number"),
    [
        (b"zork_17", b"zork_#", 17),
        (b"7", b"#", 7),
        (b"0007", b"#", 7),
        (b"v2-step9.bin", b"v2-step#.bin", 9),
        (b"none", None, 0),
        (b"last-3.ckpt", None, 0),
        (b"zork_17.tmp", None, 0),
        (b"zork_" + b"9" * 40, None, 0),
    ],
)
def test_series(name: bytes, series: bytes | None, number: int) -> None:
    assert lifetimes.series_of(name) == series
    if series is not None:
        assert lifetimes.number_in(name) == number


@pytest.mark.parametrize(
    ("series", "usual"),
    [
        (b"#", True),
        (b"weights#.pt", True),
        (b"#.npz", True),
        (b"run_#", False),
        (b"shard-#.pt", False),
    ],
)
def test_usual_series(series: bytes, usual: bool) -> None:
    assert lifetimes.usual_series(series) is usual


def test_names_are_asked_for_where_no_layout_has_them() -> None:
    asked: list[tuple[int, bytes]] = []

    def knows(depth: int, series: bytes) -> bool:
        asked.append((depth, series))
        return series == b"zork_#"

    match = lifetimes.recognise([b"run", b"zork_5", b"data_2"], knows)
    assert match is not None
    assert (match.depth, match.number, match.series) == (1, 5, b"zork_#")
    assert match.is_directory
    assert asked == [(1, b"zork_#")]
    assert lifetimes.recognise([b"zork_5.dat"], lambda depth, series: False) is None
    usual = lifetimes.recognise([b"zork_5", b"step-7"], knows)
    assert usual is not None
    assert usual.number == 7, "a usual name goes first"


def test_proofs_are_more_than_one() -> None:
    assert PROOFS > 1
