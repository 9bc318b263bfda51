"""Records that contradict the rest of a volume, and values that nobody means.

Each of `CONTRADICTIONS` takes the state of a sound volume and returns records that could end its
log; those in `REFUSED` leave no tree that could be served.
"""

from __future__ import annotations

import math
import random
import stat
import struct
from collections.abc import Callable, Sequence
from typing import Any

from retainzfs import layout
from retainzfs.inodes import Inode
from retainzfs.layout import BatchHeader, Record, Superblock
from retainzfs.namespace import ROOT, Namespace

INTEGERS = (
    0, 1, 2, 3, 5, 15, 16, 17, 19, 255, 256, 1015, 1016, 1017, 4095, 4096, 65535, 1 << 20,
    1 << 30, (1 << 31) + 1, (1 << 32) - 1, 1 << 32, 1 << 46, 1 << 48, (1 << 52) - 1, 1 << 52,
    1 << 60, (1 << 63) - 1, 1 << 63, (1 << 64) - 4096, (1 << 64) - 2, (1 << 64) - 1, -1, -2, 100,
    -(1 << 63),
)  # fmt: skip
FLOATS = (math.nan, math.inf, -math.inf, -1.0, 0.0, 1e308, -1e308, 1e-300, 2.0**53)
NAMES = (
    b"", b".", b"..", b"/", b"a/b", b"\0", b"a\0b", b".retainz", b"\xff\xfe", b"\n\x1b[31m",
    b"n" * 255, b"f0", b"user.retainz.keep_last", b"user.retainz.\xff", b"x" * 4096, b"y" * 70_000,
)  # fmt: skip
MODES = tuple(kind | 0o644 for kind in (
    0, stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK, stat.S_IFIFO, stat.S_IFBLK, stat.S_IFSOCK, 0o30000,
    0o170000, 1 << 31,
))  # fmt: skip


class Unfit(Exception):
    """The changed log cannot be written; there is no such image."""


def absurd(old: Any, name: str, rng: random.Random) -> Any:
    """Return the tuple with one field that fits its place on the medium, and hardly the rest."""
    value = getattr(old, name)
    choices: Sequence[object]
    if isinstance(value, float):
        choices = FLOATS
    elif isinstance(value, bytes):
        choices = (*NAMES, value + b"\0", value[:-1])
    elif name == "mode":
        choices = MODES
    else:
        choices = (*INTEGERS, value + 1, value - 1, value ^ 1 << rng.randrange(64))
    for new in rng.sample(choices, len(choices)):
        changed = old._replace(**{name: new})
        try:
            if isinstance(old, Superblock):
                changed.encode()
            elif isinstance(old, BatchHeader):
                layout._BATCH.pack(layout.BATCH_MAGIC, *changed)
            else:
                layout.encode(changed)
        except struct.error:
            continue
        return changed
    raise Unfit(f"nothing fits into {name}")


Contradiction = Callable[[Namespace, random.Random], list[Record]]
CONTRADICTIONS: dict[str, Contradiction] = {}
REFUSED: set[str] = set()


def contradiction(function: Contradiction) -> Contradiction:
    CONTRADICTIONS[function.__name__] = function
    return function


def refused(function: Contradiction) -> Contradiction:
    REFUSED.add(function.__name__)
    return contradiction(function)


def _files(namespace: Namespace) -> list[Inode]:
    return [inode for inode in namespace.inodes.values() if inode.is_file]


def _directories(namespace: Namespace) -> list[Inode]:
    return [i for i in namespace.inodes.values() if i.is_dir and i.ino != ROOT]


def _stored(namespace: Namespace, rng: random.Random) -> layout.MapRecord:
    """Return what maps blocks of a file, to be bent."""
    inode = rng.choice([inode for inode in _files(namespace) if inode.extents])
    e = rng.choice(inode.extents)
    r = e.run
    return layout.MapRecord(
        inode.ino, e.block, e.blocks, e.first, r.zone, r.epoch, r.start, r.length, r.sums
    )


