"""Bad input: whatever an image holds, a message and an exit code; no crash, no hang.

Every case has a number, which is its seed. RETAINZFS_BAD_IMAGES=N runs N times as many cases;
RETAINZFS_BAD_IMAGES_FROM=S begins at case S, to see one again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import select
import signal
import stat
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
import trio

from retainzfs import errors, fsck, mounts, recovery, unmounting
from retainzfs.device.memory import MemoryDevice
from retainzfs.errors import RetainzError
from retainzfs.fs import Filesystem
from retainzfs.layout import BLOCK
from retainzfs.namespace import Inode, Namespace
from retainzfs.volume import ROOT, Volume
from tests import contradictions, mutations
from tests.contradictions import Unfit
from tests.helpers import DIRECTORY, mounted, put, small_device
from tests.mutations import Log, Medium

pytestmark = pytest.mark.volume

TIMES = int(os.environ.get("RETAINZFS_BAD_IMAGES", "1"))
FIRST = int(os.environ.get("RETAINZFS_BAD_IMAGES_FROM", "0"))
CPU_S = 10.0  # for one case, a hundred times what most take
READ_MAX = 64 << 10  # bytes that are read of a file at its start, at its end and at each extent
INODES_MAX = 200  # that are looked at
REFUSED = (errors.Damaged, errors.ForeignTarget, errors.NewerFormat)


# --- volumes to be made wrong -------------------------------------------------------------------


class History:
    """One volume at three moments, and another volume."""

    def __init__(self) -> None:
        self.old, self.torn, self.clean = trio.run(_lived, bytes(range(16)), 1)
        self.other = trio.run(_lived, b"o" * 16, 2)[2]
        self.namespace: Namespace = trio.run(_recovered, self.clean.device()).namespace


@functools.cache
def history() -> History:
    return History()


async def _recovered(device: MemoryDevice) -> recovery.Recovered:
    return await recovery.recover(device)


async def _lived(uuid: bytes, seed: int) -> tuple[Medium, Medium, Medium]:
    """Return a volume early in its life, as after a power cut, and unmounted cleanly."""
    rng = random.Random(seed)
    device = small_device(zones=24)
    await device.start()
    await Volume.format(device, uuid=uuid, now_ns=1)
    async with mounted(device) as volume:
        await _first(volume, rng)
        await volume.syncfs()
        old = Medium.of(device)
    async with mounted(device) as volume:
        await _second(volume, rng)
        await volume.syncfs()
        torn = Medium.of(device)
    return old, torn, Medium.of(device)


async def _first(volume: Volume, rng: random.Random) -> None:
    run = (await volume.make(ROOT, b"run", DIRECTORY, 0, 0)).ino
    await volume.setxattr(run, b"user.retainz.keep_last", b"2")
    for number in range(3):
        await put(volume, run, b"step-%d.pt" % number, rng.randbytes(30_000))
    deep = ROOT
    for name in (b"a", b"b", b"c"):
        deep = (await volume.make(deep, name, DIRECTORY, 0, 0)).ino
        await put(volume, deep, b"small", rng.randbytes(100))
    for i, length in enumerate((100, 5000, 60_000, 200_000)):
        await put(volume, ROOT, b"f%d" % i, rng.randbytes(length))
    await volume.link(volume.lookup(ROOT, b"f0").ino, deep, b"linked")
    await volume.make(ROOT, b"symlink", 0o120777, 0, 0, target=b"a/b")
    await volume.make(ROOT, b"fifo", 0o010644, 0, 0)
    await volume.setxattr(ROOT, b"user.note", b"text")


async def _second(volume: Volume, rng: random.Random) -> None:
    steps = (await volume.make(ROOT, b"runs", DIRECTORY, 0, 0)).ino
    for number in range(3):
        step = (await volume.make(steps, b"checkpoint-%d" % number, DIRECTORY, 0, 0)).ino
        await put(volume, step, b"model.safetensors", rng.randbytes(20_000))
    sparse = await put(volume, ROOT, b"sparse", b"1" * 100)
    await volume.write(sparse, 1 << 30, b"2" * 5000)
    await volume.write(volume.lookup(ROOT, b"f3").ino, 50_000, rng.randbytes(70_000))
    await volume.syncfs()
    await volume.unlink(ROOT, b"f2")
    orphan = await put(volume, ROOT, b"orphan", rng.randbytes(9000))
    volume.open(orphan)
    await volume.syncfs()
    await volume.unlink(ROOT, b"orphan")


# --- what is done with one ----------------------------------------------------------------------


async def examine(device: MemoryDevice) -> str:
    """Check, mount, use and check again; return what came of it."""
    await device.start()
    before = Medium.of(device)
    report = fsck.Report("mem")
    checked = await _told(lambda: fsck.examine(device, report, scrub=True))
    assert Medium.of(device) == before, "a check changed something"
    mounted_ = await _told(lambda: _used(device))
    if mounted_ in REFUSED:
        assert Medium.of(device) == before, "a refused mount changed something"
        assert checked is mounted_ or report.damaged, "a mount was refused and the check passed"
    if mounted_ is not None:
        return mounted_.__name__
    await device.start()
    again = fsck.Report("mem")
    assert await _told(lambda: fsck.examine(device, again, scrub=True)) is None
    if not report.damaged:
        assert not again.damaged, f"mounting did damage: {again.findings}"
    return "damaged" if report.damaged else "sound"


async def _told(act: Callable[[], Awaitable[object]]) -> type[RetainzError] | None:
    """Do something; return the sort of error of ours that it ended with."""
    try:
        await act()
    except BaseException as error:
        found = error
        while isinstance(found, BaseExceptionGroup) and len(found.exceptions) == 1:
            found = found.exceptions[0]
        if not isinstance(found, RetainzError):
            raise
        assert str(found), "an error has no message"
        return type(found)
    return None


async def _used(device: MemoryDevice) -> None:
    async with mounted(device) as volume:
        json.dumps([volume.statistics(), volume.zone_map()], allow_nan=False)
        json.dumps(volume.generations(ROOT), allow_nan=False)
        for inode in list(walk(volume))[:INODES_MAX]:
            await _looked_at(volume, inode)
        await _changed(volume)
        json.dumps([volume.statistics(), volume.generations(ROOT)], allow_nan=False)


def walk(volume: Volume) -> Iterator[Inode]:
    """Yield every inode with a name; a directory is met once."""
    found = [ROOT]
    met: set[int] = set()
    while found:
        inode = volume.inode(found.pop())
        assert not (inode.is_dir and inode.ino in met), "a directory has two names"
        met.add(inode.ino)
        yield inode
        found += [ino for _, ino in volume.entries(inode.ino)] if inode.is_dir else []


async def _looked_at(volume: Volume, inode: Inode) -> None:
    Filesystem._attributes(inode)
    assert volume.path(inode.ino).startswith("/")
    json.dumps(volume.explain(inode.ino), allow_nan=False)
    for name in (*volume.listxattr(inode.ino), b"user.retainz.hint", b"user.retainz.state"):
        with contextlib.suppress(errors.FSError):
            volume.getxattr(inode.ino, name)
    if inode.is_dir:
        return
    places = {0, max(0, inode.size - READ_MAX), *(e.block * BLOCK for e in inode.extents[:50])}
    if not inode.is_file:
        await volume.read(inode.ino, 0, inode.size)  # as readlink does
    for at in places:
        with contextlib.suppress(errors.FSError):
            await volume.read(inode.ino, at, READ_MAX)


async def _changed(volume: Volume) -> None:
    """Do a little of everything to what is there; ENOSPC and the like are good answers."""
    rng = random.Random(0)
    names = [(d.ino, n) for d in walk(volume) if d.is_dir for n, _ in volume.entries(d.ino)]
    for parent, name in rng.sample(names, min(6, len(names))):
        with contextlib.suppress(RetainzError):
            inode = volume.lookup(parent, name)
            await volume.setattr(inode.ino, mode=0o600, mtime_ns=5)
            await volume.setxattr(inode.ino, b"user.retainz.keep_last", b"1")
            if inode.is_file:
                await volume.write(inode.ino, inode.size, b"more" * 2000)
                await volume.setattr(inode.ino, size=inode.size // 2)
        with contextlib.suppress(RetainzError):
            await volume.rename(parent, name, ROOT, b"renamed")
        with contextlib.suppress(RetainzError):
            await volume.unlink(ROOT, b"renamed")
    with contextlib.suppress(RetainzError):
        run = (await volume.make(ROOT, b"new", DIRECTORY, 0, 0)).ino
        await volume.setxattr(run, b"user.retainz.reap", b"1")
        for number in range(4):
            ino = await put(volume, run, b"step-%d.pt" % number, b"x" * 20_000)
            await volume.setxattr(ino, b"user.retainz.commit", b"1")
    with contextlib.suppress(RetainzError):
        await volume.syncfs()
        await volume.collect()


@contextlib.contextmanager
def bounded(case: object) -> Iterator[None]:
    """Fail when it takes too much processor time; say which case it was when anything fails."""

    def stop(number: int, frame: object) -> None:
        raise AssertionError(f"more than {CPU_S} s of processor time")

    previous = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, CPU_S)
    try:
        yield
    except BaseException as error:
        error.add_note(f"case {case}")
        raise
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, previous)


def mutated(name: str, seed: int) -> Medium | None:
    """Return the medium of a case, None when it would be no other one."""
    rng = random.Random(f"{name} {seed}")
    past = history()
    medium = (past.clean if rng.random() < 0.7 else past.torn).copy()
    if name in mutations.RAW:
        other = rng.choice((past.old, past.old, past.torn, past.other))
        mutations.RAW[name](medium, other, rng)
        return medium
    try:
        log = Log(medium)
        if name in mutations.SEALED:
            mutations.SEALED[name](log, past.namespace, rng)
        else:
            log.append(contradictions.CONTRADICTIONS[name](past.namespace, rng))
        log.seal()
    except Unfit:
        return None
    return medium


def outcomes(name: str, count: int) -> dict[str, int]:
    found: dict[str, int] = {}
    for seed in range(FIRST, FIRST + count * TIMES):
        with bounded((name, seed)):
            medium = mutated(name, seed)
            if medium is not None:
                outcome = trio.run(examine, medium.device())
                found[outcome] = found.get(outcome, 0) + 1
    return found


@pytest.mark.parametrize("moment", ["old", "torn", "clean", "other"])
def test_what_was_not_changed_is_sound(moment: str) -> None:
    medium: Medium = getattr(history(), moment)
    assert trio.run(examine, medium.device()) == "sound"


@pytest.mark.parametrize("name", mutations.RAW)
def test_changed_bytes_and_pointers(name: str) -> None:
    outcomes(name, 25)


@pytest.mark.parametrize("name", mutations.SEALED)
def test_wrong_structures_with_right_checksums(name: str) -> None:
    outcomes(name, 40)


@pytest.mark.parametrize("name", contradictions.CONTRADICTIONS)
def test_records_that_contradict_the_rest(name: str) -> None:
    found = outcomes(name, 6)
    if name in contradictions.REFUSED:
        assert set(found) == {"Damaged"}


# --- images, and the real commands --------------------------------------------------------------

# Runs commands as their own processes would, one line of JSON each, without starting Python anew.
SERVER = """
import contextlib, io, json, resource, sys, traceback
from retainzfs.cli import main
resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30))
for line in sys.stdin:
    out, err, code = io.StringIO(), io.StringIO(), None
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = main(json.loads(line))
        except BaseException:
            traceback.print_exc()
    print(json.dumps([code, out.getvalue(), err.getvalue()]), flush=True)
