"""What the kernel tells of a block device: its zones' limits, its cache, the order of its writes.

Source: Documentation/ABI/stable/sysfs-block and Documentation/block/ of Linux.
"""

import os
import re
from pathlib import Path

from retainzfs.errors import WriteOrder

ORDERING = "mq-deadline"  # the scheduler that keeps the writes to a zone in order
PLUGGED = (6, 10)  # from this kernel on the block layer does that itself ("zone write plugging")


def directory(fd: int) -> Path:
    """The sysfs directory of the open block device `fd`."""
    number = os.fstat(fd).st_rdev
    return Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}")


class BlockDevice:
    """The block device with the sysfs directory `path`. Limits in zones (0: none), sizes in bytes.

    A partition has the properties of its disk.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_partition = (path / "partition").exists()
        self.disk = path.resolve().parent if self.is_partition else path

    @property
    def zoned(self) -> bool:
        """Whether its zones must be written in order. A host-aware disk takes any write."""
        return self._text("zoned", "none") == "host-managed"

    @property
    def max_open(self) -> int:
        return int(self._text("max_open_zones", "0"))

    @property
    def max_active(self) -> int:
        return int(self._text("max_active_zones", "0"))

    @property
    def write_granularity(self) -> int:
        """What a write to a zone must be a multiple of."""
        block = self._text("logical_block_size", "512")
        return max(int(block), int(self._text("zone_write_granularity", "0")))

    @property
    def volatile_cache(self) -> bool:
        """Whether what was written may still be in a cache that a power cut empties."""
        return self._text("write_cache", "write back") != "write through"

    @property
    def queued(self) -> bool:
        """Whether requests wait in queues, from which they may leave in another order. Without
        queues the driver gets the writes one by one as they are submitted ("bio-based")."""
        return (self.disk / "mq").exists()

    def keep_order(self, name: str, release: str) -> list[str]:
        """See to it that the kernel `release` keeps the writes to a zone in order.

        Returns the disks whose scheduler had to be set for that. Raises WriteOrder.
        """
        if _version(release) >= PLUGGED:
            return []
        return [disk.path.resolve().name for disk in self._leaves() if disk._schedule(name)]

    def _leaves(self) -> list["BlockDevice"]:
        """The disks that a mapped device (dm-linear and the like) consists of, or itself."""
        below = sorted(self.disk.glob("slaves/*")) or self._nvme_paths()
        if not below:
            return [BlockDevice(self.disk)]
        return [leaf for path in below for leaf in BlockDevice(path)._leaves()]

    def _nvme_paths(self) -> list[Path]:
        """The hidden disks of an NVMe namespace that controllers can share ("native multipath"):
        one for each controller, nvme0c3n1 where the namespace is nvme0n1. It has no queues."""
        disk = self.disk.resolve()
        found = re.fullmatch(r"(nvme\d+)(n\d+)", disk.name)
        return sorted(disk.parent.glob(f"nvme*/{found[1]}c*{found[2]}")) if found else []

    def _schedule(self, name: str) -> bool:
        """Use the ordering scheduler; returns whether that was a change."""
        if not self.queued:
            return False
        file = self.disk / "queue/scheduler"
        if (now := self._scheduler()) == ORDERING:
            return False
        try:
            file.write_text(ORDERING)
        except OSError as error:
            why = os.strerror(error.errno or 0)
        else:
            if self._scheduler() == ORDERING:
                return True
            why = "the kernel did not take it"
        raise WriteOrder(name, now, why, ORDERING, file.resolve())

    def _scheduler(self) -> str:
        found = re.search(r"\[(.*?)\]", self._text("scheduler", "[none]"))
        return found[1] if found else "none"

    def _text(self, attribute: str, missing: str) -> str:
        try:
            return (self.disk / "queue" / attribute).read_text().strip()
        except FileNotFoundError:  # the kernel is older than the attribute
            return missing


def _version(release: str) -> tuple[int, int]:
    """Of a release like 6.1.0-32-amd64."""
    found = re.match(r"(\d+)\.(\d+)", release)
    return (int(found[1]), int(found[2])) if found else (0, 0)
