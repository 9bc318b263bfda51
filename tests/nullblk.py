"""Zoned block devices in the kernel's memory (null_blk), made and removed by root through configfs.

Unlike an NVMe device of QEMU these can have conventional zones, zones that turn read-only or
offline, no scheduler, and can vanish.
"""

from __future__ import annotations

import mmap
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from retainzfs.device import Condition

CONFIGFS = Path("/sys/kernel/config/nullb")
MIB = 1 << 20
SECTOR = 512
TURNS = {Condition.READ_ONLY: "zone_readonly", Condition.OFFLINE: "zone_offline"}

_numbers = count()


class NullBlk:
    """A device that exists, at `target`."""

    def __init__(self, settings: Path, zone_size: int, conventional: int) -> None:
        self.settings = settings
        self.target = f"/dev/{settings.name}"
        self.sysfs = Path("/sys/block", settings.name)
        self.zone_size = zone_size
        self.conventional = conventional

    def turn(self, zone: int, condition: Condition) -> None:
        """Turn a zone READ_ONLY or OFFLINE; zones are numbered behind the conventional ones."""
        sector = (self.conventional + zone) * self.zone_size // SECTOR
        (self.settings / TURNS[condition]).write_text(str(sector))

    def write(self, zone: int, data: bytes) -> None:
        """Write to the start of a zone behind everyone's back; in whole sectors."""
        memory = mmap.mmap(-1, len(data))
        memory[:] = data
        fd = os.open(self.target, os.O_WRONLY | os.O_DIRECT)
        os.pwrite(fd, memory, (self.conventional + zone) * self.zone_size)
        os.close(fd)

    def open(self, count: int) -> None:
        """Let another program open the first zones explicitly, while we have the device."""
        sectors = str(count * self.zone_size // SECTOR)
        subprocess.run(["blkzone", "open", "-f", "-l", sectors, self.target], check=True)

    @property
    def scheduler(self) -> str:
        """The schedulers to choose from, the one in use in brackets."""
        return (self.sysfs / "queue/scheduler").read_text().strip()

    def vanish(self) -> None:
        """Pull the device out, in use or not."""
        (self.settings / "power").write_text("0")

    def remove(self) -> None:
        """Remove it; whoever still has it open sees it vanish."""
        self.settings.rmdir()


@contextmanager
def null_blk(
    *,
    zones: int = 64,
    zone_size: int = 4 * MIB,
    zone_capacity: int | None = None,
    max_open: int = 0,
    max_active: int = 0,
    conventional: int = 0,
    block_size: int = 4096,
    queue_mode: int = 2,
    no_sched: bool = False,
) -> Iterator[NullBlk]:
    """A new device with empty zones, `conventional` of them at the start and not counted in
    `zones`; sizes in bytes, whole MiB. `queue_mode` 0 has no request queue, 2 has one."""
    if not CONFIGFS.exists() and "ZNS_VM" not in os.environ:  # which always has it
        pytest.skip(
            "needs null_blk and configfs: modprobe -a configfs; modprobe null_blk nr_devices=0"
        )
    settings = CONFIGFS / f"zoned{os.getpid()}x{next(_numbers)}"
    settings.mkdir()
    device = NullBlk(settings, zone_size, conventional)
    values = {
        "memory_backed": 1,
        "size": (conventional + zones) * zone_size // MIB,
        "blocksize": block_size,
        "queue_mode": queue_mode,
        "no_sched": int(no_sched),
        "zoned": 1,
        "zone_size": zone_size // MIB,
        "zone_capacity": (zone_capacity or zone_size) // MIB,
        "zone_max_open": max_open,
        "zone_max_active": max_active,
        "zone_nr_conv": conventional,
        "power": 1,
    }
    try:
        for name, value in values.items():
            (settings / name).write_text(str(value))
        yield device
    finally:
        device.remove()
