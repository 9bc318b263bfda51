"""The part of `scripts/bench zoned` that runs in the guest; bench_zoned.py starts it.

    bench_zoned_guest.py JOB RESULTS

One process runs all filesystems of one seed, since programs are slow to start there. What it
measures goes to the file RESULTS line by line, so that a guest that dies takes only the rest with
it.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import random
import shutil
import subprocess
import sys
import time
import traceback
import zlib
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, TextIO

from bench_zoned_systems import (
    Btrfs,
    Counter,
    Counts,
    F2fs,
    Retainzfs,
    StuckError,
    System,
    Zoned,
)
from bench_zoned_workload import METADATA_SIZE, Phase, Save, Stream, Workload, plan

MIB = 1 << 20
CHUNK = MIB  # bytes of one write
POOL_SIZE = 4 * MIB
MOUNT = Path("/tmp/bench-zoned")
RETRY_AFTER_S = 10.0  # what a filesystem gets to clean up before a save is tried again
LIBC = ctypes.CDLL(None, use_errno=True)


def log(message: str) -> None:
    print(f"{time.monotonic():7.1f} {message}", file=sys.stderr, flush=True)


def sync(directory: Path) -> None:
    """Have all of the filesystem written."""
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)  # retainzfs: FUSE does not pass on the next one
        if LIBC.syncfs(descriptor) != 0:
            number = ctypes.get_errno()
            raise OSError(number, os.strerror(number), str(directory))
    finally:
        os.close(descriptor)


def kernel_log() -> list[str]:
    """Return the last lines of the guest's kernel log, which say why a filesystem stopped."""
    done = subprocess.run(["dmesg", "--notime"], capture_output=True, text=True, check=False)
    return done.stdout.splitlines()[-12:]


