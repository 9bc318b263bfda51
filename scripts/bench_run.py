#!/usr/bin/env python3
"""Measure retainzfs beside its peers on this machine; `scripts/bench` sets up and calls it.

Absolute figures of one machine say little, so what counts are ratios within one run: every
repetition measures all peers one after another, and the medians over the repetitions are compared.
Exit code 1 when a goal is missed.

    write    1 GiB in 4 MiB pieces and fsync: through the mount, O_DIRECT on the same disk (as
             `dd oflag=direct bs=4M` does it), and two pyfuse3 filesystems (bench_peers.py)
    memory   the daemon with 10,000 files and four writers, and how long mounting them takes,
             after a clean unmount and after a kill
    unpack   5,000 files of 16 KiB by tar with a final sync, outside any stream, against ext4 on a
             loop device on the same disk (needs root) and the null pyfuse3 filesystem, which shows
             how much of the time is FUSE's
    planning where the bytes of one generation go, by bench_planning.py

`scripts/bench zoned` is a comparison of its own, on a zoned device: scripts/bench zoned --help
"""

from __future__ import annotations

import argparse
import itertools
import json
import mmap
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
MIB = 1 << 20
PIECE = 4 * MIB
READY_S = 60  # a mount that does not answer by then never will
FILES = 10_000
WRITERS = 4
UNPACK_FILES = 5000
UNPACK_SIZE = 16 << 10

MEMORY_MAX_MIB = 200.0
MOUNT_MAX_S = 2.0
DIRECT_MIN = 0.8
NAIVE_MIN = 1.5
EXT4_MIN = 0.5


@dataclass(frozen=True)
class Row:
    """One figure; `goal` is its bound, a floor or a ceiling, if it has one."""

    name: str
    value: float
    unit: str
    goal: float | None = None
    floor: bool = True

    @property
    def met(self) -> bool | None:
        """Tell whether the goal is met; None without a goal."""
        if self.goal is None:
            return None
        return self.value >= self.goal if self.floor else self.value < self.goal


@dataclass
class Bench:
    """One measure's scratch directory on the disk, and where it puts what it finds."""

    work: Path
    size: int
    repetitions: int
    rows: list[Row]

    def row(
        self, name: str, value: float, unit: str, goal: float | None = None, floor: bool = True
    ) -> None:
        """Keep and print one figure."""
        row = Row(name, value, unit, goal, floor)
        self.rows.append(row)
        bound = "" if goal is None else f"  goal {'>=' if floor else '<'} {goal:g}"
        missed = "  MISSED" if row.met is False else ""
        print(f"{name:<52}{value:>10.3f} {unit:<6}{bound}{missed}", flush=True)

    def directory(self, name: str) -> Path:
        """Return a new directory on the measured disk."""
        path = self.work / name
        path.mkdir()
        return path


def call(*command: str | Path) -> None:
    """Run a command; its failure is the bench's."""
    subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)


