"""Small files: made, listed, unpacked, durable by many writers at once; many of them mounted."""

from __future__ import annotations

import itertools
import os
import shutil
import tarfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from retainzfs.bench import targets
from retainzfs.bench.figures import interleaved
from retainzfs.bench.targets import MIB, Bench, Target, call

FILES: Final = 2000
LISTED: Final = 10_000
CONTENT: Final = os.urandom(4096)
UNPACKED: Final = 5000
UNPACKED_SIZE: Final = 16 << 10
WRITERS: Final = 16
DURABLE: Final = 40  # files of each writer
MOUNTED: Final = 100_000


def _rounds(top: Path) -> Callable[[], Path]:
    """A new directory each time; its name has no number, which would be a generation's."""
    letters = ("".join(pair) for pair in itertools.product("abcdefghij", repeat=2))

    def another() -> Path:
        directory = top / f"round{next(letters)}"
        directory.mkdir()
        return directory

    return another


def bench_small(bench: Bench) -> None:
    """Create, stat, unlink, list."""
    plain = bench.directory("plain")
    host = targets.host_type(plain)
    steps: dict[str, Callable[[Path], object]] = {
        "create + 4 KiB + close": _create,
        "stat": os.stat,
        "unlink": os.unlink,
    }
    samples: dict[str, dict[str, list[float]]] = {step: {} for step in steps}
    with (
        targets.retainzfs(bench, "small", max(bench.size, 1 << 30)) as ours,
        targets.peer(bench, "null", "null") as null,
    ):
        places = {"null": null.path, host: plain, "retainzfs": ours.path}
        rounds = {name: _rounds(path) for name, path in places.items()}
        for _ in range(bench.repetitions):
            made = {name: another() for name, another in rounds.items()}
            for (step, act), name in itertools.product(steps.items(), places):
                samples[step].setdefault(name, []).append(_each(made[name], act))
        listed = {name: _listed(path / "many") for name, path in places.items()}
        readdir = interleaved(bench.repetitions, listed)
    for step, taken in {**samples, f"readdir of {LISTED}": readdir}.items():
        goal = 0.6 if step.startswith("create") else None
        bench.sheet.ratio(f"{step}: of null pyfuse3", taken["null"], taken["retainzfs"], goal)
        bench.sheet.ratio(f"{step}: of {host}", taken[host], taken["retainzfs"])
    for name, seconds in samples["create + 4 KiB + close"].items():
        bench.sheet.add(f"create + 4 KiB + close: {name}", [FILES / each for each in seconds], "/s")


def _each(directory: Path, act: Callable[[Path], object]) -> float:
    """Seconds for all files of a directory."""
    started = time.perf_counter()
    for number in range(FILES):
        act(directory / f"file{number}")
    return time.perf_counter() - started


def _create(path: Path) -> None:
    path.write_bytes(CONTENT)


def _listed(directory: Path) -> Callable[[], float]:
    """Measure reading a new directory of many files."""
    directory.mkdir()
    for number in range(LISTED):
        os.close(os.open(directory / f"file{number}", os.O_CREAT | os.O_WRONLY))

    def measure() -> float:
        started = time.perf_counter()
        if len(os.listdir(directory)) != LISTED:
            raise RuntimeError(f"{directory}: entries are missing")
        return time.perf_counter() - started

    return measure


def bench_unpack(bench: Bench) -> None:
    """Unpack small files by tar, with a final sync, outside any stream."""
    plain, archive = bench.directory("plain"), bench.work / "unpack.tar"
    host = targets.host_type(plain)
    _make_archive(archive)

    def unpack(top: Path) -> Callable[[], float]:
        another = _rounds(top)

        def measure() -> float:
            directory = another()
            started = time.perf_counter()
            call("tar", "-xf", archive, "-C", directory)
            call("sync", "-f", directory)
            return time.perf_counter() - started

        return measure

    size = (bench.repetitions + 2) * UNPACKED * UNPACKED_SIZE * 2
    with (
        targets.retainzfs(bench, "unpack", size) as ours,
        targets.peer(bench, "null", "null") as null,
    ):
        samples = interleaved(
            bench.repetitions,
            {
                host: unpack(plain),
                "null": unpack(null.path),
                "retainzfs": unpack(ours.path),
            },
        )
    what = f"unpack {UNPACKED} x 16 KiB + sync"
    bench.sheet.ratio(f"{what}: of {host}", samples[host], samples["retainzfs"], 0.5)
    bench.sheet.ratio(f"{what}: of null pyfuse3", samples["null"], samples["retainzfs"])
    bench.sheet.ratio(f"{what}: null pyfuse3 of {host}", samples[host], samples["null"])