def _made(namespace: Namespace, ino: int, name: bytes, **fields: int) -> list[Record]:
    """Return the records of a new, right file in the root."""
    root = namespace.describe(namespace.get(ROOT))
    made = root._replace(ino=ino, mode=stat.S_IFREG | 0o644, nlink=1, parent=ROOT)
    return [made._replace(**fields), layout.LinkRecord(ROOT, name, ino)]


@refused
def parents_in_a_circle(namespace: Namespace, rng: random.Random) -> list[Record]:
    one, other = rng.sample(_directories(namespace), 2)
    return [
        namespace.describe(one)._replace(parent=other.ino),
        namespace.describe(other)._replace(parent=one.ino),
    ]


@refused
def directories_in_each_other(namespace: Namespace, rng: random.Random) -> list[Record]:
    """A circle whose names, parents and link counts all agree, beside the root's tree."""
    one, other = namespace.next_ino, namespace.next_ino + 1
    made = namespace.describe(namespace.get(ROOT))._replace(nlink=3)
    return [
        made._replace(ino=one, parent=other),
        made._replace(ino=other, parent=one),
        layout.LinkRecord(one, b"other", other),
        layout.LinkRecord(other, b"one", one),
    ]


@refused
def files_in_each_other(namespace: Namespace, rng: random.Random) -> list[Record]:
    one, other = rng.sample(_files(namespace), 2)
    return [
        namespace.describe(one)._replace(parent=other.ino),
        namespace.describe(other)._replace(parent=one.ino),
    ]


@refused
def its_own_parent(namespace: Namespace, rng: random.Random) -> list[Record]:
    inode = rng.choice([i for i in namespace.inodes.values() if i.ino != ROOT])
    return [namespace.describe(inode)._replace(parent=inode.ino)]


@refused
def an_orphan_in_a_circle(namespace: Namespace, rng: random.Random) -> list[Record]:
    ino = namespace.next_ino
    made = namespace.describe(namespace.get(ROOT))
    return [made._replace(ino=ino, parent=ino, nlink=0)]


@refused
def the_root_below_itself(namespace: Namespace, rng: random.Random) -> list[Record]:
    root = namespace.get(ROOT)
    directory = rng.choice(_directories(namespace))
    return [
        layout.LinkRecord(directory.ino, b"root", ROOT),
        namespace.describe(directory)._replace(nlink=directory.nlink + 1),
        namespace.describe(root)._replace(parent=rng.choice((ROOT, directory.ino))),
    ]


@refused
def a_second_parent(namespace: Namespace, rng: random.Random) -> list[Record]:
    """A directory in two directories, counted in both."""
    one, other = rng.sample(_directories(namespace), 2)
    return [
        layout.LinkRecord(other.ino, b"again", one.ino),
        namespace.describe(other)._replace(nlink=other.nlink + 1),
    ]


@refused
def the_root_is_gone(namespace: Namespace, rng: random.Random) -> list[Record]:
    root = namespace.describe(namespace.get(ROOT))
    changes: list[Record] = [
        layout.FreeRecord(ROOT),
        root._replace(nlink=0),
        root._replace(mode=stat.S_IFREG | 0o644),
        root._replace(parent=2),
    ]
    return [rng.choice(changes)]


@refused
def no_links_and_a_name(namespace: Namespace, rng: random.Random) -> list[Record]:
    inode = rng.choice([i for i in namespace.inodes.values() if i.ino != ROOT])
    return [namespace.describe(inode)._replace(nlink=0)]


@refused
def an_orphan_with_a_child(namespace: Namespace, rng: random.Random) -> list[Record]:
    ino = namespace.next_ino
    made = namespace.describe(namespace.get(ROOT))
    return [
        made._replace(ino=ino, nlink=0),
        *_made(namespace, ino + 1, b"child", parent=ino)[:1],
        layout.LinkRecord(ino, b"child", ino + 1),
    ]


