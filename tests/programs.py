"""Programs that use a mount in different ways until it dies; `python -m tests.programs` runs them.

Arguments: mount, directory for their records, seed. Each program is a process of its own and writes
down what was promised to it (see `promises`). Ends with 0 when the mount is dead for all of them.
"""

from __future__ import annotations

import errno
import json
import mmap
import os
import random
import signal
import struct
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from tests.promises import History, Record, checksum

PAGE: Final = 4096
KEPT: Final = 2  # generations
SAVE_MIN: Final = 100 * PAGE  # bytes
SHARDS: Final = ("__0_0.distcp", "__1_0.distcp", "__2_0.distcp", ".metadata")
WORD: Final = 8  # bytes that a store changes at once
SAVING: Final = "saving"  # the note: a path, and what its files are going to hold

Program = Callable[[Path, Record, random.Random], None]


def saves(root: Path, record: Record, rng: random.Random) -> None:
    """Generations of one file: what was closed is saved, and the last two stay."""
    run = _stream(root / "files")
    while True:
        for path in _retiring(path for path in run.iterdir() if _size(path) >= SAVE_MIN):
            record.will(path, None)
        path = run / f"step-{_next_number(run)}.msgpack"
        data = rng.randbytes(rng.randrange(SAVE_MIN, SAVE_MIN + 10 * PAGE))
        _announce(record, path, {path: data})
        record.doubt(path)
        path.write_bytes(data)
        record.did(path, data)


def sharded_saves(root: Path, record: Record, rng: random.Random) -> None:
    """Generations of several files, whole with a marker, as DCP of torch writes them."""
    run = _stream(root / "shards")
    while True:
        for path in _retiring(path for path in run.iterdir() if (path / ".metadata").exists()):
            for name in SHARDS:
                record.will(path / name, None)
        directory = run / f"step-{_next_number(run)}"
        directory.mkdir()
        *shards, marker = (directory / name for name in SHARDS)
        contents = {path: rng.randbytes(20 * PAGE + 1) for path in shards}
        contents[marker] = data = rng.randbytes(1000)
        _announce(record, directory, contents)
        for path in shards:
            _synced(path, contents[path], record)
        beside = directory / ".metadata.tmp"
        beside.write_bytes(data)
        record.doubt(marker)
        beside.rename(marker)
        record.did(marker, data)


def settings(root: Path, record: Record, rng: random.Random) -> None:
    """A file that is replaced by another one: the old one or the new one is there, and whole."""
    path = root / "config.json"
    for number in range(1 << 30):
        beside = root / f"config.{number % 3}"
        data = rng.randbytes(rng.choice((10, 300, 9000)))
        beside.write_bytes(data)
        record.will(path, data)
        beside.rename(path)
        if rng.random() < 0.3:
            _sync(root)
            record.did(path, data)


def logs(root: Path, record: Record, rng: random.Random) -> None:
    path = root / "log"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    while True:
        at = os.fstat(fd).st_size
        data = rng.randbytes(rng.randrange(1, 3000))
        os.write(fd, data)
        os.fsync(fd)
        record.did(path, data, at)


def maps(root: Path, record: Record, rng: random.Random) -> None:
    """Stores to a shared map; they are durable after msync."""
    path, pages = root / "array", 40
    with path.open("a+b") as file:
        if os.fstat(file.fileno()).st_size < pages * PAGE:
            for page in range(pages):
                record.doubt(path, bytes(WORD), page * PAGE)
            os.ftruncate(file.fileno(), pages * PAGE)
        shared = mmap.mmap(file.fileno(), pages * PAGE)
    while True:
        words = {page * PAGE: rng.randbytes(WORD) for page in rng.sample(range(pages), 5)}
        for at, word in words.items():
            record.will(path, word, at)
            struct.pack_into("8s", shared, at, word)
        shared.flush()
        for at, word in words.items():
            record.did(path, word, at)