"""
PATIENCE_S = 30.0  # for one command


class Commands:
    """The command line in a process of its own that has little memory; a place to mount at."""

    def __init__(self, base: Path) -> None:
        self.image, self.path, self.log = base / "image", base / "mount", base / "log"
        self.path.mkdir()
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def run(self, *arguments: str) -> tuple[int, str]:
        """Return the exit code and what was said. Nothing but 0, 1 and 3 is right, and no crash."""
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        print(json.dumps(arguments), file=process.stdin, flush=True)
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE_S)
        assert ready, f"{arguments} hangs"
        code, out, err = json.loads(process.stdout.readline())
        assert code in (0, 1, 3), f"{arguments}: exit code {code}: {err}"
        assert "Traceback" not in out + err
        assert "mistake" not in err, err
        assert not code or out + err, f"{arguments} fails without a word"
        return code, out + err

    def close(self) -> None:
        if mounts.find_mount(str(self.path)) is not None:
            unmounting.detach(str(self.path), lazy=True)
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(PATIENCE_S)


@pytest.fixture
def commands(tmp_path: Path) -> Iterator[Commands]:
    made = Commands(tmp_path)
    yield made
    made.close()


def image_of(name: str, seed: int) -> bytes | None:
    """Return the image of a case."""
    if name not in mutations.HEAD:
        medium = mutated(name, seed)
        return None if medium is None else bytes(medium.image())
    rng = random.Random(f"{name} {seed}")
    medium = rng.choice((history().clean, history().torn))
    image = medium.image()
    mutations.HEAD[name](image, medium, rng)
    return bytes(image)


def try_image(commands: Commands, image: bytes, *, mount: bool) -> None:
    commands.image.write_bytes(image)
    code, _ = commands.run("fsck", "--scrub", str(commands.image))
    same, told = commands.run("fsck", "--scrub", "--json", str(commands.image))
    assert same == code
    if code != 1:
        assert json.loads(told)["damaged"] == (code == 3)
    assert commands.image.read_bytes() == image, "a check changed the image"
    if not mount:
        return
    target, directory = str(commands.image), str(commands.path)
    refused, said = commands.run("mount", target, directory, "--log", str(commands.log))
    if refused:
        # Too few zones may take bytes; that is known only once the log goes on.
        assert refused == code or "metadata zones are full" in said, said
        if refused == code:
            assert commands.image.read_bytes() == image, f"a refused mount changed it: {said}"
        return
    read_all(commands.path)
    commands.run("umount", directory)
    assert "Traceback" not in commands.log.read_text()
    again, said = commands.run("fsck", "--scrub", str(commands.image))
    assert code or not again, f"mounting did damage: {said}"


def read_all(root: Path) -> None:
    """Look at everything as programs do; EIO is a good answer."""
    for directory, names, files in os.walk(root, onerror=None):
        for name in (*names, *files):
            path = os.path.join(directory, name)
            with contextlib.suppress(OSError):
                status = os.lstat(path)
                os.listxattr(path, follow_symlinks=False)
                if stat.S_ISLNK(status.st_mode):
                    os.readlink(path)
                if stat.S_ISREG(status.st_mode):
                    with open(path, "rb") as file:
                        file.read(READ_MAX)
                        file.seek(max(0, status.st_size - READ_MAX))
                        file.read(READ_MAX)
    assert json.loads((root / ".retainz/stats.json").read_bytes())["failed"] is None


def try_images(commands: Commands, name: str, count: int, *, mounts_of: int) -> None:
    for number in range(count * TIMES):
        seed = FIRST + number
        image = image_of(name, seed)
        try:
            if image is not None:
                try_image(commands, image, mount=number % count < mounts_of)
        except BaseException as error:
            error.add_note(f"case {(name, seed)}")
            raise


@pytest.mark.fuse
@pytest.mark.parametrize("name", mutations.HEAD)
def test_wrong_heads(commands: Commands, name: str) -> None:
    try_images(commands, name, 16, mounts_of=4)


@pytest.mark.fuse
@pytest.mark.parametrize("name", [*mutations.RAW, *mutations.SEALED])
def test_wrong_images(commands: Commands, name: str) -> None:
    try_images(commands, name, 4, mounts_of=2)
