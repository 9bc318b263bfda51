"""What is measured: directories of several filesystems, mounted for as long as a block lasts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from retainzfs import mounts, session
from retainzfs.bench.figures import Sheet

READY_S: Final = 60.0  # a mount that does not answer by then never will
TICKS: Final = os.sysconf("SC_CLK_TCK")
MIB: Final = 1 << 20


@dataclass
class Bench:
    """A scratch directory on the measured disk, how much to do, and where figures go."""

    work: Path
    size: int  # bytes of a large file
    repetitions: int
    sheet: Sheet

    def directory(self, name: str) -> Path:
        path = self.work / name
        path.mkdir()
        return path


@dataclass(frozen=True)
class Target:
    """A directory to measure in; `pid` of the daemon behind it."""

    path: Path
    pid: int

    def cpu_s(self) -> float:
        """Processor time of the daemon so far (proc(5): fields 14 and 15 of stat)."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / TICKS

    def stats(self) -> dict[str, Any]:
        """What `retainzfs status` tells, as far as the mount does."""
        told: dict[str, Any] = json.loads((self.path / ".retainz/stats.json").read_text())
        return told


def memory(pid: int | str, key: str = "VmRSS") -> int:
    """A line of /proc/PID/status, VmRSS or VmHWM, in bytes; `pid` may be "self"."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) << 10
    raise KeyError(key)


def call(*command: str | Path) -> None:
    """Run a command; its failure is the bench's."""
    subprocess.run([str(part) for part in command], check=True, stdout=subprocess.DEVNULL)


@contextmanager
def served(mount: Path, *command: str | Path) -> Iterator[Target]:
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
        yield Target(mount, daemon.pid)
    finally:
        if os.path.ismount(mount):
            call("fusermount3", "-u", mount)
        try:
            daemon.wait(READY_S)
        except subprocess.TimeoutExpired:
            daemon.kill()
            raise


def command(*arguments: str | Path) -> list[str | Path]:
    """The `retainzfs` command of this installation."""
    return [sys.executable, "-m", "retainzfs", *arguments]


@contextmanager
def retainzfs(
    bench: Bench, name: str, size: int, *options: str, backing: Path | None = None
) -> Iterator[Target]:
    """A new filesystem in an image on the measured disk, or in the directory `backing`."""
    image, mount = (backing or bench.work) / f"{name}.img", bench.directory(name)
    call(*command("mkfs", image, "--size", str(size)))
    with served(mount, *command("mount", "--foreground", *options, image, mount)) as target:
        yield target


@contextmanager
def peer(bench: Bench, kind: str, name: str, *arguments: str | Path) -> Iterator[Target]:
    """One of the filesystems of `peers`."""
    mount = bench.directory(name)
    with served(
        mount, sys.executable, "-m", "retainzfs.bench.peers", kind, mount, *arguments
    ) as at:
        session.raise_read_ahead(str(mount))  # as a mount of retainzfs does
        yield at


def host_type(path: Path) -> str:
    """The type of the filesystem that a directory is on."""
    mount = mounts.mount_of(str(path), mounts.all_mounts())
    return "its filesystem" if mount is None else mount.fstype


def drop_caches() -> None:
    """Let the next reads come from the disk; needs root (proc_sys_vm(5))."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3")