def deletions(root: Path, record: Record, rng: random.Random) -> None:
    """Files that come, and are gone for good once their directory was synced."""
    directory = root / "spool"
    directory.mkdir(exist_ok=True)
    while True:
        path = directory / rng.randbytes(8).hex()
        _synced(path, rng.randbytes(rng.randrange(10 * PAGE)), record)
        files = sorted(directory.iterdir())
        if len(files) > 10:
            gone = rng.sample(files, 6)
            for path in gone:
                record.will(path, None)
                path.unlink()
            _sync(directory)
            for path in gone:
                record.did(path, None)
            os.setxattr(root, "user.retainz.gc", b"1")


def unfinished(root: Path, history: History) -> list[str]:
    """Return the saves that count as complete and are not, bit for bit, what was to be saved."""
    announced: dict[str, dict[str, str]] = {}  # the newest attempt counts
    for save, contents in history.noted(SAVING):
        announced[save] = contents
    broken = []
    for run in (root / "files", root / "shards"):
        for row in json.loads(os.getxattr(run, "user.retainz.generations")) if run.exists() else ():
            if row["state"] != "complete":
                continue
            [save] = [path for path in run.iterdir() if _number(path) == row["number"]]
            for name, told in announced[str(save.relative_to(root))].items():
                path = root / name
                if not path.exists() or checksum(path.read_bytes()) != told:
                    broken.append(f"{save} counts as complete, but {name} is not as it was saved")
    return broken


def _announce(record: Record, save: Path, contents: dict[Path, bytes]) -> None:
    """Note what the files of a save are going to hold."""
    told = {record.name(path): checksum(data) for path, data in contents.items()}
    record.note(SAVING, record.name(save), told)


def _stream(directory: Path) -> Path:
    directory.mkdir(exist_ok=True)
    os.setxattr(directory, "user.retainz.keep_last", b"%d" % KEPT)
    os.setxattr(directory, "user.retainz.reap", b"1")
    return directory


def _number(path: Path) -> int:
    return int(path.stem.removeprefix("step-"))


def _next_number(run: Path) -> int:
    return max(map(_number, run.iterdir()), default=0) + 1


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0  # the filesystem has deleted it meanwhile


def _retiring(whole: Iterable[Path]) -> list[Path]:
    """Return the generations that may go once there is one more."""
    return sorted(whole, key=_number)[: -(KEPT - 1)]


def _synced(path: Path, data: bytes, record: Record) -> None:
    record.doubt(path)
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    record.did(path, data)


def _sync(directory: Path) -> None:
    fd = os.open(directory, os.O_RDONLY)
    os.fsync(fd)
    os.close(fd)


PROGRAMS: Final[tuple[Program, ...]] = (
    saves,
    sharded_saves,
    settings,
    logs,
    maps,
    deletions,
)


def _run(program: Program, root: Path, records: Path, seed: str) -> int:
    """Return the exit code."""
    record = Record(records / program.__name__, root)
    try:
        program(root, record, random.Random(f"{seed} {program.__name__}"))
    except OSError as error:
        if error.errno in (errno.ENOTCONN, errno.ECONNABORTED):
            return 0
        traceback.print_exc()
    return 1


def start(root: Path, records: Path, seed: str) -> dict[int, Program]:
    """Fork a process for each program; return which is which."""
    children = {}
    for program in PROGRAMS:
        child = os.fork()
        if not child:
            code = 1
            try:
                code = _run(program, root, records, seed)
            finally:
                sys.stderr.flush()
                os._exit(code)
        children[child] = program
    return children


def main() -> int:
    children = start(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3])
    failed = False
    while children:
        child, status = os.wait()
        program = children.pop(child)
        code = os.waitstatus_to_exitcode(status)
        # A page of a map that cannot be read any more is a SIGBUS.
        if code and not (program is maps and code == -signal.SIGBUS):
            print(f"{program.__name__} ended with {code}", file=sys.stderr)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
