"""Large files: one writer, several, small pieces, and what others wait meanwhile."""

from __future__ import annotations

import mmap
import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from retainzfs.bench import targets
from retainzfs.bench.figures import interleaved, quantile
from retainzfs.bench.targets import MIB, Bench, Target

PIECE: Final = 4 * MIB
PIECES: Final = (4 << 10, 64 << 10, MIB, 16 * MIB)
SMALL_PIECES: Final = 2048  # so many pieces are written at most
WRITERS: Final = 8


def random_piece(size: int = PIECE) -> mmap.mmap:
    """An aligned piece of random bytes: disks are faster with zeros."""
    piece = mmap.mmap(-1, size)
    piece.write(os.urandom(size))
    return piece


def write_file(path: Path, size: int, piece: mmap.mmap, flags: int = 0) -> float:
    """Write a new file of `size` bytes and fsync it; seconds until it is durable."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags)
    try:
        started = time.perf_counter()
        for _ in range(size // len(piece)):
            if os.write(descriptor, piece) != len(piece):
                raise RuntimeError(f"{path}: short write")
        os.fsync(descriptor)
        return time.perf_counter() - started
    finally:
        os.close(descriptor)


def writer(directory: Path, size: int, piece: mmap.mmap, flags: int = 0) -> Callable[[], float]:
    """Measure one writer; its file is deleted afterwards."""

    def measure() -> float:
        path = directory / "data"
        seconds = write_file(path, size, piece, flags)
        path.unlink()
        return seconds

    return measure


def bench_write(bench: Bench) -> None:
    """One sequential writer, fsync in the end: the disk itself, its filesystem, two pyfuse3
    filesystems; processor time of the daemons."""
    piece = random_piece()
    plain, backing = bench.directory("plain"), bench.directory("backing")
    host = targets.host_type(plain)
    with ExitStack() as stack:
        ours = stack.enter_context(targets.retainzfs(bench, "write", 4 * bench.size))
        null = stack.enter_context(targets.peer(bench, "null", "null"))
        naive = stack.enter_context(targets.peer(bench, "naive", "naive", backing))
        cpu: dict[str, list[float]] = {"retainzfs": [], "null pyfuse3": []}

        def counted(name: str, target: Target) -> Callable[[], float]:
            write = writer(target.path, bench.size, piece)

            def measure() -> float:
                before = target.cpu_s()
                seconds = write()
                cpu[name].append((target.cpu_s() - before) / (bench.size / (1 << 30)))
                return seconds

            return measure

        samples = interleaved(
            bench.repetitions,
            {
                "O_DIRECT": writer(plain, bench.size, piece, os.O_DIRECT),
                host: writer(plain, bench.size, piece),
                "naive pyfuse3": writer(naive.path, bench.size, piece),
                "null pyfuse3": counted("null pyfuse3", null),
                "retainzfs": counted("retainzfs", ours),
            },
        )
    sheet, seconds = bench.sheet, samples["retainzfs"]
    sheet.ratio("write + fsync: of O_DIRECT on the same disk", samples["O_DIRECT"], seconds, 0.95)
    sheet.ratio(f"write + fsync: of buffered {host}", samples[host], seconds)
    sheet.ratio("write + fsync: of naive pyfuse3", samples["naive pyfuse3"], seconds)
    sheet.ratio("write + fsync: of null pyfuse3", samples["null pyfuse3"], seconds)
    ours_cpu, null_cpu = cpu["retainzfs"], cpu["null pyfuse3"]
    sheet.ratio("write: processor time of null's", ours_cpu, null_cpu, 1.5, floor=False)
    for name, values in samples.items():
        speeds = [bench.size / MIB / value for value in values]
        sheet.add(f"write + fsync: {name}", speeds, "MiB/s")


def bench_memory(bench: Bench) -> None:
    """One sequential writer where no disk is slower than the filesystem."""
    piece = random_piece()
    backing = Path("/dev/shm") / bench.work.name
    backing.mkdir()
    try:
        with (
            targets.retainzfs(bench, "memory", 3 * bench.size, backing=backing) as ours,
            targets.peer(bench, "null", "null") as null,
            targets.peer(bench, "naive", "naive", backing) as naive,
        ):
            samples = interleaved(
                bench.repetitions,
                {
                    name: writer(target.path, bench.size, piece)
                    for name, target in (("null", null), ("naive", naive), ("retainzfs", ours))
                },
            )
    finally:
        shutil.rmtree(backing)
    seconds = samples["retainzfs"]
    bench.sheet.ratio("write to memory: of null pyfuse3", samples["null"], seconds, 0.55)
    bench.sheet.ratio("write to memory: of naive pyfuse3", samples["naive"], seconds, 2.0)
    speeds = [bench.size / MIB / value for value in seconds]
    bench.sheet.add("write to memory: retainzfs", speeds, "MiB/s")


def bench_pieces(bench: Bench) -> None:
    """Writes of several sizes."""
    plain = bench.directory("plain")
    host = targets.host_type(plain)
    with (
        targets.retainzfs(bench, "pieces", 4 * bench.size) as ours,
        targets.peer(bench, "null", "null") as null,
    ):
        for nbytes in PIECES:
            piece = random_piece(nbytes)
            size = min(bench.size, SMALL_PIECES * nbytes)
            places = (("null", null.path), (host, plain), ("retainzfs", ours.path))
            samples = interleaved(
                bench.repetitions, {name: writer(path, size, piece) for name, path in places}
            )
            what = f"writes of {nbytes >> 10} KiB + fsync"
            bench.sheet.ratio(f"{what}: of null pyfuse3", samples["null"], samples["retainzfs"])
            bench.sheet.ratio(f"{what}: of buffered {host}", samples[host], samples["retainzfs"])


def bench_writers(bench: Bench) -> None:
    """Eight writers at once, against one that writes as much."""
    piece = random_piece()
    plain = bench.directory("plain")

    def together(directory: Path, flags: int = 0) -> Callable[[], float]:
        def measure() -> float:
            paths = [directory / f"data{number}" for number in range(WRITERS)]
            started = time.perf_counter()
            with ThreadPoolExecutor(WRITERS) as pool:
                jobs = [
                    pool.submit(write_file, path, bench.size // WRITERS, piece, flags)
                    for path in paths
                ]
                for job in jobs:
                    job.result()
            seconds = time.perf_counter() - started
            for path in paths:
                path.unlink()
            return seconds

        return measure

    with targets.retainzfs(bench, "writers", 4 * bench.size) as ours:
        samples = interleaved(
            bench.repetitions,
            {
                "O_DIRECT": together(plain, os.O_DIRECT),
                "one": writer(ours.path, bench.size, piece),
                "all": together(ours.path),
            },
        )
    bench.sheet.ratio(f"{WRITERS} writers: of O_DIRECT", samples["O_DIRECT"], samples["all"])
    bench.sheet.ratio(f"{WRITERS} writers: of one of ours", samples["one"], samples["all"])


def bench_latency(bench: Bench) -> None:
    """How long others wait for a name while a save goes on at full speed."""
    piece = random_piece()
    p50, p99 = [], []
    with targets.retainzfs(bench, "latency", 4 * bench.size) as ours:
        for _ in range(bench.repetitions):
            os.sync()
            path = ours.path / "data"
            save = threading.Thread(target=write_file, args=(path, bench.size, piece))
            save.start()
            waits: list[float] = []
            while save.is_alive():
                # The kernel would know a name that is there; one that is not it asks for each time.
                missing = ours.path / f"missing{len(waits)}"
                started = time.perf_counter()
                missing.exists()
                waits.append(1e3 * (time.perf_counter() - started))
                time.sleep(0.002)  # as a program that does other things, too
            save.join()
            path.unlink()
            p50.append(quantile(waits, 0.5))
            p99.append(quantile(waits, 0.99))
    bench.sheet.add("lookup during a save: p50", p50, "ms")
    bench.sheet.add("lookup during a save: p99", p99, "ms", 5.0, floor=False)