class Replay:
    """The workload on one filesystem, from formatting to the check after a remount."""

    def __init__(
        self, system: System, counter: Counter, workload: Workload, seed: int, results: TextIO
    ) -> None:
        self.system = system
        self.counter = counter
        self.workload = workload
        self.seed = seed
        self.results = results
        self.top = system.directory
        self.pool = random.Random(seed).randbytes(POOL_SIZE)
        self.live: dict[Stream, deque[Save]] = {}
        self.written = 0  # bytes, by the programs
        self.failures: list[str] = []

    def run(self) -> None:
        """Replay until the end, or until a save fails for good; then check what is there."""
        self.system.zoned.empty()
        self.system.format()
        self.system.mount()
        try:
            self.tell("fresh", available=available(self.top))
            for stream in (*self.workload.streams, self.workload.milestones):
                (self.top / stream.name).mkdir()
                self.live[stream] = deque()
            self.system.prepare(self.workload)
            for phase in self.workload.phases:
                if not self.phase(phase):
                    break
        finally:
            self.system.unmount()
        self.system.mount()
        try:
            self.check()
        finally:
            self.system.unmount()

    def tell(self, event: str, **fields: Any) -> None:
        record = {"system": self.system.name, "seed": self.seed, "event": event, **fields}
        print(json.dumps(record), file=self.results, flush=True)
        os.fsync(self.results.fileno())
        shown = {name: value for name, value in fields.items() if name != "durable_s"}
        log(f"{self.system.name}, seed {self.seed}: {event} {shown}")

    def phase(self, phase: Phase) -> bool:
        """Write a phase's saves; tell whether all of them succeeded."""
        failures = len(self.failures)
        all_kept = all(self.write(save) is not None for save in phase.milestones)
        all_kept = all_kept and self.settle()
        before = after = self.counts()
        written_before = written = self.written
        started = time.monotonic()
        seconds: list[float] = []
        for save in phase.saves if all_kept else ():
            taken = self.write(save)
            if taken is None:
                break
            self.retire(save.stream)
            if not self.settle():
                break
            seconds.append(taken)
            after, written = self.counts(), self.written  # what a failed save wrote is left out
        complete = all_kept and len(seconds) == len(phase.saves)
        self.tell(
            "phase",
            load=phase.load,
            asked=len(phase.saves),
            saves=len(seconds),
            complete=complete,
            failures=self.failures[failures:],
            written=written - written_before,
            elapsed_s=round(time.monotonic() - started, 1),
            durable_s=[round(taken, 4) for taken in seconds],
            **asdict(after - before),
        )
        return complete

    def counts(self) -> Counts:
        return self.counter.read(self.system.zoned.path, self.system.conventional)

    def settle(self) -> bool:
        """Have all written and cleaned up, for which there are minutes between real saves."""
        try:
            sync(self.top)
        except OSError as error:
            self.failed(error)
            return False
        return True

    def failed(self, error: OSError) -> None:
        live = sum(save.size for saves in self.live.values() for save in saves)
        name = errno.errorcode.get(error.errno or 0, str(error))
        if not self.failures:
            log("\n".join(kernel_log()))
        self.failures.append(f"{name} at {live / self.system.zoned.capacity:.0%}")
        log(f"{self.system.name}: {error}: {self.failures[-1]}")

    def write(self, save: Save) -> float | None:
        """Write a save, once more if it fails; return the seconds until it was durable."""
        for pause_s in (RETRY_AFTER_S, 0.0):
            started = time.perf_counter()
            try:
                self.write_files(save)
            except OSError as error:
                self.failed(error)
                self.remove(save)
                time.sleep(pause_s)
            else:
                taken = time.perf_counter() - started
                self.written += save.size
                self.live[save.stream].append(save)
                return taken
        return None

    def write_files(self, save: Save) -> None:
        self.path(save).mkdir()
        for path, pieces in self.files(save):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            try:
                self.system.opened(descriptor, save.stream)
                for piece in pieces:
                    if os.write(descriptor, piece) != len(piece):
                        raise OSError(errno.ENOSPC, "short write", str(path))
                os.fsync(descriptor)
            finally:
                os.close(descriptor)

    def path(self, save: Save) -> Path:
        return self.top / save.stream.name / f"step-{save.number}"

    def files(self, save: Save) -> Iterator[tuple[Path, Iterator[bytes]]]:
        """Yield the save's files, the one that completes it last, with what is to be in them."""
        for index, size in enumerate(save.shards):
            yield self.path(save) / f"__{index}_0.distcp", self.content(save, index, size)
        yield self.path(save) / ".metadata", self.content(save, len(save.shards), METADATA_SIZE)

    def content(self, save: Save, index: int, size: int) -> Iterator[bytes]:
        for offset in range(0, size, CHUNK):
            length = min(CHUNK, size - offset)
            name = f"{save.stream.name}/{save.number}/{index}/{offset}"
            start = zlib.crc32(name.encode()) % (POOL_SIZE - length)
            yield self.pool[start : start + length]

    def retire(self, stream: Stream) -> None:
        saves = self.live[stream]
        if len(saves) > stream.keep:
            self.remove(saves.popleft())

    def remove(self, save: Save) -> None:
        """Delete a save, or what there is of it."""
        try:
            shutil.rmtree(self.path(save))
        except OSError as error:
            log(f"{self.system.name}: {error}")

    def check(self) -> None:
        """Read all that must be there, and compare."""
        right = 0
        wrong: list[str] = []
        for save in (save for saves in self.live.values() for save in saves):
            for path, pieces in self.files(save):
                try:
                    with path.open("rb", buffering=0) as file:
                        same = all(read(file.fileno(), len(p)) == p for p in pieces)
                        same = same and not file.read(1)
                        right += file.tell()
                except OSError as error:
                    log(f"{self.system.name}: {error}")
                    same = False
                if not same:
                    wrong.append(str(path.relative_to(self.top)))
        self.tell("check", right=right, wrong=wrong)


def read(descriptor: int, size: int) -> bytes:
    """Read so many bytes, fewer only at the end."""
    pieces: list[bytes] = []
    while size and (piece := os.read(descriptor, size)):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def available(directory: Path) -> int:
    """Return the bytes that the filesystem says can be written."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def systems(names: list[str]) -> list[System]:
    limited, unlimited = (Zoned(path) for path in os.environ["ZNS_VM_ZONED"].split())
    [conventional] = os.environ["ZNS_VM_CONVENTIONAL"].split()
    known: dict[str, System] = {
        "retainzfs": Retainzfs("retainzfs", limited, MOUNT),
        "f2fs": F2fs("f2fs", limited, MOUNT, conventional),
        "btrfs": Btrfs("btrfs", limited, MOUNT),
        "btrfs-unlimited": Btrfs("btrfs-unlimited", unlimited, MOUNT),
    }
    return [known[name] for name in names]


def main(arguments: list[str]) -> int:
    """Replay one seed on each filesystem."""
    job = json.loads(Path(arguments[0]).read_text())
    MOUNT.mkdir(exist_ok=True)
    counter = Counter()
    failed = False
    with open(arguments[1], "a") as results:
        for system in systems(job["systems"]):
            zoned = system.zoned
            workload = plan(
                job["seed"], zoned.capacity, zoned.zone_capacity, job["loads"], job["turnover"]
            )
            replay = Replay(system, counter, workload, job["seed"], results)
            try:
                replay.run()
            except (
                Exception
            ) as error:  # a filesystem's failure is a result, and the next one's turn
                traceback.print_exc()
                replay.tell("failed", why=str(error))
                failed = True
                if isinstance(error, StuckError):
                    break  # its mount is in the way
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
