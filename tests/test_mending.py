"""Contradictions of a namespace are put right, whatever they are, and no file goes away."""

from __future__ import annotations

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retainzfs import layout
from retainzfs.consistency import check
from retainzfs.mending import Mender, Problem
from retainzfs.namespace import ROOT, Namespace

pytestmark = pytest.mark.pure

DIRECTORY, FILE = 0o040755, 0o100644


def inode(
    ino: int, mode: int, nlink: int, parent: int = ROOT, generation: int = 0
) -> layout.Record:
    return layout.InodeRecord(ino, mode, 0, 0, nlink, 0, 1, 1, 1, generation, parent)


def namespace(*records: layout.Record) -> Namespace:
    made = Namespace("test")
    for record in records:
        made.apply(record)
    return made


def sound() -> list[layout.Record]:
    """Return /d, /d/f with two names, /g."""
    return [
        inode(ROOT, DIRECTORY, 3),
        inode(2, DIRECTORY, 2),
        inode(3, FILE, 2, parent=2),
        inode(4, FILE, 1),
        layout.LinkRecord(ROOT, b"d", 2),
        layout.LinkRecord(2, b"f", 3),
        layout.LinkRecord(ROOT, b"f", 3),
        layout.LinkRecord(ROOT, b"g", 4),
        layout.ContentRecord(4, b"bytes"),
        layout.SizeRecord(4, 5),
    ]


def test_what_is_sound_stays_as_it_is() -> None:
    mender = Mender(namespace(*sound()), 0)
    assert (mender.problems, mender.records) == ([], [])


@pytest.mark.parametrize(
    ("records", "problems"),
    [
        ([inode(4, FILE, 7)], [Problem("/g: counts 7 links and has 1", "count anew")]),
        ([inode(2, DIRECTORY, 5)], [Problem("/d: counts 5 links and has 2", "count anew")]),
        ([inode(3, FILE, 0)], [Problem("/f: counts 0 links and has 2", "count anew")]),
        (
            [layout.LinkRecord(2, b"nothing", 99)],
            [Problem("/d: name 'nothing' leads to no inode", "remove the name")],
        ),
        (
            [layout.UnlinkRecord(ROOT, b"g")],
            [Problem("inode 4: nothing leads to it", "name it /lost+found/#4")],
        ),
        (
            [layout.UnlinkRecord(ROOT, b"d"), inode(ROOT, DIRECTORY, 2)],
            [Problem("inode 2: nothing leads to it", "name it /lost+found/#2")],
        ),
        (
            [layout.LinkRecord(2, b"again", 2)],
            [Problem("/d: name 'again' is a second one of a directory", "remove the name")],
        ),
        (
            [inode(4, FILE, 1, generation=8)],
            [Problem("/g: belongs to generation 8, which does not exist", "let it belong to none")],
        ),
        (
            [inode(2, DIRECTORY, 2, parent=77)],
            [Problem("/: name 'd' leads to a directory elsewhere", "let it lead there")],
        ),
    ],
)
def test_each_contradiction(records: list[layout.Record], problems: list[Problem]) -> None:
    broken = namespace(*sound(), *records)
    mender = Mender(broken, 5)
    assert mender.problems == problems
    assert list(check(broken)) == []
    again = namespace(*sound(), *records, *mender.records)
    assert list(check(again)) == [], "its records do what it did"
    if 4 in again.directory(ROOT).values():
        assert again.inodes[4].content == b"bytes"


def test_a_lost_root_is_made_anew_and_everything_is_found_below_it() -> None:
    broken = namespace(*sound())
    del broken.inodes[ROOT]
    mender = Mender(broken, 5)
    assert mender.problems[0] == Problem("there is no root directory", "make an empty one")
    assert list(check(broken)) == []
    lost = broken.inodes[broken.directory(ROOT)[b"lost+found"]]
    assert lost.mode == 0o040700
    assert {broken.path(ino) for ino in (2, 3, 4)} == {
        "/lost+found/#2",
        "/lost+found/#2/f",
        "/lost+found/#4",
    }


def test_a_name_that_is_taken_is_not_overwritten() -> None:
    broken = namespace(
        *sound(), inode(5, FILE, 1), layout.LinkRecord(ROOT, b"lost+found", 5), inode(6, FILE, 1)
    )
    Mender(broken, 5)
    assert broken.path(5) == "/lost+found"
    assert broken.path(6) == "/lost+found+/#6"


INODES = st.integers(2, 9)
CONTRADICTIONS = st.lists(
    st.one_of(
        st.builds(inode, INODES, st.just(FILE), st.integers(0, 3), st.integers(0, 12)),
        st.builds(layout.LinkRecord, INODES | st.just(ROOT), st.sampled_from([b"a", b"b"]),
                  st.integers(1, 12)),
        st.builds(layout.FreeRecord, INODES | st.just(ROOT)),
    ),
    max_size=30,
)  # fmt: skip


@given(st.sets(INODES), CONTRADICTIONS)
def test_any_namespace_is_put_right_and_keeps_its_files(
    directories: set[int], records: list[layout.Record]
) -> None:
    broken = Namespace("test")
    broken.lenient = True
    broken.apply(inode(ROOT, DIRECTORY, 2))
    for ino in range(2, 10):
        broken.apply(inode(ino, DIRECTORY if ino in directories else FILE, 1, parent=ino - 1))
    for record in records:
        if isinstance(record, layout.InodeRecord) and record.ino in directories:
            record = record._replace(mode=DIRECTORY)  # noqa: PLW2901
        if isinstance(record, layout.LinkRecord):
            parent = broken.inodes.get(record.parent)
            if parent is None or not parent.is_dir:
                continue
        broken.apply(record)
    broken.lenient = False
    before = copy.deepcopy(broken)
    mender = Mender(broken, 5)
    assert list(check(broken)) == []
    named = {ino for one in before.inodes.values() for ino in (one.entries or {}).values()}
    for ino, one in before.inodes.items():
        kept = broken.inodes[ino]
        assert (kept.size, kept.content, kept.extents) == (one.size, one.content, one.extents)
        if one.nlink or ino in named:
            assert kept.nlink, "nothing that had a name or a count is freed by the next mount"
    for record in mender.records:
        before.apply(record)
    assert list(check(before)) == []
    assert Mender(broken, 5).problems == []