@contextmanager
def served(mount: Path, *command: str | Path) -> Iterator[subprocess.Popen[bytes]]:
    """Run a foreground FUSE daemon over `mount` until the block ends."""
    log = mount.with_suffix(".log")
    with log.open("a") as stderr:
        daemon = subprocess.Popen([str(part) for part in command], stderr=stderr)
    try:
        deadline = time.monotonic() + READY_S
        while not os.path.ismount(mount):
            if daemon.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{command[0]} does not serve {mount}: {log.read_text()}")
            time.sleep(0.01)
        yield daemon
    finally:
        if os.path.ismount(mount):
            call("fusermount3", "-u", mount)
        try:
            daemon.wait(READY_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            raise


@contextmanager
def retainzfs(bench: Bench, name: str, size: int) -> Iterator[tuple[Path, int]]:
    """Format an image on the measured disk and serve it; yield its mount point and the pid."""
    image, mount = bench.work / f"{name}.img", bench.directory(name)
    call("retainzfs", "mkfs", image, "--size", str(size))
    with served(mount, "retainzfs", "mount", "--foreground", image, mount) as daemon:
        yield mount, daemon.pid


def random_piece() -> mmap.mmap:
    """Return one aligned piece of random bytes: disks are faster with zeros."""
    piece = mmap.mmap(-1, PIECE)
    piece.write(os.urandom(PIECE))
    return piece


def write_file(path: Path, size: int, piece: mmap.mmap, flags: int = 0) -> float:
    """Write and fsync a new file of `size` bytes; return the seconds until it is durable."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags)
    try:
        started = time.perf_counter()
        for _ in range(size // PIECE):
            if os.write(descriptor, piece) != PIECE:
                raise RuntimeError(f"{path}: short write")
        os.fsync(descriptor)
        return time.perf_counter() - started
    finally:
        os.close(descriptor)


def interleaved(repetitions: int, peers: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Return the median seconds of each peer, measured in turn in every repetition."""
    times: dict[str, list[float]] = {name: [] for name in peers}
    for _ in range(repetitions):
        for name, measure in peers.items():
            os.sync()
            times[name].append(measure())
    return {name: statistics.median(values) for name, values in times.items()}


def bench_write(bench: Bench) -> None:
    """Compare one sequential writer on four targets."""
    piece = random_piece()
    raw, null, naive = (bench.directory(name) for name in ("raw", "null", "naive"))
    backing = bench.directory("backing")
    peers = HERE / "bench_peers.py"

    def writer(directory: Path, flags: int = 0) -> Callable[[], float]:
        def measure() -> float:
            path = directory / "data"
            seconds = write_file(path, bench.size, piece, flags)
            path.unlink()
            return seconds

        return measure

    with (
        retainzfs(bench, "write", 4 * bench.size) as (mount, _),
        served(null, sys.executable, peers, "null", null),
        served(naive, sys.executable, peers, "naive", naive, backing),
    ):
        targets = {
            "O_DIRECT": writer(raw, os.O_DIRECT),
            "naive pyfuse3": writer(naive),
            "null pyfuse3": writer(null),
            "retainzfs": writer(mount),
        }
        seconds = interleaved(bench.repetitions, targets)
    for name, value in seconds.items():
        bench.row(
            f"write {bench.size // MIB} MiB + fsync: {name}", bench.size / MIB / value, "MiB/s"
        )
    ours = seconds["retainzfs"]
    bench.row("write: retainzfs / O_DIRECT", seconds["O_DIRECT"] / ours, "x", DIRECT_MIN)
    bench.row("write: retainzfs / naive", seconds["naive pyfuse3"] / ours, "x", NAIVE_MIN)
    bench.row("write: retainzfs / null", seconds["null pyfuse3"] / ours, "x")


def memory_of(pid: int, key: str) -> float:
    """Return a line of /proc/PID/status in MiB; proc(5) gives it in kB."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) / 1024
    raise RuntimeError(f"no {key} of process {pid}")


def bench_memory(bench: Bench) -> None:
    """Fill a filesystem with files, write to it from four threads, mount it again."""
    piece = random_piece()
    share = bench.size // WRITERS
    with retainzfs(bench, "memory", 2 * bench.size) as (mount, pid):
        for number in range(FILES):
            directory = mount / f"part{number // 100}"
            directory.mkdir(exist_ok=True)
            (directory / f"file{number}").write_bytes(bytes(piece[:4096]))
        with ThreadPoolExecutor(WRITERS) as pool:
            jobs = [
                pool.submit(write_file, mount / f"writer{n}", share, piece) for n in range(WRITERS)
            ]
            for job in jobs:
                job.result()
        bench.row(
            f"memory: VmHWM, {FILES} files, {WRITERS} writers",
            memory_of(pid, "VmHWM"),
            "MiB",
            MEMORY_MAX_MIB,
            floor=False,
        )
        bench.row("memory: VmRSS afterwards", memory_of(pid, "VmRSS"), "MiB")
    bench_mount(bench, bench.work / "memory.img", mount)


def bench_mount(bench: Bench, image: Path, mount: Path) -> None:
    """Time the mount command on an image that holds many files."""

    def mounting() -> float:
        started = time.perf_counter()
        call("retainzfs", "mount", image, mount)
        seconds = time.perf_counter() - started
        if len(list(mount.iterdir())) < FILES // 100:
            raise RuntimeError(f"{mount}: files are missing after a mount")
        return seconds

    def clean() -> float:
        seconds = mounting()
        call("retainzfs", "umount", mount)
        return seconds

    def killed() -> float:
        with served(mount, "retainzfs", "mount", "--foreground", image, mount) as daemon:
            (mount / "unfinished").write_bytes(b"x")
            daemon.kill()
            daemon.wait()
            call("fusermount3", "-u", "-z", mount)
        return clean()

    seconds = interleaved(bench.repetitions, {"clean": clean, "kill": killed})
    bench.row(f"mount: {FILES} files", seconds["clean"], "s", MOUNT_MAX_S, floor=False)
    bench.row(f"mount: {FILES} files, after a kill", seconds["kill"], "s", MOUNT_MAX_S, floor=False)


def make_archive(path: Path) -> None:
    """Make the tar file to unpack, in 50 directories."""
    tree = path.with_suffix("")
    for number in range(UNPACK_FILES):
        directory = tree / f"package{number // 100}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"module{number}.py").write_bytes(os.urandom(UNPACK_SIZE))
    with tarfile.open(path, "w") as archive:
        archive.add(tree, arcname="unpacked")
    shutil.rmtree(tree)


def bench_unpack(bench: Bench) -> None:
    """Unpack many small files here and on ext4."""
    if os.geteuid() != 0:
        print("unpack: NOT RUN: a loop device with ext4 needs root")
        return
    archive = bench.work / "unpack.tar"
    make_archive(archive)
    ext4, null, image = bench.directory("ext4"), bench.directory("null"), bench.work / "ext4.img"
    # Nothing is deleted between the repetitions, so that none pays for the one before.
    image_size = (bench.repetitions + 2) * UNPACK_FILES * UNPACK_SIZE * 2
    with image.open("wb") as file:
        file.truncate(image_size)
    call("mkfs.ext4", "-q", "-F", image)
    call("mount", "-o", "loop", image, ext4)

    def unpacker(top: Path) -> Callable[[], float]:
        rounds = itertools.count()

        def measure() -> float:
            directory = top / f"round{chr(ord('a') + next(rounds))}"
            directory.mkdir()
            started = time.perf_counter()
            call("tar", "-xf", archive, "-C", directory)
            call("sync", "-f", directory)
            return time.perf_counter() - started

        return measure

    try:
        with (
            retainzfs(bench, "unpack", image_size) as (mount, _),
            served(null, sys.executable, HERE / "bench_peers.py", "null", null),
        ):
            targets = {"ext4": ext4, "null pyfuse3": null, "retainzfs": mount}
            seconds = interleaved(
                bench.repetitions, {name: unpacker(top) for name, top in targets.items()}
            )
    finally:
        call("umount", ext4)
    for name, value in seconds.items():
        bench.row(f"unpack {UNPACK_FILES} x 16 KiB + sync: {name}", value, "s")
    ours = seconds["retainzfs"]
    bench.row("unpack: ext4 / retainzfs", seconds["ext4"] / ours, "x", EXT4_MIN)
    bench.row("unpack: null pyfuse3 / retainzfs", seconds["null pyfuse3"] / ours, "x")


def bench_planning(bench: Bench) -> None:
    """Time the placement of one generation, by the script that measures only this."""
    command = [sys.executable, str(HERE / "bench_planning.py")]
    out = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False).stdout
    lines = [line.split() for line in out.splitlines()]
    bar_ms = next(float(words[1]) for words in lines if words[0] == "bar:")
    figures = [words for words in lines if len(words) == 5 and words[1].isdigit()]
    for policy, zones, median_ms, *_ in figures:
        name = f"planning a generation: {policy}, {zones} zones"
        bench.row(name, float(median_ms), "ms", bar_ms, floor=False)


MEASURES: dict[str, Callable[[Bench], None]] = {
    "write": bench_write,
    "memory": bench_memory,
    "unpack": bench_unpack,
    "planning": bench_planning,
}


def parse(arguments: list[str]) -> argparse.Namespace:
    """Return the parsed command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("measures", nargs="*", metavar="MEASURE", help="default: all of them")
    parser.add_argument("--dir", default=os.environ.get("TMPDIR", "/var/tmp"), help="on the disk")
    parser.add_argument("--mib", type=int, default=1024, help="size of the sequential write")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="also write the figures there")
    args = parser.parse_args(arguments)
    unknown = set(args.measures) - MEASURES.keys()
    if unknown:
        parser.error(f"no measure {', '.join(sorted(unknown))}; there are {', '.join(MEASURES)}")
    return args


def describe() -> dict[str, str | int | float | None]:
    """Return what the figures depend on beside the code: other load spoils them."""
    return {
        "cpus": os.cpu_count(),
        "kernel": platform.release(),
        "load_1min": round(os.getloadavg()[0], 2),
    }


def main(arguments: list[str]) -> int:
    """Run the chosen measures."""
    args = parse(arguments)
    rows: list[Row] = []
    machine = describe()
    print(", ".join(f"{key} {value}" for key, value in machine.items()))
    for name in args.measures or MEASURES:
        with tempfile.TemporaryDirectory(prefix="retainzfs-bench.", dir=args.dir) as work:
            MEASURES[name](Bench(Path(work), args.mib * MIB, args.repetitions, rows))
    if args.json:
        figures = [{**asdict(row), "met": row.met} for row in rows]
        text = json.dumps({"machine": machine, "figures": figures}, indent=2)
        Path(args.json).write_text(f"{text}\n")
    return int(any(row.met is False for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
