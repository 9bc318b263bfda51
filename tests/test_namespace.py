"""Extents against plain arrays: who holds which block, and what the journal would bring back."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retainzfs import consistency, layout
from retainzfs.inodes import Spans
from retainzfs.layout import BLOCK
from retainzfs.namespace import ROOT, Extent, FSError, Inode, Namespace, Run

pytestmark = pytest.mark.pure

BLOCKS = 24  # of a file; small, so that extents meet
Cell = tuple[int, int] | None  # (run's start in its zone, block in the run)
FILE = 0o100644
DIRECTORY = 0o040755


def inode_record(ino: int, mode: int = FILE, nlink: int = 1) -> layout.InodeRecord:
    return layout.InodeRecord(ino, mode, 0, 0, nlink, 0, 0, 0, 0, 0, ROOT)


class Counts:
    """A ledger that only adds up."""

    def __init__(self) -> None:
        self.live: dict[int, int] = {}

    def gain(self, inode: Inode, run: Run, count: int) -> None:
        self.live[run.start] = self.live.get(run.start, 0) + count

    def lose(self, inode: Inode, run: Run, count: int) -> None:
        self.live[run.start] -= count

    def regroup(self, inode: Inode, generation: int) -> None:
        raise AssertionError("no generation changes here")


class Machine:
    """One file of a namespace, and the arrays that it must equal."""

    def __init__(self) -> None:
        self.namespace = Namespace("test")
        self.counts = self.namespace.ledger = Counts()
        self.namespace.apply(inode_record(2))
        self.inode = self.namespace.get(2)
        self.now: list[Cell] = [None] * BLOCKS
        self.logged: list[Cell] = [None] * BLOCKS
        self.size = 0
        self.start = 0

    def write(self, block: int, count: int) -> None:
        """Map fresh blocks as the stream does: the journal does not know them yet."""
        count = min(count, BLOCKS - block)
        run = self.namespace.run(5, 1, self.start, 30, b"sums")
        self.namespace.map(self.inode, Extent(block, count, run, 3), keep=True)
        self.inode.dirty.add(block, block + count)
        for i in range(count):
            self.now[block + i] = (self.start, 3 + i)
        self.start += 30
        self.size = max(self.size, (block + count) * BLOCK)
        self.inode.size = self.size

    def cut(self, size: int) -> None:
        """Truncate, known to the journal."""
        self.size = size
        self.namespace.apply(layout.SizeRecord(2, size))
        for cells in (self.now, self.logged):
            for block in range(-(-size // BLOCK), BLOCKS):
                cells[block] = None

    def drop(self, start: int, count: int) -> None:
        """Map the blocks to nothing, as a content record does with block 0."""
        self.namespace.drop(self.inode, start, start + count)
        for block in range(start, min(start + count, BLOCKS)):
            if self.now[block] == self.logged[block]:
                self.logged[block] = None
            self.now[block] = None

    def commit(self) -> None:
        list(self.namespace.collect(self.inode))
        self.logged = list(self.now)

    def check(self) -> None:
        assert cells(self.inode.extents) == self.now
        ends = [(e.block, e.end) for e in self.inode.extents]
        assert ends == sorted(ends), "extents are sorted"
        held: dict[Run, int] = {}
        for extent in (*self.inode.extents, *(self.inode.shadow or ())):
            assert extent.first + extent.blocks <= extent.run.length, "an extent left its run"
            held[extent.run] = held.get(extent.run, 0) + extent.blocks
        for run, blocks in held.items():
            assert run.owners == {2: blocks}
            assert run.held == blocks
        assert {r.start: n for r, n in held.items()} == {
            start: n for start, n in self.counts.live.items() if n
        }
        assert {r.start for r in held} == {r.start for r in self.namespace.runs.get(5, {}).values()}

    def check_known(self) -> None:
        """What a snapshot would hold, read by a new namespace, is what the journal knew."""
        fresh = Namespace("fresh")
        for record in self.namespace.known(self.inode):
            fresh.apply(record)
        assert cells(fresh.get(2).extents) == self.logged
        assert fresh.get(2).size == self.inode.logged_size


def cells(extents: list[Extent]) -> list[Cell]:
    out: list[Cell] = [None] * BLOCKS
    for extent in extents:
        for i in range(extent.blocks):
            assert out[extent.block + i] is None, "two extents hold one block"
            out[extent.block + i] = (extent.run.start, extent.first + i)
    return out


block = st.integers(0, BLOCKS - 1)
count = st.integers(1, BLOCKS)
step = st.one_of(
    st.tuples(st.just("write"), block, count),
    st.tuples(st.just("cut"), st.integers(0, BLOCKS * BLOCK)),
    st.tuples(st.just("commit")),
)


def run_steps(machine: Machine, steps: list[tuple[str, int]]) -> None:
    for name, *arguments in steps:
        operation: Callable[..., None] = getattr(machine, name)
        operation(*arguments)
        machine.check()
        machine.check_known()


@settings(max_examples=200, deadline=None)
@given(st.lists(step, max_size=12))
def test_extents_hold_what_an_array_would(steps: list[tuple[str, int]]) -> None:
    run_steps(Machine(), steps)


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(step, st.tuples(st.just("drop"), block, count)), max_size=12))
def test_dropping_anywhere_keeps_the_accounts(steps: list[tuple[str, int]]) -> None:
    machine = Machine()
    for name, *arguments in steps:
        operation: Callable[..., None] = getattr(machine, name)
        operation(*arguments)
        machine.check()


@given(st.lists(st.tuples(block, block), max_size=8))
def test_merged_spans_hold_the_same_blocks(spans: list[tuple[int, int]]) -> None:
    merged = list(Spans(spans))
    assert {b for s, e in merged for b in range(s, e)} == {b for s, e in spans for b in range(s, e)}
    assert all(a[1] < b[0] for a, b in pairwise(merged))


@given(st.lists(st.tuples(block, block), max_size=8), block, block)
def test_removed_spans_are_gone_and_nothing_else(
    spans: list[tuple[int, int]], start: int, end: int
) -> None:
    left = Spans(spans)
    left.remove(start, end)
    held = {b for s, e in spans for b in range(s, e)} - set(range(start, end))
    assert {b for s, e in left for b in range(s, e)} == held
    assert all(s < e for s, e in left)
    assert all(a[1] < b[0] for a, b in pairwise(left))


KEYS = st.integers(2, 4)
RECORDS = st.one_of(
    st.builds(inode_record, KEYS),
    st.builds(layout.SizeRecord, KEYS, st.integers(0, 6 * BLOCK)),
    st.builds(layout.ContentRecord, KEYS, st.binary(max_size=5)),
    st.builds(
        lambda ino, block, n, start: layout.MapRecord(ino, block, n, 0, 5, 1, start, 4, b""),
        KEYS, st.integers(0, 5), st.integers(1, 4), st.integers(0, 3),
    ),
    st.builds(layout.FreeRecord, KEYS),
    st.builds(layout.XattrRecord, KEYS, st.sampled_from([b"a", b"b"]), st.binary(max_size=2)),
    st.builds(layout.XattrRemovedRecord, KEYS, st.sampled_from([b"a", b"b"])),
    st.builds(layout.LinkRecord, st.just(ROOT), st.sampled_from([b"x", b"y"]), KEYS),
    st.builds(layout.UnlinkRecord, st.just(ROOT), st.sampled_from([b"x", b"y"])),
)  # fmt: skip


def rooted() -> Namespace:
    namespace = Namespace("test")
    namespace.apply(inode_record(ROOT, DIRECTORY, 2))
    return namespace


def valid(candidates: list[layout.Record]) -> tuple[Namespace, list[layout.Record]]:
    """Return what of the records a mounted volume could have logged, and the state behind them."""
    namespace = rooted()
    log: list[layout.Record] = []
    for record in candidates:
        if isinstance(record, layout.InodeRecord) and layout.FreeRecord(record.ino) in log:
            continue  # numbers are never given out again
        try:
            namespace.apply(record)
        except ValueError:
            continue
        log.append(record)
    return namespace, log


def state(namespace: Namespace) -> object:
    return {
        ino: (
            i.size, bytes(i.content[: i.size]), dict(i.xattrs or {}), dict(i.entries or {}),
            [c for n, c in enumerate(cells(i.extents)) if n * BLOCK < i.size],
        )
        for ino, i in namespace.inodes.items()
    }  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.lists(RECORDS, max_size=10), st.data())
def test_a_log_replayed_over_its_own_result_changes_nothing(
    candidates: list[layout.Record], data: st.DataObject
) -> None:
    """A snapshot may be newer than the log that is replayed over it."""
    exact, log = valid([inode_record(2), inode_record(3), *candidates])
    fuzzy = rooted()
    fuzzy.lenient = True
    seen = data.draw(st.integers(0, len(log)))
    for record in (*log[:seen], *log):
        fuzzy.apply(record)
    assert state(fuzzy) == state(exact)


@pytest.mark.parametrize(
    "record",
    [
        layout.SizeRecord(9, 1),
        layout.FreeRecord(9),
        layout.LinkRecord(9, b"a", 2),
        layout.LinkRecord(2, b"a", 2),
        layout.UnlinkRecord(ROOT, b"a"),
        layout.MapRecord(2, 0, 5, 0, 5, 1, 0, 4, b""),
        layout.MapRecord(2, 0, 1, 0, 5, 1, 0, layout.RUN_BLOCKS_MAX + 1, b""),
        layout.MapRecord(ROOT, 0, 1, 0, 5, 1, 0, 1, bytes(4)),
        layout.SizeRecord(ROOT, 1),
        layout.ContentRecord(ROOT, b"a"),
        layout.ContentRecord(2, bytes(layout.INLINE_DATA_MAX + 1)),
        inode_record(2, DIRECTORY),
    ],
)
def test_a_record_that_contradicts_the_state_is_refused(record: layout.Record) -> None:
    namespace = Namespace("test")
    namespace.apply(inode_record(ROOT, DIRECTORY, 2))
    namespace.apply(inode_record(2))
    with pytest.raises(ValueError, match="inode"):
        namespace.apply(record)


def test_paths_and_their_errors() -> None:
    namespace = Namespace("test")
    for record in (
        inode_record(ROOT, DIRECTORY, 3),
        inode_record(2, DIRECTORY, 2),
        inode_record(3)._replace(parent=2),
        layout.LinkRecord(ROOT, b"d", 2),
        layout.LinkRecord(2, b"f", 3),
    ):
        namespace.apply(record)
    assert namespace.path(ROOT) == "/"
    assert namespace.path(3) == "/d/f"
    assert namespace.below(namespace.get(2), ROOT)
    assert not namespace.below(namespace.get(ROOT), 2)
    with pytest.raises(FSError, match="/d/g: No such file"):
        namespace.child(2, b"g")
    with pytest.raises(FSError, match="Not a directory"):
        namespace.directory(3)
    assert list(consistency.check(namespace)) == []
    namespace.apply(layout.UnlinkRecord(2, b"f"))
    assert list(consistency.check(namespace)) == ["inode 3 counts 1 links and has 0"]
