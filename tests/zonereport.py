"""The zones of a block device as other programs report them: blkzone of util-linux and zbd of
zbd-utils, to hold against the report of ours."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import NamedTuple

from retainzfs.device import Condition, Device, open_target
from retainzfs.device.kernel import KernelDevice
from retainzfs.device.protocol import ACTIVE

SECTOR = 512
WITHOUT_POINTER = {Condition.NOT_WP, Condition.FULL, Condition.READ_ONLY, Condition.OFFLINE}
BLKZONE = re.compile(
    r"start: (0x\w+), len (0x\w+), cap (0x\w+), wptr (0x\w+) .* zcond: ?(\d+)\(..\) \[type: (\d)\("
)


class Zone(NamedTuple):
    """In bytes; the pointer from the start of the device, None where the condition has none."""

    start: int
    length: int
    capacity: int
    pointer: int | None
    condition: Condition


def blkzone(target: str) -> list[Zone]:
    """Every zone of the device as `blkzone report` prints it, in sectors from the zone's start."""
    zones = []
    for line in _printed("blkzone", "report", target):
        found = BLKZONE.search(line)
        assert found is not None, f"blkzone report printed: {line}"
        start, length, capacity, pointer = (int(text, 16) * SECTOR for text in found.groups()[:4])
        zones.append(_zone(start, length, capacity, start + pointer, int(found[5])))
    return zones


def zbd(target: str) -> list[Zone]:
    """Every zone of the device as `zbd report` prints it."""
    zones = []
    for line in _printed("zbd", "report", "-csv", target)[1:]:
        _, _, start, length, capacity, pointer, condition, *_ = line.split(", ")
        zones.append(
            _zone(int(start), int(length), int(capacity), int(pointer), int(condition, 16))
        )
    return zones


def check_report(device: Device) -> None:
    """Both programs say of the zones of this device what it says itself."""
    assert isinstance(device, KernelDevice)
    size = device.geometry.zone_size
    ours = [
        _zone(
            device.address(zone.index),
            size,
            zone.capacity,
            device.address(zone.index, zone.write_pointer),
            zone.condition,
        )
        for zone in device.report()
    ]
    first = device.address(0) // size
    for program in (blkzone, zbd):
        theirs = program(device.name)[first : first + len(ours)]
        for index, (own, other) in enumerate(zip(ours, theirs, strict=True)):
            assert own == other, f"zone {index}: ours {own}, {program.__name__}'s {other}"


def check_target(target: str) -> None:
    """`check_report` of a device that is not mounted."""
    device = open_target(target, readonly=True)
    try:
        check_report(device)
    finally:
        device.close()


def check_mount(directory: Path) -> None:
    """What a volume believes of its zones is so on its device. Nothing may go on there meanwhile.

    Which of the active zones are open is the drive's business. A zone that the volume has taken
    and not yet written is an empty one to the drive.
    """
    told = json.loads((directory / ".retainz/stats.json").read_bytes())
    ours = json.loads((directory / ".retainz/zones.json").read_bytes())
    theirs = [zone for zone in blkzone(told["target"]) if zone.condition is not Condition.NOT_WP]
    for own, other in zip(ours, theirs, strict=True):
        what = f"zone {own['index']}: ours {own}, blkzone's {other}"
        state = Condition[own["condition"].upper()] if own["condition"] != "open" else None
        if other.pointer is None:
            assert state is other.condition, what
            continue
        unused = other.condition is Condition.EMPTY and not own["write_pointer"]
        active = state in (None, Condition.CLOSED)
        assert active == (other.condition in ACTIVE) or unused, what
        assert own["write_pointer"] == other.pointer - other.start, what


def _zone(start: int, length: int, capacity: int, pointer: int, condition: int) -> Zone:
    known = Condition(condition)
    return Zone(start, length, capacity, None if known in WITHOUT_POINTER else pointer, known)


def _printed(*command: str) -> list[str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
    return done.stdout.splitlines()