@refused
def a_freed_directory(namespace: Namespace, rng: random.Random) -> list[Record]:
    directory = rng.choice(_directories(namespace))
    parent = namespace.get(directory.parent)
    name = next(n for n, i in (parent.entries or {}).items() if i == directory.ino)
    return [
        layout.FreeRecord(directory.ino),
        layout.UnlinkRecord(parent.ino, name),
        namespace.describe(parent)._replace(nlink=parent.nlink - 1),
    ]


@contradiction
def another_type(namespace: Namespace, rng: random.Random) -> list[Record]:
    inode = rng.choice([i for i in namespace.inodes.values() if i.ino != ROOT])
    return [namespace.describe(inode)._replace(mode=rng.choice(MODES))]


@contradiction
def a_strange_type(namespace: Namespace, rng: random.Random) -> list[Record]:
    return _made(namespace, namespace.next_ino, b"strange", mode=rng.choice(MODES))


@contradiction
def a_strange_name(namespace: Namespace, rng: random.Random) -> list[Record]:
    name = rng.choice([n for n in NAMES if len(n) < 256])
    return _made(namespace, namespace.next_ino, name)


@contradiction
def a_strange_number(namespace: Namespace, rng: random.Random) -> list[Record]:
    return _made(namespace, rng.choice([n for n in INTEGERS if 0 <= n < 1 << 64]), b"number")


@contradiction
def numbers_used_up(namespace: Namespace, rng: random.Random) -> list[Record]:
    last = (1 << 64) - 1
    return [
        layout.CountersRecord(*(rng.choice((last, 1 << 63, 1 << 48, 1 << 46, 1)) for _ in range(3)))
    ]


@contradiction
def strange_times_and_owners(namespace: Namespace, rng: random.Random) -> list[Record]:
    times = {n: rng.choice((-(1 << 63), (1 << 63) - 1)) for n in ("atime_ns", "mtime_ns")}
    ids = dict.fromkeys(("uid", "gid"), (1 << 32) - 1)
    last = (1 << 64) - 1
    return _made(namespace, namespace.next_ino, b"f", **times, **ids, rdev=last, generation=last)


@contradiction
def a_strange_size(namespace: Namespace, rng: random.Random) -> list[Record]:
    inode = rng.choice(list(namespace.inodes.values()))
    size = rng.choice((1 << 40, 1 << 59, 1 << 60, (1 << 63) - 1, 1 << 63, (1 << 64) - 1))
    return [layout.SizeRecord(inode.ino, size)]


@contradiction
def a_long_link(namespace: Namespace, rng: random.Random) -> list[Record]:
    ino = namespace.next_ino
    return [
        *_made(namespace, ino, b"long", mode=stat.S_IFLNK | 0o777),
        layout.ContentRecord(ino, b"t" * rng.choice((0, 1, 4095, 4096, 65535))),
        layout.SizeRecord(ino, rng.choice((0, 1, 4095, 4096, 1 << 40, 1 << 59))),
    ]


@contradiction
def long_content(namespace: Namespace, rng: random.Random) -> list[Record]:
    inode = rng.choice(list(namespace.inodes.values()))
    return [layout.ContentRecord(inode.ino, b"c" * rng.choice((1, 256, 257, 5000, 65535)))]


@contradiction
def extents_far_away(namespace: Namespace, rng: random.Random) -> list[Record]:
    record = _stored(namespace, rng)
    block = rng.choice((1 << 31, 1 << 47, 1 << 48, 1 << 52, 1 << 62, (1 << 64) - 1))
    return [record._replace(block=block), layout.SizeRecord(record.ino, 1 << 60)]