def _make_archive(path: Path) -> None:
    tree = path.with_suffix("")
    for number in range(UNPACKED):
        directory = tree / f"package{number // 100}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"module{number}.py").write_bytes(os.urandom(UNPACKED_SIZE))
    with tarfile.open(path, "w") as archive:
        archive.add(tree, arcname="unpacked")
    shutil.rmtree(tree)


def bench_durable(bench: Bench) -> None:
    """Sixteen writers of small files, each durable when it is closed."""
    plain = bench.directory("plain")
    host = targets.host_type(plain)

    def write(path: Path, *, fsync: bool) -> None:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        os.write(descriptor, CONTENT)
        if fsync:
            os.fsync(descriptor)
        os.close(descriptor)

    def together(top: Path, *, fsync: bool) -> Callable[[], float]:
        another = _rounds(top)

        def measure() -> float:
            directory = another()

            def some(writer: int) -> None:
                for number in range(DURABLE):
                    write(directory / f"writer{writer}-{number}", fsync=fsync)

            started = time.perf_counter()
            with ThreadPoolExecutor(WRITERS) as pool:
                list(pool.map(some, range(WRITERS)))
            return time.perf_counter() - started

        return measure

    with targets.retainzfs(bench, "durable", bench.size, "-o", "commit=close") as ours:
        before = ours.stats()
        samples = interleaved(
            bench.repetitions,
            {
                host: together(plain, fsync=True),
                "retainzfs": together(ours.path, fsync=False),
            },
        )
        after = ours.stats()
    what = f"{WRITERS} writers of durable 4 KiB files"
    bench.sheet.ratio(f"{what}: of {host}", samples[host], samples["retainzfs"], 0.7)
    files = bench.repetitions * WRITERS * DURABLE
    rounds = after["commit_rounds"] - before["commit_rounds"]
    flushes = after["device"]["flushes"] - before["device"]["flushes"]
    bench.sheet.add(f"{what}: files a round", files / rounds, "")
    bench.sheet.add(f"{what}: device flushes a round", flushes / rounds, "")


def bench_mount(bench: Bench) -> None:
    """Mount a filesystem of many files, and what of memory they take."""
    size = max(bench.size, 1 << 30)
    image = bench.work / "mount.img"
    with targets.retainzfs(bench, "mount", size) as ours:
        empty = targets.memory(ours.pid)
        for number in range(MOUNTED):
            directory = ours.path / f"part{chr(97 + number // 10_000)}"
            directory.mkdir(exist_ok=True)
            (directory / f"file{number}").write_bytes(CONTENT)
    mount = bench.work / "mount"
    seconds, sizes = [], []
    for _ in range(bench.repetitions):
        started = time.perf_counter()
        with targets.served(
            mount, *targets.command("mount", "--foreground", image, mount)
        ) as target:
            seconds.append(time.perf_counter() - started)
            sizes.append((targets.memory(target.pid) - empty) / MOUNTED)
            _check(target)
    bench.sheet.add(f"mount of {MOUNTED} files", seconds, "s", 5.0, floor=False)
    bench.sheet.add("memory of a file", sizes, "B", 1024.0, floor=False)


def _check(target: Target) -> None:
    found = sum(len(os.listdir(path)) for path in target.path.iterdir() if path.name != ".retainz")
    if found != MOUNTED:
        raise RuntimeError(f"{target.path}: {found} of {MOUNTED} files after a mount")


def bench_tools(bench: Bench) -> None:
    """cp, rsync and tar of one large file, durable in the end."""
    source = bench.work / "source"
    with source.open("wb") as file:
        for _ in range(bench.size // (64 * MIB)):
            file.write(os.urandom(64 * MIB))
    plain = bench.directory("plain")
    host = targets.host_type(plain)
    tools: dict[str, Callable[[Path], list[str | Path]]] = {
        "cp": lambda to: ["cp", source, to / "copy"],
        "tar": lambda to: ["tar", "-cf", to / "copy", "-C", source.parent, source.name],
    }
    if shutil.which("rsync"):
        tools["rsync"] = lambda to: ["rsync", "-W", "--inplace", source, to / "copy"]
    else:
        bench.sheet.leave_out("rsync", "it is not installed")

    def copying(tool: str, to: Path) -> Callable[[], float]:
        def measure() -> float:
            started = time.perf_counter()
            call(*tools[tool](to))
            call("sync", to / "copy")
            seconds = time.perf_counter() - started
            (to / "copy").unlink()
            return seconds

        return measure

    with targets.retainzfs(bench, "tools", 4 * bench.size) as ours:
        for tool in tools:
            samples = interleaved(
                bench.repetitions,
                {host: copying(tool, plain), "retainzfs": copying(tool, ours.path)},
            )
            bench.sheet.ratio(f"{tool} + sync: of {host}", samples[host], samples["retainzfs"])
