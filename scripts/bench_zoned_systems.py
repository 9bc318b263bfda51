"""Zoned namespaces, and the filesystems that `scripts/bench zoned` makes on them, in the guest."""

from __future__ import annotations

import fcntl
import json
import os
import struct
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from bench_zoned_workload import Stream, Workload

SECTOR = 512
BLKREPORTZONE = 0xC0101282
BLKRESETZONE = 0x40101283
ZONE_STRUCT_SIZE = 64

F_SET_RW_HINT = 1036  # linux/fcntl.h; the fcntl module does not have these
SHORT, MEDIUM, LONG, EXTREME = 2, 3, 4, 5


class StuckError(Exception):
    """A program did not end, and cannot be ended: it waits for the kernel."""


def call(*command: str | Path, limit_s: float = 120.0) -> None:
    """Run a program; what it complained about is in the error."""
    told = " ".join(map(str, command))
    running = subprocess.Popen(
        list(map(str, command)), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        said, _ = running.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        running.kill()  # and nobody waits for that
        raise StuckError(f"{told}: no end within {limit_s:g} s") from None
    if running.returncode:
        raise RuntimeError(f"{told}: exit code {running.returncode}: {said.strip()}")


class Zoned:
    """A zoned namespace, looked at and emptied past any filesystem."""

    def __init__(self, path: str) -> None:
        self.path = path
        queue = Path("/sys/block", Path(path).name, "queue")
        (queue / "scheduler").write_text("mq-deadline")  # kernels before 6.10 need it
        self.zone_count = int((queue / "nr_zones").read_text())
        self.zone_size = int((queue / "chunk_sectors").read_text()) * SECTOR
        self.max_active = int((queue / "max_active_zones").read_text())
        self.zone_capacity = self._zone_capacity()

    @property
    def capacity(self) -> int:
        return self.zone_count * self.zone_capacity

    def _zone_capacity(self) -> int:
        """Return the capacity of the first zone; all have the same."""
        buffer = bytearray(16 + ZONE_STRUCT_SIZE)
        struct.pack_into("<QII", buffer, 0, 0, 1, 0)
        with open(self.path, "rb", buffering=0) as device:
            fcntl.ioctl(device, BLKREPORTZONE, buffer)
        [sectors] = struct.unpack_from("<Q", buffer, 16 + 32)
        return int(sectors) * SECTOR

    def empty(self) -> None:
        """Reset every zone."""
        sectors = self.zone_count * self.zone_size // SECTOR
        with open(self.path, "r+b", buffering=0) as device:
            fcntl.ioctl(device, BLKRESETZONE, struct.pack("<QQ", 0, sectors))


@dataclass(frozen=True)
class Counts:
    """What the devices of a filesystem have done so far."""

    zoned: int  # bytes written to the namespace
    conventional: int  # bytes written to the second device, where there is one
    resets: int

    def __sub__(self, other: Counts) -> Counts:
        return Counts(
            self.zoned - other.zoned,
            self.conventional - other.conventional,
            self.resets - other.resets,
        )


class Counter:
    """Asks the machine's host what the devices themselves have counted."""

    def __init__(self) -> None:
        self.port = os.open(os.environ["ZNS_VM_CONTROL"], os.O_RDWR)
        self.zoned = os.environ["ZNS_VM_ZONED"].split()
        self.conventional = os.environ["ZNS_VM_CONVENTIONAL"].split()

    def read(self, zoned: str, conventional: str | None) -> Counts:
        os.write(self.port, b"counts\n")
        answer = b""
        while not answer.endswith(b"\n"):
            answer += os.read(self.port, 1 << 16)
        counted = json.loads(answer)
        first = counted["zoned"][self.zoned.index(zoned)]
        second = 0
        if conventional:
            index = self.conventional.index(conventional)
            second = counted["conventional"][index]["bytes_written"]
        return Counts(first["bytes_written"], second, first["zones_reset"])


@dataclass
class System:
    """A filesystem on a namespace."""

    name: str
    zoned: Zoned
    directory: Path
    conventional: str | None = None

    def format(self) -> None:
        raise NotImplementedError

    def mount(self) -> None:
        raise NotImplementedError

    def unmount(self) -> None:
        call("umount", self.directory)

    def prepare(self, workload: Workload) -> None:
        """Say of each stream's directory what the filesystem wants to know."""

    def opened(self, descriptor: int, stream: Stream) -> None:
        """Say of a new file what the filesystem wants to know."""


class Retainzfs(System):
    """As the README says: attributes on the directories of the streams, once."""

    def format(self) -> None:
        call(sys.executable, "-m", "retainzfs", "mkfs", "--force", self.zoned.path)

    def mount(self) -> None:
        call(sys.executable, "-m", "retainzfs", "mount", self.zoned.path, self.directory)

    def unmount(self) -> None:
        call(sys.executable, "-m", "retainzfs", "umount", self.directory)

    def prepare(self, workload: Workload) -> None:
        for stream in workload.streams:
            keep = str(stream.keep).encode()
            os.setxattr(self.directory / stream.name, "user.retainz.keep_last", keep)
        os.setxattr(self.directory / workload.milestones.name, "user.retainz.anchor", b"1")


class F2fs(System):
    """With lifetimes by F_SET_RW_HINT: finite ones in three classes, milestones in the last."""

    def format(self) -> None:
        assert self.conventional is not None
        call("mkfs.f2fs", "-f", "-m", "-c", self.zoned.path, self.conventional)

    def mount(self) -> None:
        assert self.conventional is not None
        call("mount", "-t", "f2fs", self.conventional, self.directory)

    def prepare(self, workload: Workload) -> None:
        ordered = sorted(workload.streams, key=lambda stream: stream.lifetime)
        classes = (SHORT, MEDIUM, MEDIUM, LONG)
        names = [stream.name for stream in ordered]
        self.hints = dict(zip(names, classes, strict=True)) | {workload.milestones.name: EXTREME}

    def opened(self, descriptor: int, stream: Stream) -> None:
        fcntl.fcntl(descriptor, F_SET_RW_HINT, struct.pack("<Q", self.hints[stream.name]))


class Btrfs(System):
    """It cleans up behind its commits, so it gets one each second: the replay compresses time."""

    def format(self) -> None:
        call("mkfs.btrfs", "-f", "-m", "single", "-d", "single", self.zoned.path)

    def mount(self) -> None:
        call("mount", "-t", "btrfs", "-o", "commit=1", self.zoned.path, self.directory)