@contradiction
def a_run_in_a_wrong_place(namespace: Namespace, rng: random.Random) -> list[Record]:
    """In the metadata, behind the last zone, above a write pointer, of another epoch."""
    record = _stored(namespace, rng)
    changes: list[dict[str, Any]] = [
        {"zone": rng.choice((0, 1, 3, 23, 24, 1 << 31, (1 << 32) - 1))},
        {"start": rng.choice((1, 63, 64, 1 << 31, (1 << 32) - 1))},
        {"epoch": rng.choice((1, 2, 1 << 31, (1 << 32) - 1))},
    ]
    return [record._replace(**rng.choice(changes))]


@contradiction
def runs_over_each_other(namespace: Namespace, rng: random.Random) -> list[Record]:
    """Many runs at every block of a zone: more bytes live in it than it can hold."""
    record = _stored(namespace, rng)
    taken = {start for _, start in namespace.runs[record.zone]}
    out: list[Record] = []
    for start in sorted(set(range(24)) - taken):
        run = record._replace(start=start, length=10, sums=bytes(40), first=0, blocks=10)
        out.append(run._replace(block=100 + start * 10))
    return [*out, layout.SizeRecord(record.ino, 1 << 20)]


@contradiction
def blocks_held_by_many(namespace: Namespace, rng: random.Random) -> list[Record]:
    record = _stored(namespace, rng)
    far = [record._replace(block=1000 + i * record.blocks) for i in range(200)]
    return [*far, layout.SizeRecord(record.ino, 1 << 30)]


@refused
def bytes_of_no_file(namespace: Namespace, rng: random.Random) -> list[Record]:
    others = [inode for inode in namespace.inodes.values() if not inode.is_file]
    return [_stored(namespace, rng)._replace(ino=rng.choice(others).ino)]


@contradiction
def a_zone_reset_often(namespace: Namespace, rng: random.Random) -> list[Record]:
    zones = (0, 5, 6, 23, 24, 1 << 31, (1 << 32) - 1)
    return [layout.ZoneRecord(rng.choice(zones), rng.choice((9, 1 << 30, (1 << 32) - 1)))]


@contradiction
def a_strange_attribute(namespace: Namespace, rng: random.Random) -> list[Record]:
    inode = rng.choice(list(namespace.inodes.values()))
    name = rng.choice([n for n in NAMES if len(n) < 256])
    return [layout.XattrRecord(inode.ino, name, rng.choice(NAMES))]


@contradiction
def a_strange_generation(namespace: Namespace, rng: random.Random) -> list[Record]:
    record = rng.choice(list(namespace.generations.values()))
    for _ in range(rng.choice((1, 2, 4))):
        record = absurd(record, rng.choice(record._fields), rng)
    return [record]


@contradiction
def generations_of_nothing(namespace: Namespace, rng: random.Random) -> list[Record]:
    """Generations with one number, of streams that are files, or nothing, or gone."""
    record = rng.choice(list(namespace.generations.values()))
    streams = (0, ROOT, record.stream, 1 << 40, rng.choice(_files(namespace)).ino)
    out: list[Record] = []
    for i in range(8):
        state = rng.choice((0, 1, 2, 3))
        made = record._replace(generation=1000 + i, stream=rng.choice(streams), state=state)
        out.append(made._replace(committed=1e308 * rng.random(), order=i))
    member = namespace.describe(rng.choice(_files(namespace)))
    return [*out, member._replace(generation=1003)]


@contradiction
def a_deep_tree(namespace: Namespace, rng: random.Random) -> list[Record]:
    depth = rng.choice((200, 1200))
    ino = namespace.next_ino
    root = namespace.describe(namespace.get(ROOT))
    out: list[Record] = [root._replace(nlink=root.nlink + 1)]
    for i in range(depth):
        links = 2 + (i < depth - 1)
        out.append(root._replace(ino=ino + i, parent=ino + i - 1 if i else ROOT, nlink=links))
        out.append(layout.LinkRecord(ino + i - 1 if i else ROOT, b"deep", ino + i))
    return out
