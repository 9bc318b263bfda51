"""Processes and threads on one small mount while collection moves every file all the time.

The daemon of these tests collects without asking what it gains: each `gc` moves zones at random,
full ones and those that are being written included.
"""

from __future__ import annotations

import ctypes
import faulthandler
import json
import mmap
import os
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

from tests.conftest import PATIENCE_S, Live, living, retainzfs

pytestmark = pytest.mark.fuse

MIB = 1 << 20
PAGE = 4096
ZONE = MIB
IMAGE = 48 * ZONE
MOVES = 3  # relocations of a file that a test waits for
DEADLINE_S = 45.0  # a test takes a few seconds; after that it hangs
THREADS = 16

EAGER = """
import random
from retainzfs.reclaim import Reclaim

async def collect(self):
    async with self.turn:
        await self.committer.commit()
        await self.reset_dead()
        for _ in range(4):
            await self._collect_one()
    return {}

Reclaim._victim = lambda self: random.choice(self.candidates() or [None])
Reclaim.collect = collect
"""


@pytest.fixture(scope="module")
def crowded() -> Iterator[Live]:
    """A small mount with an eager collector, checked and scrubbed when the tests are done."""
    with living(IMAGE, zone_size=ZONE) as live:
        live.mount(patch=EAGER)
        yield live
        live.check()
        live.umount()
        checked = retainzfs("fsck", "--scrub", live.image)
        assert checked.returncode == 0, checked.stdout + checked.stderr


@contextmanager
def watchdog(live: Live) -> Iterator[None]:
    """If the test hangs, tell where everybody stands, and kill the daemon so that it ends."""
    done = threading.Event()
    daemon = live.pid

    def watch() -> None:
        if done.wait(DEADLINE_S):
            return
        faulthandler.dump_traceback(all_threads=True)
        for stack in [*Path("/proc/self/task").glob("*/stack"), Path(f"/proc/{daemon}/stack")]:
            with suppress(OSError):
                sys.stderr.write(f"{stack}:\n{stack.read_text()}")
        os.kill(daemon, 9)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()


class Threads(ExitStack):
    """Threads that run until the block ends; the first error of one of them is raised there."""

    def __init__(self) -> None:
        super().__init__()
        self.stop = threading.Event()
        self.errors: list[BaseException] = []
        self.callback(self._end)

    def loop(self, step: Callable[[random.Random], None], seed: int = 0) -> None:
        def run() -> None:
            rng = random.Random(seed)
            try:
                while not self.stop.is_set():
                    step(rng)
            except BaseException as error:
                self.errors.append(error)
                self.stop.set()

        thread = threading.Thread(target=run)
        thread.start()
        self.callback(thread.join)

    def _end(self) -> None:
        if self.errors:
            raise self.errors[0]

    def __exit__(self, *details: object) -> bool:
        self.stop.set()
        return bool(super().__exit__(*details))  # type: ignore[arg-type]


@pytest.fixture
def busy(crowded: Live) -> Iterator[Threads]:
    """Collection runs, again and again."""
    crowded.check()
    with watchdog(crowded), Threads() as threads:
        threads.loop(lambda rng: os.setxattr(crowded.path, "user.retainz.gc", b"1"))
        yield threads
    crowded.check()
    assert not crowded.complaints(), "the daemon logged errors"


@pytest.fixture
def place(crowded: Live, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A directory for one test, emptied behind it: the device is small."""
    directory = crowded.path / request.node.name.replace("[", "-").strip("]")
    directory.mkdir()
    yield directory
    for path in directory.iterdir():
        path.unlink()


def until_moved(path: Path, threads: Threads) -> None:
    """Return when collection has moved the file a few times. A thread's error ends it too."""
    last, moves = None, 0
    while moves <= MOVES and not threads.stop.is_set():
        extents = json.loads(os.getxattr(path, "user.retainz.extents"))
        moves += extents != last
        last = extents
        time.sleep(0.01)


def process(code: str, *arguments: object) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, *map(str, arguments)])


def noise(length: int) -> bytes:
    return random.Random(length).randbytes(length)


# Its calls hold no lock of Python: threads that fault through them do so at the same time.
libc = ctypes.CDLL(None)
libc.memcmp.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t)
libc.memcpy.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)


def forget_pages(fd: int, mapped: mmap.mmap) -> None:
    """Let the next access fault, and read from the daemon."""
    mapped.madvise(mmap.MADV_DONTNEED)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("flags", [mmap.MAP_SHARED, mmap.MAP_PRIVATE], ids=["shared", "private"])
def test_maps_and_reads_outlive_relocation(place: Path, busy: Threads, flags: int) -> None:
    """Many threads fault one map at random while the file moves."""
    data = noise(3 * MIB + 1000)
    path = place / "file"
    path.write_bytes(data)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0, flags=flags) as mapped:
        where = ctypes.addressof(ctypes.c_char.from_buffer(mapped))

        def fault(rng: random.Random) -> None:
            page = rng.randrange(len(data) // PAGE)
            expected = data[page * PAGE : (page + 1) * PAGE]
            assert libc.memcmp(where + page * PAGE, expected, PAGE) == 0, f"page {page} differs"

        def forget(rng: random.Random) -> None:
            forget_pages(file.fileno(), mapped)
            time.sleep(0.005)

        def read(rng: random.Random) -> None:
            at = rng.randrange(len(data))
            assert os.pread(file.fileno(), 300_000, at) == data[at : at + 300_000]

        with Threads() as threads:
            for number in range(THREADS):
                threads.loop(fault, number)
            threads.loop(forget)
            threads.loop(read)
            until_moved(path, threads)
    assert path.read_bytes() == data


WRITER = """
import os, sys, mmap
path, told, pages, versions = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
fd = os.open(path, os.O_WRONLY)
with open(told, "r+b") as file, mmap.mmap(file.fileno(), 0) as shared:
    for version in range(1, versions):
        shared[0] = version  # begun
        for page in range(0, pages, 16):
            data = bytes([version]) * 4096 * 16
            assert os.pwrite(fd, data, page * 4096) == len(data)
        if version % 4 == 0:
            os.fsync(fd)
        shared[1] = version  # ended
os.close(fd)
"""


def test_a_map_shows_old_or_new_pages_while_another_process_writes(
    place: Path, busy: Threads, tmp_path: Path
) -> None:
    pages, versions = 256, 24
    path, told = place / "file", tmp_path / "told"
    path.write_bytes(bytes(pages * PAGE))
    told.write_bytes(bytes(2))
    with (
        path.open("r+b") as file,
        mmap.mmap(file.fileno(), 0) as mapped,
        told.open("r+b") as state,
        mmap.mmap(state.fileno(), 0) as progress,
        Threads() as threads,
    ):
        where = ctypes.addressof(ctypes.c_char.from_buffer(mapped))

        def fault(rng: random.Random) -> None:
            page, ended = rng.randrange(pages), progress[1]
            copy = ctypes.create_string_buffer(PAGE)
            libc.memcpy(copy, where + page * PAGE, PAGE)
            begun = progress[0]
            wrong = set(copy.raw) - set(range(ended, begun + 1))
            assert not wrong, f"page {page} holds {wrong}, of {ended} to {begun}"

        for number in range(THREADS):
            threads.loop(fault, number)
        writer = process(WRITER, path, told, pages, versions)
        assert writer.wait(DEADLINE_S) == 0
        until_moved(path, threads)
        assert mapped[:] == bytes([versions - 1]) * (pages * PAGE)
    assert path.read_bytes() == bytes([versions - 1]) * (pages * PAGE)


APPENDER = """
import os, sys, random
path, letter = sys.argv[1], sys.argv[2].encode()
rng = random.Random(letter)
fd = os.open(path, os.O_WRONLY | os.O_APPEND)
for number in range(120):
    body = letter * rng.choice((1, 80, 5000, 30_000))
    line = b"%d %d " % (number, len(body)) + body + b"\\n"
    assert os.write(fd, line) == len(line)
    if number % 10 == 0:
        os.fsync(fd)
os.close(fd)
"""


def test_appends_of_two_processes_neither_tear_nor_vanish(place: Path, busy: Threads) -> None:
    path = place / "log"
    path.touch()
    running = [process(APPENDER, path, letter) for letter in "ab"]
    assert [one.wait(DEADLINE_S) for one in running] == [0, 0]
    numbers: dict[bytes, list[int]] = {b"a": [], b"b": []}
    for line in path.read_bytes().splitlines():
        number, length, body = line.split(b" ")
        assert body == body[:1] * int(length), "an appended record is torn"
        numbers[body[:1]].append(int(number))
    assert numbers == {b"a": list(range(120)), b"b": list(range(120))}


def test_a_map_is_written_back_while_its_file_moves(place: Path, busy: Threads) -> None:
    expected = bytearray(noise(2 * MIB))
    path = place / "memmap"
    path.write_bytes(expected)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:

        def change(rng: random.Random) -> None:
            for _ in range(20):
                at = rng.randrange(len(expected) - 100)
                new = rng.randbytes(100)
                mapped[at : at + 100] = expected[at : at + 100] = new
            mapped.flush()

        with Threads() as threads:
            threads.loop(change)
            until_moved(path, threads)
        assert mapped[:] == expected
        forget_pages(file.fileno(), mapped)
        assert mapped[:] == expected
    assert path.read_bytes() == expected


def test_a_removed_file_stays_readable_while_it_is_mapped(
    place: Path, busy: Threads, crowded: Live
) -> None:
    data = noise(4 * MIB)
    path = place / "file"
    path.write_bytes(data)
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as mapped:
        os.fsync(file.fileno())
        path.unlink()
        used = os.statvfs(crowded.path)
        with Threads() as threads:

            def compare(rng: random.Random) -> None:
                forget_pages(file.fileno(), mapped)
                for _ in range(50):
                    at = rng.randrange(len(data) - PAGE)
                    assert mapped[at : at + PAGE] == data[at : at + PAGE]

            threads.loop(compare)
            before = moved_bytes(crowded)
            while moved_bytes(crowded) < before + 2 * IMAGE // 4 and not threads.stop.is_set():
                time.sleep(0.01)
    until = time.monotonic() + PATIENCE_S  # the kernel tells of a last close after it
    while os.statvfs(crowded.path).f_bfree - used.f_bfree < len(data) // PAGE:
        assert time.monotonic() < until, "the space does not come back"


def moved_bytes(live: Live) -> int:
    told = json.loads((live.path / ".retainz/stats.json").read_bytes())
    return int(told["copied_bytes"])


STORM = """
import os, sys
directory, letter = sys.argv[1:]
for number in range(1, 60):
    new = os.path.join(directory, f"new-{letter}")
    with open(new, "wb") as file:
        file.write(letter.encode() * number * 3000)
    os.replace(new, os.path.join(directory, "latest"))
"""


def test_who_opens_a_name_that_many_rename_over_reads_one_version(
    place: Path, busy: Threads
) -> None:
    path = place / "latest"
    path.write_bytes(b"z" * 3000)

    def read(rng: random.Random) -> None:
        data = path.read_bytes()
        assert data == data[:1] * len(data), "two versions in one"
        assert len(data) % 3000 == 0, f"a version is cut at {len(data)} bytes"
        assert data, "a version is empty"

    with Threads() as threads:
        for number in range(4):
            threads.loop(read, number)
        running = [process(STORM, place, letter) for letter in "abc"]
        assert [one.wait(DEADLINE_S) for one in running] == [0, 0, 0]
    assert len(path.read_bytes()) == 59 * 3000


def test_files_come_and_go_while_others_list_them(place: Path, busy: Threads) -> None:
    """Creating, linking, renaming and removing in one directory, with readers of all of it."""
    body = noise(70_000)

    def change(rng: random.Random) -> None:
        one, other = (place / f"f{rng.randrange(6)}" for _ in range(2))
        with suppress(FileNotFoundError, FileExistsError):
            match rng.randrange(4):
                case 0:
                    one.write_bytes(body[: rng.randrange(len(body))])
                case 1:
                    one.unlink()
                case 2:
                    one.rename(other)
                case 3:
                    os.link(one, other)

    def read(rng: random.Random) -> None:
        for entry in os.scandir(place):
            with suppress(FileNotFoundError):
                data = Path(entry.path).read_bytes()
                # What is cut off while it is read may read as zeros.
                assert body.startswith(data.rstrip(b"\0")), "bytes of nobody"

    with Threads() as threads:
        for number in range(4):
            threads.loop(change, number)
            threads.loop(read, number)
        threads.stop.wait(2.0)
    assert {path.name for path in place.iterdir()} <= {f"f{n}" for n in range(6)}
